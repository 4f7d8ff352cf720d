"""How CUDA kernels share work: threads a tile, blocks of a launch, scratch memory of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from compll.ir.expr import Expr

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
    def chunks(self) -> int:
        return self.rows // self.held

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
    """What the blocks of a launch share: `items` of each piece, `per_block` of them a block.

    kind: elements; tiles; kept (the bound of selection `arg`); kept_tiles (tiles of those); sample_tiles,
    sample_elements (of as many as `arg` says); trits (the bytes of field `arg`, packed); lanes (of sums
    by index); bins (`arg`); chunks and groups of them (of the most bits of field `arg`).
    """

    kind: str
    per_block: int
    arg: Expr | int | str = ""


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
        kind = {
            "uint8": "u8",
            "uint32": "u32",
            "int32": "i32",
            "int64": "i64",
            "uint64": "u64",
            "float64": "double",
        }
        return f"{kind.get(self.dtype, 'float')}* {self.name}"


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
