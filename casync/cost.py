"""Measured costs of links and codecs. Sizes are in bytes, times in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["CodecCost", "Copies", "Costs", "Line", "Transfer", "fit"]


@dataclass(frozen=True)
class Line:
    """A measured curve: latency in seconds, plus seconds per byte."""

    latency: float
    per_byte: float

    def __call__(self, size: float) -> float:
        return self.latency + self.per_byte * size


FREE = Line(0.0, 0.0)


@dataclass(frozen=True)
class Transfer:
    """A transfer of all ranks at once. The curve is over the bytes that each rank sends; for an
    all-reduce, over the bytes that each rank has."""

    line: Line
    cores: float = 0.0  # kept busy meanwhile by a rank's threads and the kernel
    slows: float = 0.0  # share of its speed that a backward pass on a device loses meanwhile


@dataclass(frozen=True)
class CodecCost:
    """Costs of a codec on one core; the curves are over bytes of gradient."""

    encode: Line
    decode: Line  # also to add
    hop: Line = FREE  # decode, add and encode; one kernel if the codec fuses them


@dataclass(frozen=True)
class Copies:
    """Copies from a device's memory to the host's, and back; the curves are over bytes."""

    leave: Line
    enter: Line
    gradients: bool  # True: of gradients, which the host compresses; False: of payloads


@dataclass(frozen=True)
class Costs:
    """All measured costs. All ranks did the same during measurements."""

    exchange: Mapping[
        int, Transfer
    ]  # by number of ranks, of other nodes, to which each sends at once
    reduce: Mapping[str, Transfer]  # native all-reduce by number type ("float32", "bfloat16")
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    inside: Transfer = Transfer(FREE)  # for nested topologies: inside nodes, to one rank
    overlap: float = 0.0  # share of a codec's work that a backward pass hides: 0 to 1
    copies: Copies | None = None  # of a device whose payloads go through host memory

    def to(self, peers: int) -> Transfer:
        """Cost of sends to `peers` ranks at once, by the nearest measured number of peers."""
        return self.exchange[min(self.exchange, key=lambda known: abs(known - peers))]


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
