"""How CUDA kernels share work: threads a tile, blocks of a launch, scratch memory of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from compll.backends.cuda.domains import Domain, told
from compll.backends.cuda.instructions import MEMORY
from compll.ir.expr import Expr
from compll.ir.module import Module
from compll.ir.static import Number

#: of walks for at most 100 tries, and the look at the last one, where each walk does for three
MOST_ROUNDS = 34
ROWS = 8  # of a tile that a thread holds at a time: 32 elements


@dataclass(frozen=True)
class Shape:
    """How threads share tiles. See prelude.cuh for team, row and lane.

    team: threads a tile. rows: of 4 * team elements. held: rows in registers at a time.
    threads: of a block.
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
        """Of a block."""
        return self.threads // self.team

    @property
    def row(self) -> int:
        """Elements of a row."""
        return 4 * self.team


def shape_of(tile: int, threads: int = 256, packed: int = 1) -> Shape:
    """The shape for tiles of this size; a block's codes of as many `packed` fields take at most 32 KiB
    of shared memory.

    Threads of small tiles hold four rows, of a line of memory in tiles of 128, so that what is computed
    once a tile is a fourth of what it would be for a row. Lanes of [Note: order of sums] are folded in
    halves, rows first.
    """
    team = max(1, min(32, tile // 16))
    rows = tile // (4 * team)
    most = max(32, (1 << 15) // (tile * max(1, packed)) * team)
    return Shape(tile, team, rows, min(threads, most))


@dataclass(frozen=True)
class Grid:
    """What the blocks of a launch share: the items of a domain, or tiles of them, `per_block` a block."""

    domain: Domain
    per_block: int
    tiles: bool = False


@dataclass(frozen=True)
class Scratch:
    """Device memory of a batch, zero at first. per: "piece", or the number of a grid for its items,
    or that with "b" for its blocks."""

    name: str
    dtype: str
    per: str
    factor: int = 1

    @property
    def declaration(self) -> str:
        return f"{MEMORY.get(self.dtype, 'float')}* {self.name}"


@dataclass(frozen=True)
class Step:
    """A launch. grid: the number of a grid, or -1 for a block per piece.

    repeat: so many rounds, or as many as so many tries take (see threshold_search), with the
    neighbouring steps that have the same number.
    """

    kernel: str
    grid: int
    threads: int
    repeat: Expr | int | None = None


class Items:
    """How many items grids have, by the length of a piece."""

    def __init__(self, module: Module, params: Mapping[str, Number], tile: int) -> None:
        self.module, self.params, self.tile = module, params, tile

    def count(self, grid: Grid, n: int) -> int:
        """Of a grid, for a piece of n elements. Raises UsageError where a matrix is absurd."""
        count = grid.domain.count(self.module, self.params, n)
        return -(-count // self.tile) if grid.tiles else count

    def rounds(self, tries: Expr | int, lengths: Iterable[int]) -> int:
        """Of three tries each: at most 100, and the look at the last one."""
        if tries == MOST_ROUNDS:
            return MOST_ROUNDS
        found = [told(tries, self.params, n) for n in lengths]
        most = max((int(max(0.0, min(v, 100.0))) for v in found if v == v), default=0)
        return -(-(1 + most) // 3)
