"""What kernels run over, counted on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compll.ir.expr import Expr
from compll.ir.layout import field_bytes, limits, tile_of
from compll.ir.matrices import extents
from compll.ir.module import Module
from compll.ir.static import Number, as_count, evaluate
from compll.numerics.numbers import MEAN_LANES, MEAN_TILE

#: bits of a stream that a thread reads, and how many such chunks are joined: as in streams.cuh
CHUNK, GROUP = 2048, 64


@dataclass(frozen=True)
class Domain:
    """A set of items of every piece.

    kind: n (elements); kept (the most of selection `of`); sample (of as many as `of` says);
    matrix (of `dims`); trits (the bytes of field `of`, packed); chunks and groups of
    them (of the most bits of field `of`); lanes (of sums by index); bins (`of`);
    products (blocks of ROWS x COLUMNS elements of a matrix); piece (one item, even where there are no elements). Of the shorter and the longer side
    of a matrix: see SIDES.
    """

    kind: str
    of: Expr | int | str = ""
    dims: tuple[Expr, ...] = ()

    def count(self, module: Module, params: Mapping[str, Number], n: int) -> int:
        """Items of a piece of n elements. Raises UsageError where a matrix is absurd."""
        if self.kind == "piece":
            return 1
        if n == 0 or self.kind == "n":
            return n
        if self.kind in ("trits", "chunks", "groups"):
            return self.of_field(module, params, n)
        if self.kind == "kept":
            return limits(module, n, params)[str(self.of)]
        if self.kind == "sample":
            return max(1, as_count(told(self.of, params, n), n))
        if self.kind == "lanes":
            return min(MEAN_LANES, -(-n // MEAN_TILE))
        if self.kind == "bins":
            return int(str(self.of))
        rows, cols = extents(self.dims, n)
        if self.kind in SIDES:
            return SIDES[self.kind](min(rows, cols), max(rows, cols))
        return rows * cols if self.kind == "matrix" else blocks(rows, cols)

    def of_field(self, module: Module, params: Mapping[str, Number], n: int) -> int:
        """Bytes of a field of trits, or chunks of a stream of positions."""
        f = next(f for f in module.fields if f.name == self.of)
        if self.kind == "trits":
            return f.layout.most_bytes(n, n, tile_of(module))
        bits = 8 * field_bytes(f, module, n, limits(module, n, params)[f.of])
        return -(-bits // (CHUNK if self.kind == "chunks" else CHUNK * GROUP))


def told(number: object, params: Mapping[str, Number], n: int) -> float:
    """A number of a spec that does not depend on the step."""
    if isinstance(number, Expr):
        return float(evaluate(number, dict(params) | {"n": n, "step": 0}))
    return float(str(number))


#: of the part of a product that a block computes: as in arrays.cuh
ROWS, COLUMNS = 32, 64
#: of the longer side of a matrix, what a block adds up for its Gram matrix, and for lengths: as in
#: spectra.cuh
LONG, TALL = 4096, 16 * ROWS


def blocks(rows: int, cols: int) -> int:
    """Blocks of ROWS x COLUMNS elements."""
    return -(-rows // ROWS) * -(-cols // COLUMNS)


#: by kind, of the shorter and the longer side: items for singular vectors
SIDES: dict[str, Callable[[int, int], int]] = {
    "short": lambda r, _: r,
    "square": lambda r, _: r * r,
    "gram": lambda r, long: -(-long // LONG) * blocks(r, r),
    "grams": lambda r, long: -(-long // LONG) * r * r,
    "lengths": lambda r, long: -(-long // TALL) * -(-r // COLUMNS),
    "squares": lambda r, long: -(-long // TALL) * r,
}
ELEMENTS, PIECE = Domain("n"), Domain("piece")
