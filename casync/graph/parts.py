"""Tensors, the choice of how each is synchronized, and parts: what is planned, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from casync.codec import Operation

__all__ = ["Choice", "Part", "Row", "Tensor"]

#: START, LENGTH, TENSOR, OFFSET, STATE: a row of the codec's table
Row: TypeAlias = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Tensor:
    """A parameter's gradient inside a bucket; lengths and positions in elements."""

    name: str
    index: int  # position in the model: random stream, per-tensor state, default owner
    start: int  # first element in the bucket
    length: int
    state: int  # first element in the flat state arenas


@dataclass(frozen=True)
class Choice:
    """How one tensor is synchronized."""

    codec: str  # key in the executor's mapping, or RAW
    strategy: str  # module in casync.strategies
    partitions: int = 1  # chunks of it (for each owner, where the strategy spreads them)
    down: str | None = None  # the codec of owners, where that is another one


@dataclass(frozen=True)
class Part:
    """What payloads hold together: pieces of one owner's, or a raw run."""

    id: int
    codec: str  # of workers; its key is that of the states of both sides
    strategy: str
    owner: int
    rows: tuple[Row, ...]
    down: str | None = None  # of owners, where that is another one
    rounds: tuple[Operation, ...] = ()  # all-reduces that build on one another; else whole payloads
    align: int = 1  # a piece may be cut at multiples of this many elements

    @property
    def elements(self) -> int:
        """Elements over all rows."""
        return sum(row[1] for row in self.rows)
