"""A GradScaler whose scale changes: training is as without it, bit for bit, as with plain DDP."""

from __future__ import annotations

import pytest

from tests.hipress import scaling_ranks as ranks
from tests.hipress.launch import launch
from tests.hipress.test_training import together
from tests.tiers import first_fast

STATEFUL = {
    "topk": {"ratio": 0.1},
    "dgc": {"ratio": 0.1, "clip": 0.1},
    "signum": {},
    "powersgd": {"rank": 2},
}
OTHERS = {"onebit_group": {"strategy": "ps"}, "ef21": {}, "diana": {}, "sidco_e": {}}
OTHERS |= {"threshold": {}, "sparseloco": {}, "none": {}}


@pytest.mark.parametrize(
    "way, codecs",
    first_fast([("wrap", STATEFUL), ("attach", STATEFUL), ("Synchronizer", STATEFUL | OTHERS)]),
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_the_scale_changes_nothing(way, codecs):
    """Residuals, momenta and references once stayed in the scale of their step, and signs were
    divided by the scale."""
    found = together(launch(ranks.by_codec, 2, way, codecs))
    assert {name: len(set(digests)) for name, digests in found.items()} == dict.fromkeys(codecs, 1)


def test_gradients_that_are_unscaled_before_they_are_averaged():
    scaled, plain = together(launch(ranks.unscaled_first, 2))
    assert scaled == plain


@pytest.mark.slow
def test_a_model_without_a_scaler_beside_one_with():
    alone, beside = together(launch(ranks.beside_another, 2))
    assert alone[1] == beside[1]


def test_float16_keeps_its_range():
    for far in launch(ranks.half, 2):
        assert far < 0.02
