"""Ranks of test_strategies.py."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

import hipress
from tests.hipress.common import (
    SMALL_BUCKETS,
    Raised,
    Trained,
    codec,
    delivered,
    difference,
    digest,
    make,
    raised_by,
    train,
)


def given(options):
    """Options with the fake codecs that they name."""
    return {key: codec(v) if key == "down" else v for key, v in options.items()}


def real(rank, world_size, cases):
    """The trained models by case."""
    plain = DistributedDataParallel(make())
    train(plain, rank, range(5))
    found = []
    for name, options in cases:
        ddp = hipress.wrap(make(), name, verify=True, ddp_kwargs=SMALL_BUCKETS, **options)
        losses = train(ddp, rank, range(5))
        report = hipress.report(ddp)
        assert report.installed
        assert report.to_dict()["options"]["down"] == options.get("down", "auto")
        apart, held = difference(plain, ddp), digest(ddp)
        found.append(Trained(apart, losses, held, delivered(ddp, rank)))
        hipress.detach(ddp)
    return found


class Resumed(NamedTuple):
    """A training that continued from a state."""

    same: bool  # as without a stop
    digest: str
    kept: dict[str, bool]  # by side: whether the state holds anything
    refused: Raised  # by another codec of owners


def resume(rank, world_size, name, options, path):
    """Six steps at once, and three, a checkpoint, three; the state's content, and an error."""
    options = given(options) | {"ddp_kwargs": SMALL_BUCKETS}
    whole = hipress.wrap(make(), codec(name), **options)
    train(whole, rank, range(6), momentum=0)
    half = hipress.wrap(make(), codec(name), **options)
    train(half, rank, range(3), momentum=0)
    torch.save([half.module.state_dict(), hipress.state_dict(half)], f"{path}/{rank}.pt")
    weights, state = torch.load(f"{path}/{rank}.pt", weights_only=True)
    fresh = make()
    fresh.load_state_dict(weights)
    again = hipress.wrap(fresh, codec(name), **options)
    hipress.load_state_dict(again, state)
    train(again, rank, range(3, 6), momentum=0)
    other = hipress.wrap(make(), codec(name), **(options | {"down": "none"}))
    kept = {
        side: any(values.any() for values in arrays.values())
        for sides in state["states"].values()
        for side, arrays in sides.items()
    }
    refused = raised_by(hipress.load_state_dict, other, state)
    return Resumed(digest(again) == digest(whole), digest(whole), kept, refused)


def refused(rank, world_size):
    """Errors of each rank for impossible options, or options that differ between ranks."""
    different = [2, 1] if rank else [1, 2]
    cases = {
        "size": {"strategy": "hierarchical", "topology": 3},
        "ranks": {"strategy": "hierarchical", "topology": [[0, 1, 2]]},
        "twice": {"strategy": "hierarchical", "topology": [[0, 1], [1]]},
        "type": {"topology": "two"},
        "differ": {"strategy": "hierarchical", "topology": different[0]},
        "direction": {"strategy": "exchange", "down": "int4_group"},
        "down": {"down": "int4_grup"},
        "downs": {"down": ["int4_group", "int8_group"][rank % 2]},
        "not twice": {"strategy": "ps", "down": "dgc"},
    }
    found = {
        title: raised_by(hipress.wrap, make(), "topk", **case) for title, case in cases.items()
    }
    found["auto"] = raised_by(hipress.wrap, make(), down="int4_group")
    for strategy in ("hierarchical", "gtopk"):
        found[strategy] = raised_by(hipress.wrap, make(), "dgc", strategy=strategy)
    return found
