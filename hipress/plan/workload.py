"""What a step is to synchronize, and when it is ready: as measured, or as estimated from sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hipress.model import Param

ALONE = 8  # of the largest tensors: each may get a codec of its own
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes: DDP's defaults


@dataclass(frozen=True)
class Bucket:
    """Gradients that are handed over together."""

    indices: tuple[int, ...]  # of parameters
    ready: float  # seconds of the backward pass, from the first bucket on


@dataclass(frozen=True)
class Workload:
    """A step. Seconds are from the moment when the first bucket is ready."""

    buckets: tuple[Bucket, ...]
    backward: float = 0.0  # until the backward pass is over
    rest: float = 0.0  # what follows before the next step's first bucket: optimizer, forward pass
    step: float = 0.0  # all of it, by the native all-reduce; 0 where it was not measured
    # payload bytes per gradient byte, where they were measured, by codec and parameter; of a
    # parameter that is not there those of its kind (see `kinds`)
    payloads: Mapping[tuple[str, int], float] = field(default_factory=dict)


def estimate(params: Sequence[Param]) -> Workload:
    """What DDP's buckets will be, of a step that takes no time without communication."""
    return timed([*reversed(params)], [0.0] * len(params), 0.0)


def timed(params: Sequence[Param], ready: Sequence[float], forward: float) -> Workload:
    """DDP's buckets after the first step, which it fills as gradients become ready.

    `params`: in the order of the backward pass. `ready`: when each is, in seconds from its begin.
    `forward`: seconds of the forward pass and all else.
    """
    buckets = [
        Bucket(tuple(params[i].index for i in members), max(ready[i] for i in members))
        for members in _buckets(params)
    ]
    if not buckets:
        return Workload((), 0.0, forward)
    first = buckets[0].ready
    shifted = tuple(Bucket(each.indices, each.ready - first) for each in buckets)
    return Workload(shifted, ready[-1] - first, forward + first)


def _buckets(params: Sequence[Param]) -> Iterator[list[int]]:
    """Positions, in buckets that are closed when they are full."""
    bucket: list[int] = []
    size, limit = 0, FIRST_BUCKET
    for position, param in enumerate(params):
        bucket.append(position)
        size += param.numel * param.dtype.itemsize
        if size >= limit:
            yield bucket
            bucket, size, limit = [], 0, BUCKET
    if bucket:
        yield bucket


def kinds(params: Sequence[Param]) -> list[tuple[Param, ...]]:
    """What gets one choice: the largest tensors each for itself, of the others those of a length;
    most elements first."""
    order = sorted(params, key=lambda p: -p.numel)
    others: dict[int, list[Param]] = defaultdict(list)
    for param in order[ALONE:]:
        others[param.numel].append(param)
    found = [*((param,) for param in order[:ALONE]), *map(tuple, others.values())]
    return sorted(found, key=lambda kind: -sum(p.numel for p in kind))
