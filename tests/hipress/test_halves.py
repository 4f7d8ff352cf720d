"""Residuals kept as bfloat16: ranks stay equal, checkpoints load into either type."""

from __future__ import annotations

import pytest

import hipress
from tests.hipress import half_ranks
from tests.hipress.common import error_of
from tests.hipress.launch import launch


def test_ranks_stay_equal_and_checkpoints_load_into_either_type():
    results = launch(half_ranks.halved, 2, "onebit_group")
    assert len({one["digest"] for one in results}) == 1
    for one in results:
        assert one["dtypes"] == [{"torch.bfloat16"}, {"torch.float32"}, {"torch.bfloat16"}]
        assert one["sides"] == ["aggregator", "worker"]
        assert one["widened"]
        assert one["narrowed"]


def test_a_misspelt_residual_is_told():
    from hipress import codecs

    kind, message, _ = error_of(codecs.compile_codec, "onebit_group", {"residul": "bfloat16"})
    assert (kind, message) == (
        "ConfigError",
        "compressor 'onebit_group' has no parameter 'residul'; did you mean 'residual'?",
    )
    with pytest.raises(hipress.HipressError, match="float32, bfloat16, not 'float16'"):
        codecs.compile_codec("onebit_group", {"residual": "float16"})
