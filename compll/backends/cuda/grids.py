"""Work sharing of CUDA kernels: sets of items, threads per tile, blocks of a launch, scratch memory of
a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from compll.backends.cuda.instructions import MEMORY
from compll.ir.expr import Expr
from compll.ir.layout import field_bytes, limits, tile_of
from compll.ir.matrices import extent, extents
from compll.ir.module import Module
from compll.ir.static import Number, as_count, evaluate
from compll.ir.tile import Domain
from compll.numerics import matrices
from compll.numerics.tries import MOST, walks

HELD = 8  # rows of a tile that a thread holds at a time: 32 elements
#: bits of a stream that a thread reads, and number of these chunks in a group: as in streams.cuh
CHUNK, GROUP = 2048, 64
#: elements of a product that a block computes: as in arrays.cuh
ROWS, COLUMNS = 32, 64


def items(domain: Domain, module: Module, params: Mapping[str, Number], n: int) -> int:
    """Items of a domain of a piece of n elements. Raises UsageError if a matrix is too large.

    kinds beside those of arrays: sample (as many as `dims` says); trits (the packed bytes of field
    `of`); chunks and groups of chunks (of the most bits of field `of`); of a product with rows,
    columns and an inner dimension, products (blocks of ROWS x COLUMNS elements, for each chunk), and
    if there are several chunks, parts (the chunks' elements) and joined (elements).
    """
    if n == 0 or domain.kind == "n":
        return n
    if domain.kind in ("trits", "chunks", "groups"):
        return _of_field(domain, module, params, n)
    if domain.kind == "kept":
        return limits(module, n, params)[domain.of]
    if domain.kind == "sample":
        return max(1, as_count(told(domain.dims[0], params, n), n))
    rows, cols = extents(domain.dims[:2], n)
    if domain.kind == "matrix":
        return rows * cols
    chunks = -(-extent(domain.dims[2], n) // matrices.CHUNK)
    if domain.kind == "products":
        return blocks(rows, cols) * chunks
    return rows * cols * (chunks if domain.kind == "parts" else 1) if chunks > 1 else 0


def _of_field(domain: Domain, module: Module, params: Mapping[str, Number], n: int) -> int:
    """Bytes of a field of trits, or chunks of a stream of positions."""
    f = next(f for f in module.fields if f.name == domain.of)
    if domain.kind == "trits":
        return f.layout.most_bytes(n, n, tile_of(module))
    bits = 8 * field_bytes(f, module, n, limits(module, n, params))
    return -(-bits // (CHUNK if domain.kind == "chunks" else CHUNK * GROUP))


def told(number: object, params: Mapping[str, Number], n: int) -> float:
    """A number of a spec that does not depend on the step."""
    if isinstance(number, Expr):
        return float(evaluate(number, dict(params) | {"n": n, "step": 0}))
    return float(str(number))


def blocks(rows: int, cols: int) -> int:
    """The number of blocks of ROWS x COLUMNS elements."""
    return -(-rows // ROWS) * -(-cols // COLUMNS)


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
        return min(self.rows, HELD)

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

    repeat: the number of tries from which rounds follow (see threshold_search); neighbouring steps
    with the same number repeat together.
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
        """Rounds of a search for a threshold, a walk each."""
        found = [told(tries, self.params, n) for n in lengths]
        return walks(max((int(max(0.0, min(v, MOST))) for v in found if v == v), default=0))
