"""Typing rules of matrices and transforms, which need an array as a whole."""

from __future__ import annotations

from compll.errors import RuleError
from compll.frontend.rule_context import Context, is_row, matrix_type
from compll.frontend.rule_elements import real, rounding
from compll.ir.expr import Expr, Type

#: elements of a run that hadamard mixes
MOST_BLOCK = 1 << 20


def _no_groups(c: Context) -> None:
    if c.grouped:
        raise RuleError("a grouped spec has no matrices", "remove `group:`")


def _matrix(c: Context, op: str, *args: Expr) -> tuple[Expr, ...]:
    """The arguments, which must be matrices."""
    _no_groups(c)
    for x in args:
        if x.type.shape != "matrix":
            raise RuleError(f"{op} takes matrices, not {x.type}", "matrix(x, columns) makes one")
    return args


def matrix(c: Context, op: str, x: Expr, columns: Expr) -> Expr:
    """The elements of x as a matrix, filled row by row."""
    _no_groups(c)
    x, columns = c.number(x), c.settled(c.exact(columns))
    rows = rounding(c, "ceil", real(c, "div", c.n, columns))
    if x.type.shape != "n":
        raise RuleError(f"matrix takes elements, not {x.type}")
    return c.pool.make(op, (x,), matrix_type(c.dimension(rows), c.dimension(columns)))


def flat(c: Context, op: str, x: Expr) -> Expr:
    (x,) = _matrix(c, op, x)
    return c.pool.make(op, (c.number(x),), Type("float", "n"))


def matmul(c: Context, op: str, a: Expr, b: Expr) -> Expr:
    a, b = map(c.number, _matrix(c, "@", a, b))
    if a.type.dims[1] is not b.type.dims[0]:
        raise RuleError(
            f"{a.type} @ {b.type}: the columns of the first are not the rows of the second"
        )
    return c.pool.make(op, (a, b), matrix_type(a.type.dims[0], b.type.dims[1]))


def transpose(c: Context, op: str, x: Expr) -> Expr:
    (x,) = map(c.number, _matrix(c, op, x))
    rows, columns = x.type.dims
    return c.pool.make(op, (x,), matrix_type(columns, rows))


def orthonormal(c: Context, op: str, *args: Expr) -> Expr:
    x, *spare = map(c.number, _matrix(c, op, *args))
    if any(s.type != x.type for s in spare):
        raise RuleError(f"orthonormal takes a spare of the same shape, {x.type}")
    return c.pool.make(op, (x, *spare), x.type)


def filled(c: Context, op: str, rows: Expr, columns: Expr) -> Expr:
    """A matrix that follows from its size: ones, or shared draws."""
    _no_groups(c)
    return c.pool.make(op, (), matrix_type(c.dimension(rows), c.dimension(columns)))


def chosen(c: Context, op: str, chances: Expr, most: Expr) -> Expr:
    """Column positions, drawn with the chances in a row."""
    if not c.encoding:
        raise RuleError("positions are chosen in encode", "put the columns into the payload")
    draw = next(c.draws)
    _matrix(c, op, chances)
    if not is_row(chances):
        raise RuleError(f"chosen takes a row of chances, not {chances.type}")
    if chances.type.dtype != "float":
        raise RuleError(f"chosen takes chances, not {chances.type}")
    result = matrix_type(c.pool.const(1), c.dimension(most), "int")
    return c.pool.make(op, (chances,), result, draw)


def take_columns(c: Context, op: str, x: Expr, at: Expr) -> Expr:
    (x,) = map(c.number, _matrix(c, op, x))
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
    return c.pool.make(op, (x, at), matrix_type(x.type.dims[0], at.type.dims[1]))


def _positions(x: Expr) -> bool:
    return x.type.shape == "matrix" and x.type.dtype == "int"


def top_columns(c: Context, op: str, x: Expr, k: Expr) -> Expr:
    """Positions of the k largest elements of each row."""
    c.refuse_share(op, k)
    (x,) = _matrix(c, op, c.number(x))
    result = matrix_type(x.type.dims[0], c.dimension(k), "int")
    return c.pool.make(op, (x,), result)


def place_columns(c: Context, op: str, at: Expr, x: Expr, columns: Expr) -> Expr:
    """A matrix with the elements x at the positions `at` of each row, zero elsewhere."""
    at, x = _matrix(c, op, at, c.number(x))
    if not _positions(at) or at.type.dims != x.type.dims:
        raise RuleError(
            f"place_columns takes positions and as many values, not {at.type} and {x.type}",
            "as top_columns() and take_columns() give them",
        )
    return c.pool.make(op, (at, x), matrix_type(x.type.dims[0], c.dimension(columns)))


def hadamard(c: Context, op: str, x: Expr, block: Expr) -> Expr:
    if c.grouped:
        hint = "without `group:`, hadamard(x, 64) mixes runs of 64 elements"
        raise RuleError("a grouped spec has no transforms", hint)
    x, size = c.number(x), c.folded(c.exact(block)).value
    if x.type.shape != "n":
        raise RuleError(f"hadamard takes elements, not {x.type}")
    if type(size) is not int or size & (size - 1) or not 2 <= size <= MOST_BLOCK:
        raise RuleError(
            f"hadamard: a block is a power of two from 2 to {MOST_BLOCK}",
            "it must follow from the parameters alone, not from n: hadamard(x, 1024)",
        )
    return c.pool.make(op, (x,), Type("float", "n"), size)
