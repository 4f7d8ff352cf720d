"""Predicted times of one tensor, with and without compression: SeCoPa's formulas.

With m gradient bytes, K partitions, N ranks and compression rate r (HiPress, SOSP'21)::

    T_orig(m, K) = alpha T_send(m/K)
    T_cpr(m, K)  = alpha T_send(r m/K) + beta T_enc(m/K) + gamma T_dec(r m/K)

alpha, beta, gamma depend on the strategy. Two things differ here. A native collective is measured
as a whole, rather than as alpha sends. And the paper counts only the operators that do not
overlap a transmission; on a CPU encoding takes cycles from the backward pass even when it
overlaps, so every operator that a rank runs is counted. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from casync.topology import Topology

__all__ = ["PREDICTED", "CodecCost", "Costs", "Line", "fit", "predict"]


@dataclass(frozen=True)
class Line:
    """A measured curve: latency in seconds, plus seconds per byte."""

    latency: float
    per_byte: float

    def __call__(self, size: float) -> float:
        return self.latency + self.per_byte * size


@dataclass(frozen=True)
class CodecCost:
    """One codec on one core; both curves are over bytes of gradient."""

    encode: Line
    decode: Line
    rate: float  # payload bytes per gradient byte


@dataclass(frozen=True)
class Costs:
    """Everything measured: the link and the codecs."""

    exchange: Line  # every rank sends to one, of another node, and receives from one, all at once
    reduce: Mapping[str, Line]  # native all-reduce by number type ("float32", "bfloat16")
    codecs: Mapping[str, CodecCost]
    inside: Line = Line(0.0, 0.0)  # as `exchange`, within nodes; of a nested topology


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """The line through (bytes, seconds), least squares of the relative error, nothing negative."""
    weights = [1.0 / max(seconds, 1e-9) ** 2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    both = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = max(0.0, both / spread) if spread > 0 else 0.0
    return Line(max(0.0, mean_y - slope * mean_x), slope)


def predict(
    size: float,
    codec: str | None,
    strategy: str,
    partitions: int,
    topology: Topology,
    costs: Costs,
    additive: str | None = None,
) -> float:
    """Seconds to synchronize `size` bytes of float32 gradient.

    `partitions` is K: all chunks of the tensor, over all owners. Without a codec this is the
    native all-reduce, whatever the strategy. `additive` is the codec's number type.
    """
    if codec is None:
        return costs.reduce["float32"](size)
    if strategy == "allreduce":
        return _all_reduce(size, costs.codecs[codec], costs.reduce[additive or "float32"])
    return _FORMULAS[strategy](size, partitions, topology, costs, costs.codecs[codec])


def _all_reduce(m: float, codec: CodecCost, reduce: Line) -> float:
    return codec.encode(m) + reduce(m * codec.rate) + codec.decode(m)


def _others(size: float, topology: Topology, costs: Costs) -> float:
    """Seconds in which a rank sends as much to every other one, in turn, as all ranks do."""
    near = topology.largest - 1 if topology.nested else 0
    far = topology.world_size - 1 - near
    return near * costs.inside(size) + far * costs.exchange(size)


def _ps(m: float, k: int, topology: Topology, costs: Costs, codec: CodecCost) -> float:
    """Owners on the workers: alpha 2(N-1), in ceil(K/N) batches.

    A rank encodes all chunks and its own again; it merges N-1 contributions to each chunk that
    it owns and decodes the chunks of the others.
    """
    n, chunk = topology.world_size, m / k
    rounds = math.ceil(k / n)
    send = 2 * rounds * _others(codec.rate * chunk, topology, costs)
    return send + (k + rounds) * codec.encode(chunk) + 2 * (n - 1) * rounds * codec.decode(chunk)


def _ring(m: float, k: int, topology: Topology, costs: Costs, codec: CodecCost) -> float:
    """alpha 2(N-1), beta N, gamma 2(N-1): what a rank encodes and decodes as chunks go around."""
    n, chunk = topology.world_size, m / k
    rounds = math.ceil(k / n)
    send = 2 * (n - 1) * rounds * costs.exchange(codec.rate * chunk)
    return send + n * rounds * codec.encode(chunk) + 2 * (n - 1) * rounds * codec.decode(chunk)


def _allgather(m: float, k: int, topology: Topology, costs: Costs, codec: CodecCost) -> float:
    """Everybody encodes once, sends N-1 times and decodes everybody."""
    n, chunk = topology.world_size, m / k
    send = k * _others(codec.rate * chunk, topology, costs)
    return send + k * codec.encode(chunk) + n * k * codec.decode(chunk)


def _hierarchical(m: float, k: int, topology: Topology, costs: Costs, codec: CodecCost) -> float:
    """In each of M nodes a rank leads K/L chunks, of which it owns K/(L M): raw to the leaders,
    `ps` between those of a chunk, and back."""
    n, members, chunk = len(topology.nodes), topology.largest, m / k
    led, rounds = math.ceil(k / members), math.ceil(k / members / n)
    near = (members - 1) * led
    inside = near * (costs.inside(chunk) + costs.inside(codec.rate * chunk) + codec.decode(chunk))
    send = 2 * (n - 1) * rounds * costs.exchange(codec.rate * chunk)
    work = (led + rounds) * codec.encode(chunk) + 2 * (n - 1) * rounds * codec.decode(chunk)
    return inside + send + work


_FORMULAS: Mapping[str, Callable[[float, int, Topology, Costs, CodecCost], float]] = {
    "ps": _ps,
    "ring": _ring,
    "allgather": _allgather,
    "hierarchical": _hierarchical,
}
#: strategies that have a formula; `simulate` has all
PREDICTED = ("allreduce", *_FORMULAS)
