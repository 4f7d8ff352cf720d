"""Typing of matrices: shapes that are functions of n alone, so that payloads have a known bound.

A dimension is an integer expression with the parameters replaced by their values. Expressions are
interned, so two dimensions are equal when they are the same object.
"""

from __future__ import annotations

from collections.abc import Callable

from compll.errors import RuleError, UsageError
from compll.ir import Expr, Pool, Type, walk
from compll.static import depends, evaluate

#: elements that a matrix of a tiny tensor may have; of a large one, ROOM times the tensor's
LEAST, ROOM = 1 << 20, 64
#: besides those of matrices
ARRAY_OPERATORS = ("combined", "hadamard", "shared")


def extents(dims: tuple[Expr, ...], n: int) -> tuple[int, int]:
    """Rows and columns for n elements. Raises UsageError where they are absurd."""
    rows, cols = (_extent(d, n) for d in dims)
    if rows * cols > max(LEAST, ROOM * n):
        raise UsageError(f"a matrix of {rows} x {cols} elements for a tensor of {n}")
    return rows, cols


def _extent(dim: Expr, n: int) -> int:
    value = float(evaluate(dim, {"n": n}))
    return int(min(value, 2.0**62)) if value >= 1 else 1


def dimension(x: Expr) -> Expr:
    """x as a dimension. Raises RuleError."""
    if x.type.shape != "static" or x.type.dtype != "int" or depends(x) - {"n"}:
        raise RuleError(
            "rows and columns are whole numbers that follow from n and parameters",
            "round with ceil() or floor()",
        )
    return x


def matrix(pool: Pool, x: Expr, rows: Expr, cols: Expr) -> Expr:
    """The elements of x, row by row."""
    if x.type.shape != "n":
        raise RuleError(f"matrix takes elements, not {x.type}")
    return pool.make("matrix", (x,), made(dimension(rows), dimension(cols)))


def made(rows: Expr, cols: Expr) -> Type:
    """The type of a matrix."""
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


def _random(pool: Pool, rows: Expr, cols: Expr) -> Expr:
    return pool.make("random_matrix", (), made(dimension(rows), dimension(cols)))


RULES: dict[str, Callable[..., Expr]] = {
    "flat": _flat,
    "matmul": _matmul,
    "transpose": _transpose,
    "orthonormal": _orthonormal,
    "random_matrix": _random,
}


def uses(*roots: Expr) -> bool:
    """Whether an operator that is computed an array at a time is among these expressions."""
    return any(e.type.shape == "matrix" or e.op in ARRAY_OPERATORS for e in walk(*roots))
