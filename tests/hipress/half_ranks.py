"""Ranks of test_halves.py."""

from __future__ import annotations

import torch

import hipress
from tests.hipress.common import digest, make, train

OPTIONS = {"strategy": "ps", "verify": True}


def wrap(residual: str, name: str):
    return hipress.wrap(make(), name, residual=residual, **OPTIONS)


def each(state):
    """Every array of a state dictionary, in order."""
    return [
        values
        for sides in state["states"].values()
        for arrays in sides.values()
        for values in arrays.values()
    ]


def halved(rank, world_size, name):
    """A state of bfloat16 residuals, loaded as the other type, and back."""
    first = wrap("bfloat16", name)
    train(first, rank, range(3), momentum=0.0)
    state = hipress.state_dict(first)
    wide = wrap("float32", name)
    hipress.load_state_dict(wide, state)
    widened = hipress.state_dict(wide)
    train(wide, rank, range(1), momentum=0.0)
    full, narrow = hipress.state_dict(wide), wrap("bfloat16", name)
    for values in each(full):
        values.reshape(-1)[values.abs().argmax()] = 3.4e38  # finite still, as bfloat16
    hipress.load_state_dict(narrow, full)
    narrowed = hipress.state_dict(narrow)
    return {
        "digest": digest(first),
        "dtypes": [{str(v.dtype) for v in each(s)} for s in (state, widened, narrowed)],
        "sides": sorted({side for sides in state["states"].values() for side in sides}),
        "widened": all(map(equal, each(state), each(widened))),
        "narrowed": all(map(near, each(full), each(narrowed))),
    }


def equal(half, whole):
    return torch.equal(half.float(), whole)


def near(whole, half):
    """True if rounded to bfloat16, with the largest element at the largest finite value."""
    most = torch.finfo(torch.bfloat16).max
    return half.max() == most and torch.equal(half, whole.clamp(max=most).to(torch.bfloat16))
