"""What kernels over arrays run over, and the whole numbers that they need, counted on the host.

[Note: CUDA arrays] A spec that is computed an array at a time (see [Note: arrays] in array_runs.py)
becomes a fixed list of launches, each over all pieces of a batch. What single elements make, up to
the next operator over whole arrays, is computed where it is needed, by the kernel that needs it:
views (matrix, flat, transpose, x[selection]) only change the place that is read. Results of
operators over whole arrays, and numbers of a piece, lie in scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compll.backends.cuda.plans import Launches
from compll.ir.expr import Expr, Type
from compll.ir.layout import layout, limits, payload_bytes
from compll.ir.matrices import extent, extents
from compll.ir.module import Module
from compll.ir.static import Number


@dataclass(frozen=True)
class Domain:
    """A set of items of every piece.

    kind: n (elements); kept (those of selection `of`); matrix (of `dims`); payload (bytes);
    products (blocks of ROWS x COLUMNS elements of a matrix); piece (one item, even where there are
    no elements). Of the shorter and the longer side of a matrix: see SIDES.
    """

    kind: str
    of: str = ""
    dims: tuple[Expr, ...] = ()

    def count(self, module: Module, params: Mapping[str, Number], n: int) -> int:
        """Items of a piece of n elements. Raises UsageError where a matrix is absurd."""
        if self.kind == "piece":
            return 1
        if n == 0 or self.kind == "n":
            return n
        if self.kind == "kept":
            return limits(module, n, params)[self.of]
        if self.kind == "payload":
            return payload_bytes(module, n, params)
        rows, cols = extents(self.dims, n)
        if self.kind in SIDES:
            return SIDES[self.kind](min(rows, cols), max(rows, cols))
        return rows * cols if self.kind == "matrix" else blocks(rows, cols)


#: of the part of a product that a block computes
ROWS, COLUMNS = 32, 64
#: of the longer side of a matrix: what a block adds up for its Gram matrix, and for lengths
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


def domain_of(type: Type) -> Domain:
    """Where values of a type have their elements."""
    return Domain(type.shape, type.of if type.shape == "kept" else "", type.dims)


@dataclass(frozen=True)
class Size:
    """A whole number of a piece. kind: dim (rows or columns, `dim`); kept (elements of selection
    `of`); start (the first byte of payload field `of`); total (bytes of the payload)."""

    kind: str
    of: str = ""
    dim: Expr | None = None

    def count(self, module: Module, params: Mapping[str, Number], n: int) -> int:
        """For a piece of n elements."""
        if self.kind == "dim":
            assert self.dim is not None
            return extent(self.dim, n)
        kept = limits(module, n, params)
        if self.kind == "kept":
            return kept[self.of]
        place = layout(module, n, kept)
        if self.kind == "total":
            return place.total
        return place.starts[[f.name for f in module.fields].index(self.of)]


@dataclass(frozen=True)
class Grid:
    """Blocks of a launch: `per_block` items of a domain each."""

    domain: Domain
    per_block: int


@dataclass(frozen=True)
class Memory:
    """Scratch memory of a batch: `factor` values for every `each` items of a domain, or fewer."""

    name: str
    dtype: str
    domain: Domain
    each: int = 1
    factor: int = 1

    @property
    def declaration(self) -> str:
        """As a parameter of a kernel."""
        return f"{C_NAMES[self.dtype]}* {self.name}"


C_NAMES = {
    "float32": "float", "float64": "double", "int32": "i32", "bool": "bool", "uint8": "u8",
    "uint32": "u32", "int64": "i64", "uint64": "u64",
}  # fmt: skip


@dataclass(frozen=True)
class ArrayPlan(Launches):
    """See cuda_plans.Launches. rooms: matrices that must have room for the elements of a piece, or
    at least as many as it has (matrix or flat, and the dimensions). states: what is given of them.
    """

    grids: tuple[Grid, ...]
    domains: tuple[Domain, ...]
    sizes: tuple[Size, ...]
    scratch: tuple[Memory, ...]
    rooms: tuple[tuple[str, tuple[Expr, ...]], ...]
    states: tuple[str, ...] = ()
