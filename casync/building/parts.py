"""Data of plans: tensors, the choice for each, and parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from casync.codec import Operation

__all__ = ["Choice", "Part", "Row", "Tensor"]

#: row of a codec's table: START, LENGTH, TENSOR, OFFSET, STATE
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
    """Codec, strategy and chunks of one tensor."""

    codec: str  # key in the executor's mapping, or RAW
    strategy: str  # one of casync.strategies.list_strategies()
    partitions: int = 1  # chunks (per owner, if the strategy spreads the tensor)
    down: str | None = None  # codec of owners, if another


@dataclass(frozen=True)
class Part:
    """Pieces whose payloads travel together: those of one owner, or a raw run."""

    id: int
    codec: str  # codec of workers; also the key of both sides' states
    strategy: str
    owner: int
    rows: tuple[Row, ...]
    down: str | None = None  # codec of owners, if another
    rounds: tuple[Operation, ...] = ()  # operators of the rounds; () for whole payloads
    #: first elements in the arrays of this rank's aggregator, by row, if it owns the part and they
    #: differ from STATE
    owned: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        """Elements over all rows."""
        return sum(row[1] for row in self.rows)
