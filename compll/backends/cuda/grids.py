"""Work sharing of CUDA kernels: threads per tile, blocks of a launch, scratch memory of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from compll.backends.cuda.domains import items, told
from compll.backends.cuda.instructions import MEMORY
from compll.ir.expr import Expr
from compll.ir.module import Module
from compll.ir.static import Number
from compll.ir.tile import Domain

#: walks for at most 100 tries and a look at the last one; a walk makes three tries
MOST_ROUNDS = 34
ROWS = 8  # rows of a tile that a thread holds at a time: 32 elements


@dataclass(frozen=True)
class Shape:
    """Sharing of tiles by threads. See prelude.cuh for team, row and lane.

    team: threads per tile. rows: rows of 4 * team elements in a tile. held: rows in registers at a
    time. threads: threads of a block.
    """

    tile: int
    team: int
    rows: int
    threads: int

    @property
    def held(self) -> int:
        return min(self.rows, ROWS)

    @property
    def teams(self) -> int:
        """Teams of a block."""
        return self.threads // self.team

    @property
    def row(self) -> int:
        """Elements of a row."""
        return 4 * self.team


def shape_of(tile: int, threads: int = 256, packed: int = 1) -> Shape:
    """The shape for tiles of `tile` elements. A block's codes of `packed` fields take at most 32
    KiB of shared memory.

    Threads of small tiles hold four rows, of a line of memory in tiles of 128, so that work per
    tile is done by a fourth of the threads. Lanes of [Note: order of sums] are folded in halves,
    rows first.
    """
    team = max(1, min(32, tile // 16))
    rows = tile // (4 * team)
    most = max(32, (1 << 15) // (tile * max(1, packed)) * team)
    return Shape(tile, team, rows, min(threads, most))


@dataclass(frozen=True)
class Grid:
    """Work of a launch's blocks: items of a domain, or tiles of items; a block has `per_block` of
    them."""

    domain: Domain
    per_block: int
    tiles: bool = False


@dataclass(frozen=True)
class Scratch:
    """Device memory of a batch, zero at first: `factor` numbers for each item of a grid, or for each
    of its blocks (`of`); grid -1: for each piece."""

    name: str
    dtype: str
    grid: int
    factor: int = 1
    of: str = "items"

    @property
    def declaration(self) -> str:
        return f"{MEMORY.get(self.dtype, 'float')}* {self.name}"


@dataclass(frozen=True)
class Launch:
    """A launch. grid: the number of a grid, or -1 for a block per piece.

    repeat: number of rounds, or the number of tries from which they follow (see threshold_search);
    neighbouring steps with the same number repeat together.
    """

    kernel: str
    grid: int
    threads: int
    repeat: Expr | int | None = None


class Items:
    """Numbers of items of grids, from the length of a piece."""

    def __init__(self, module: Module, params: Mapping[str, Number], tile: int) -> None:
        self.module, self.params, self.tile = module, params, tile

    def count(self, grid: Grid, n: int) -> int:
        """Items of a grid for a piece of n elements. Raises UsageError if a matrix is too large."""
        count = items(grid.domain, self.module, self.params, n)
        return -(-count // self.tile) if grid.tiles else count

    def rounds(self, tries: Expr | int, lengths: Iterable[int]) -> int:
        """Rounds of three tries each, for at most 100 tries and a look at the last one."""
        if tries == MOST_ROUNDS:
            return MOST_ROUNDS
        found = [told(tries, self.params, n) for n in lengths]
        most = max((int(max(0.0, min(v, 100.0))) for v in found if v == v), default=0)
        return -(-(1 + most) // 3)
