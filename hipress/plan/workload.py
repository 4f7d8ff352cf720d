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


def estimate(params: Sequence[Param], seconds: float = 0.0) -> Workload:
    """What DDP's buckets will be, and that a step without communication takes so long: of which a
    third is the forward pass, and the rest goes to gradients as they have elements."""
    backward, total = seconds * 2 / 3, sum(p.numel for p in params)
    buckets, passed = [], 0
    for members in _buckets(params):
        passed += sum(p.numel for p in members)
        ready = backward * passed / total if total else 0.0
        buckets.append(Bucket(tuple(p.index for p in members), ready))
    return Workload(tuple(buckets), backward, seconds - backward)


def _buckets(params: Sequence[Param]) -> Iterator[list[Param]]:
    """As DDP makes them after the first step: backwards, closed when they are full."""
    bucket: list[Param] = []
    size, limit = 0, FIRST_BUCKET
    for param in reversed(params):
        bucket.append(param)
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
