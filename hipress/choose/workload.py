"""The workload of a step: gradients to synchronize, and the times at which they are ready."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hipress.model.params import Param

ALONE = 8  # number of largest tensors that may each get a codec of their own
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes: DDP's defaults


@dataclass(frozen=True)
class Bucket:
    """Gradients that are handed over together."""

    indices: tuple[int, ...]  # of parameters
    ready: float  # seconds of the backward pass since the first bucket


@dataclass(frozen=True)
class Workload:
    """The workload of a step. Seconds since the first bucket is ready."""

    buckets: tuple[Bucket, ...]
    backward: float = 0.0  # end of the backward pass
    rest: float = 0.0  # from then to the next step's first bucket: optimizer, forward pass
    step: float = 0.0  # whole step with the native all-reduce; 0 if not measured
    # measured payload bytes per gradient byte, by codec and parameter; a missing parameter has
    # those of its kind (see `kinds`)
    payloads: Mapping[tuple[str, int], float] = field(default_factory=dict)


def estimate(params: Sequence[Param]) -> Workload:
    """The expected buckets of DDP, for a step that takes no time without communication."""
    return timed([*reversed(params)], [0.0] * len(params), 0.0)


def timed(params: Sequence[Param], ready: Sequence[float], forward: float) -> Workload:
    """The buckets of DDP after the first step, filled as gradients become ready.

    params: in the order of the backward pass.
    ready: seconds at which each is ready, from its beginning.
    forward: seconds of the forward pass and all else.
    """
    buckets = [
        Bucket(tuple(params[i].index for i in members), max(ready[i] for i in members))
        for members in ddp_buckets([p.nbytes for p in params])
    ]
    if not buckets:
        return Workload((), 0.0, forward)
    first = buckets[0].ready
    shifted = tuple(Bucket(each.indices, each.ready - first) for each in buckets)
    return Workload(shifted, ready[-1] - first, forward + first)


def ddp_buckets(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Positions of gradients by bucket; a bucket is closed when it is full. sizes: bytes."""
    bucket: list[int] = []
    size, limit = 0, FIRST_BUCKET
    for position, bytes_ in enumerate(sizes):
        bucket.append(position)
        size += bytes_
        if size >= limit:
            yield bucket
            bucket, size, limit = [], 0, BUCKET
    if bucket:
        yield bucket


def kinds(params: Sequence[Param]) -> list[tuple[Param, ...]]:
    """Parameters that share a choice, most elements first: the largest alone, others by length."""
    order = sorted(params, key=lambda p: -p.numel)
    others: dict[int, list[Param]] = defaultdict(list)
    for param in order[ALONE:]:
        others[param.numel].append(param)
    grouped = [*((param,) for param in order[:ALONE]), *map(tuple, others.values())]
    return sorted(grouped, key=lambda kind: -sum(p.numel for p in kind))
