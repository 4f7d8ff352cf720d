"""Typing of matrices: shapes that are functions of n alone, so that payloads have a known bound.

A dimension is an integer expression with the parameters replaced by their values. Expressions are
interned, so two dimensions are equal when they are the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from compll.errors import RuleError, UsageError
from compll.ir.expr import Expr, Pool, Type, walk
from compll.ir.static import depends, evaluate

#: elements that a matrix of a tiny tensor may have; of a large one, ROOM times the tensor's
LEAST, ROOM = 1 << 20, 64
#: the longest inner dimension of products with float32 sums; CUDA computes their elements on reads
SHORT = 8
WHOLE_SIZES = "rows and columns are whole numbers that follow from n and parameters"
#: operators on arrays, besides those on matrices
ARRAY_OPERATORS = ("combined", "hadamard")
#: products of at most this many columns read each row of the first matrix once
NARROW = 16


def extents(dims: tuple[Expr, ...], n: int) -> tuple[int, int]:
    """Rows and columns for n elements. Raises UsageError for over max(LEAST, ROOM * n) elements."""
    rows, cols = (extent(d, n) for d in dims)
    if rows * cols > max(LEAST, ROOM * n):
        raise UsageError(
            f"a matrix of {rows} x {cols} elements for a tensor of {n}: "
            "`when:` in the spec can exclude such tensors"
        )
    return rows, cols


@lru_cache(maxsize=4096)
def extent(dim: Expr, n: int) -> int:
    """A dimension for n elements, at least 1. Cached, as small tensors ask for it in every step."""
    value = float(evaluate(dim, {"n": n}))
    return int(min(value, 2.0**62)) if value >= 1 else 1


def check_rooms(rooms: Iterable[tuple[str, tuple[Expr, ...]]], n: int) -> None:
    """Raise UsageError if a matrix has fewer elements than the piece of n.

    rooms: kind, rows and columns of each matrix. A matrix of kind "matrix" stores the elements, one
    of kind "flat" replaces them; "" is for other matrices, and only their size is checked.
    """
    for kind, dims in rooms if n else ():
        rows, cols = extents(dims, n)
        if kind and rows * cols < n:
            raise UsageError(
                f"a matrix of {rows} x {cols} has no room for {n} elements"
                if kind == "matrix"
                else f"flat: a matrix of {rows * cols} elements, {n} are needed"
            )


def short(product: Expr) -> bool:
    """True if the inner dimension of a product is a constant of at most SHORT."""
    inner = product.args[0].type.dims[1]
    return inner.op == "const" and int(inner.value) <= SHORT


def dimension(x: Expr) -> Expr:
    """Check that x can be a dimension, and return it. Raises RuleError."""
    if x.type.shape != "static" or x.type.dtype != "int" or depends(x) - {"n"}:
        raise RuleError(WHOLE_SIZES, "round with ceil() or floor()")
    if x.op == "const" and float(x.value) < 1:
        raise RuleError(
            f"a matrix has at least one row and column, not {x.value}",
            "a parameter with `from:` keeps its default if the shape is unknown: "
            "`width: columns if columns > 0 else ceil(sqrt(n))`",
        )
    return x


def matrix(pool: Pool, x: Expr, rows: Expr, cols: Expr) -> Expr:
    """The elements of x as a matrix, filled row by row."""
    if x.type.shape != "n":
        raise RuleError(f"matrix takes elements, not {x.type}")
    return pool.make("matrix", (x,), made(dimension(rows), dimension(cols)))


def made(rows: Expr, cols: Expr) -> Type:
    """The type of a float matrix."""
    return Type("float", "matrix", dims=(rows, cols))


def _need(op: str, *args: Expr) -> None:
    for x in args:
        if x.type.shape != "matrix":
            raise RuleError(f"{op} takes matrices, not {x.type}", "matrix(x, columns) makes one")


def _flat(pool: Pool, x: Expr) -> Expr:
    _need("flat", x)
    return pool.make("flat", (x,), Type("float", "n"))


def _matmul(pool: Pool, a: Expr, b: Expr) -> Expr:
    _need("@", a, b)
    if a.type.dims[1] is not b.type.dims[0]:
        raise RuleError(
            f"{a.type} @ {b.type}: the columns of the first are not the rows of the second"
        )
    return pool.make("matmul", (a, b), made(a.type.dims[0], b.type.dims[1]))


def _transpose(pool: Pool, x: Expr) -> Expr:
    _need("transpose", x)
    return pool.make("transpose", (x,), made(*reversed(x.type.dims)))


def _orthonormal(pool: Pool, x: Expr, *spare: Expr) -> Expr:
    _need("orthonormal", x, *spare)
    if any(s.type != x.type for s in spare):
        raise RuleError(f"orthonormal takes a spare of the same shape, {x.type}")
    return pool.make("orthonormal", (x, *spare), x.type)


def chosen(pool: Pool, p: Expr, k: Expr, draw: int) -> Expr:
    """k column positions, drawn by draw `draw` with the chances in the row p."""
    _need("chosen", p)
    if not row(p):
        raise RuleError(f"chosen takes a row of chances, not {p.type}")
    if p.type.dtype != "float":
        raise RuleError(f"chosen takes chances, not {p.type}")
    return pool.make("chosen", (p,), Type("int", "matrix", "", (pool.const(1), dimension(k))), draw)


def _take(pool: Pool, x: Expr, at: Expr) -> Expr:
    _need("take_columns", x)
    if at.op == "chosen":
        if at.args[0].type.dims[1] is not x.type.dims[1]:
            raise RuleError(
                f"take_columns takes positions from chosen(), made of {x.type.dims[1]} chances",
                "a chance for every column",
            )
    elif not _positions(at) or at.type.dims[0] is not x.type.dims[0]:
        raise RuleError(
            f"take_columns takes columns by their positions, not {at.type}",
            "chosen() gives positions for all rows, top_columns() for each row",
        )
    return pool.make("take_columns", (x, at), made(x.type.dims[0], at.type.dims[1]))


def _positions(x: Expr) -> bool:
    return x.type.shape == "matrix" and x.type.dtype == "int"


def top(pool: Pool, x: Expr, k: Expr) -> Expr:
    """Positions of the k largest elements of each row."""
    _need("top_columns", x)
    return pool.make("top_columns", (x,), Type("int", "matrix", "", (x.type.dims[0], dimension(k))))


def place(pool: Pool, at: Expr, x: Expr, cols: Expr) -> Expr:
    """A matrix with the elements x at the positions `at` of each row, zero elsewhere."""
    _need("place_columns", at, x)
    if not _positions(at) or at.type.dims != x.type.dims:
        raise RuleError(
            f"place_columns takes positions and as many values, not {at.type} and {x.type}",
            "as top_columns() and take_columns() give them",
        )
    return pool.make("place_columns", (at, x), made(x.type.dims[0], dimension(cols)))


def row(x: Expr) -> bool:
    """True if x is a matrix of one row."""
    return x.type.shape == "matrix" and x.type.dims[0].op == "const" and x.type.dims[0].value == 1


def meet(args: tuple[Expr, ...]) -> tuple[Expr, ...]:
    """Rows and columns of an elementwise operator's result. A single row or column repeats."""
    dims: list[Expr] = []
    for side in (0, 1):
        given = [a.type.dims[side] for a in args if a.type.shape == "matrix"]
        longer = [d for d in given if not (d.op == "const" and d.value == 1)]
        if any(d is not longer[0] for d in longer):
            both = " and ".join(str(a.type) for a in args if a.type.shape == "matrix")
            raise RuleError(f"{both} do not go together", "write rows and columns the same way")
        dims.append((longer or given)[0])
    return tuple(dims)


def _random(pool: Pool, rows: Expr, cols: Expr) -> Expr:
    return pool.make("random_matrix", (), made(dimension(rows), dimension(cols)))


def _ones(pool: Pool, rows: Expr, cols: Expr) -> Expr:
    return pool.make("ones", (), made(dimension(rows), dimension(cols)))


RULES: dict[str, Callable[..., Expr]] = {
    "flat": _flat,
    "matmul": _matmul,
    "transpose": _transpose,
    "orthonormal": _orthonormal,
    "random_matrix": _random,
    "take_columns": _take,
    "ones": _ones,
}


def uses(*roots: Expr) -> bool:
    """True if an expression contains a matrix or an operator that works on a whole array."""
    return any(e.type.shape == "matrix" or e.op in ARRAY_OPERATORS for e in walk(*roots))
