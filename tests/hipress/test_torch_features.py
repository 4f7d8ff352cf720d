"""Features of torch that plain DDP works with."""

from __future__ import annotations

import pytest

from tests.hipress import torch_features_ranks as ranks
from tests.hipress.launch import launch
from tests.hipress.ways_ranks import WAYS
from tests.tiers import first_fast


@pytest.mark.parametrize("way", first_fast(["Outer", *(way for way in WAYS if way != "Outer")]))
def test_a_default_device_that_is_not_the_parameters(way):
    (first, plain), (second, others) = launch(ranks.default_device, 2, way)
    if way == "all_reduce":  # each call draws anew
        plain = others = first
    assert (first, second) == (plain, others)


@pytest.mark.slow  # of torch.compile
@pytest.mark.parametrize("within", [False, True])
def test_a_compiled_backward_pass_without_ddp(within):
    assert max(launch(ranks.compiled, 2, within)) < 1e-6


@pytest.mark.slow
def test_a_compiled_step_of_a_frozen_optimizer():
    for compiled, plain in launch(ranks.compiled_optimizer, 2):
        assert compiled == plain


def test_weights_that_are_computed_from_parameters():
    assert max(launch(ranks.functional, 2)) < 1e-6


def test_a_layer_in_several_reentrant_checkpoints():
    for same, (kind, message) in launch(ranks.reentrant, 2):
        assert same
        assert kind == "SyncError"
        assert "use_reentrant=False" in message
