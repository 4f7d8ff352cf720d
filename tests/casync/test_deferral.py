"""Residuals of unused parameters wait; none waits for ever."""

from __future__ import annotations

import pytest
import torch

from casync.building.parts import Choice
from tests.casync.fakes import (
    CODECS,
    Sign,
    gradients,
    planned,
    run,
    slices,
    states_of,
    tensors_of,
    world,
)
from tests.casync.test_fusion import Fusing
from tests.tiers import first_fast

SIZES = (40, 700, 100003)
UNUSED = slice(40, 740)
HOLDS = {"sign": ["residual"]}


def residuals(states):
    return [torch.from_numpy(arrays["residual"]) for each in states for arrays in each.values()]


def synchronized(codec, strategy, steps, holds):
    """Averages of each step, and residuals of all ranks after it."""
    codecs = CODECS | {"sign": codec}
    choices = {t.name: Choice("sign", strategy, 2) for t in tensors_of(SIZES)}
    programs = slices(planned(tensors_of(SIZES), choices, 3, codecs))
    states = [states_of(sum(SIZES)) for _ in range(3)]
    found = []
    with world(3, codecs=codecs, deferred=holds) as executors:
        for step, buckets in enumerate(steps):
            buckets = [bucket.clone() for bucket in buckets]
            run(executors, programs, buckets, states, step)
            found.append((buckets[0], [each.clone() for each in residuals(states)]))
    return found


@pytest.mark.parametrize("codec", first_fast([Sign, Fusing]))
@pytest.mark.parametrize("strategy", ["ps", "ring", "exchange"])
def test_unused_parameters_neither_send_nor_lose_residuals(strategy, codec):
    steps = [gradients(sum(SIZES), 3, seed) for seed in range(3)]
    for bucket in steps[1]:
        bucket[UNUSED] = 0
    (_, before), (average, after), _ = synchronized(codec(), strategy, steps, HOLDS)
    assert not average[UNUSED].any()
    assert any(one[UNUSED].any() for one in before)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one[UNUSED], other[UNUSED])


@pytest.mark.parametrize("unused", first_fast(range(3)))
@pytest.mark.parametrize("strategy", ["ps", "ring", "exchange"])
def test_a_tensor_used_on_one_rank_takes_the_residuals_of_all_ranks(strategy, unused):
    """A rank that never used a tensor, but aggregates it, once kept its residuals for ever."""
    steps = [gradients(sum(SIZES), 3, seed) for seed in range(3)]
    for buckets in steps:
        buckets[unused][:] = 0
    plain, deferred = (synchronized(Fusing(), strategy, steps, holds) for holds in ({}, HOLDS))
    for (one, before), (other, after) in zip(plain, deferred, strict=True):
        assert torch.equal(one, other)
        assert all(map(torch.equal, before, after))
