"""What things cost, as measured: the link, and codecs. Sizes are in bytes, times in seconds."""

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
    """What all ranks do on the link at once: the curve is over the bytes that each sends, or of an
    all-reduce over the bytes that each has."""

    line: Line
    cores: float = 0.0  # that a rank's threads, and the kernel for it, keep busy meanwhile
    slows: float = 0.0  # share of its speed that a backward pass on a device loses meanwhile


@dataclass(frozen=True)
class CodecCost:
    """One codec on one core; the curves are over bytes of gradient."""

    encode: Line
    decode: Line  # also to add
    hop: Line = FREE  # decode, add and encode, in one kernel where the codec fuses them


@dataclass(frozen=True)
class Copies:
    """From a device's memory to the host's, and back; the curves are over bytes."""

    leave: Line
    enter: Line
    gradients: bool  # whether gradients are copied, which the host compresses; else payloads


@dataclass(frozen=True)
class Costs:
    """Everything measured, while all ranks did the same."""

    exchange: Mapping[int, Transfer]  # by how many ranks each sends to at once, of other nodes
    reduce: Mapping[str, Transfer]  # native all-reduce by number type ("float32", "bfloat16")
    codecs: Mapping[str, CodecCost] = field(default_factory=dict)
    inside: Transfer = Transfer(FREE)  # of a nested topology: within nodes, to one rank
    overlap: float = 0.0  # of a codec's work, what hides behind a backward pass: 0 to 1
    copies: Copies | None = None  # of a device, where what travels goes through the host's memory

    def to(self, peers: int) -> Transfer:
        """Sends to so many ranks at once: what was measured of the nearest number."""
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
