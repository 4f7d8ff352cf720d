"""The cases of PyTorch's own tests of FSDP2, with hipress's collectives."""

from __future__ import annotations

import pytest

from tests.hipress import fsdp2_ranks as ranks
from tests.hipress.launch import launch


@pytest.mark.slow
def test_cases_of_pytorch_end_with_the_same_bits():
    for found in launch(ranks.beside_native, 2):
        assert {name: differ for name, differ in found.items() if differ} == {}


@pytest.mark.slow
def test_checkpoints_are_those_of_fsdp2(tmp_path):
    for found in launch(ranks.saved, 2, str(tmp_path)):
        assert found == {"sharded": True, "full": True}
