"""Typing rules of operators, by what they work on: elements, reductions, selections, arrays."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from compll.errors import RuleError
from compll.frontend.rule_context import LARGEST, LEAST, ROWS, Context, is_row, matrix_type
from compll.ir.expr import INFIX, Expr, Type, walk
from compll.ir.static import depends

# ---- rule elements ------------------------------------------------------------------------------
# Typing rules of elementwise operators: numbers, conditions, draws, one value per element.
# A rule takes the context, the operator and its arguments, and returns the typed expression.

# numbers


def real(c: Context, op: str, *args: Expr) -> Expr:
    return c.elementwise(op, tuple(map(c.number, args)))


def power(c: Context, op: str, base: Expr, exponent: Expr) -> Expr:
    """A power of data: small integer powers are products, and the power 0.5 is the root."""
    a, b = c.number(base), c.number(exponent)
    power = exponent.value if exponent.op == "const" else None
    if a.type.shape == "static" or power not in (1, 2, 3, 4, 0.5):
        return c.elementwise(op, (a, b))
    if power == 0.5:
        return c.elementwise("sqrt", (a,))
    square = c.elementwise("mul", (a, a)) if power > 1 else a
    other = {1: None, 2: None, 3: a, 4: square}[power]
    return square if other is None else c.elementwise("mul", (square, other))


def arithmetic(c: Context, op: str, *args: Expr) -> Expr:
    return c.elementwise(op, c.same(args))


def integer(c: Context, op: str, *args: Expr) -> Expr:
    args = tuple(map(c.exact, args))
    for a in args:
        if a.type.dtype not in ("int", "bool"):
            hint = "of floats, take x // 2**b and x % 2**b"
            if op in ("bitand", "bitor"):
                hint = f"conditions are joined by `{op.removeprefix('bit')}`; {hint}"
            hint = "a power is written **" if op == "bitxor" else hint
            raise RuleError(f"{INFIX[op][0]} takes integers, not {a.type}", hint)
    return c.elementwise(op, tuple(c.number(a, "int") for a in args))


def rounding(c: Context, op: str, x: Expr) -> Expr:
    if x.type.dtype in ("int", "bool"):
        return c.number(x, "int")
    out = c.elementwise(op, (x,))
    if out.type.shape != "static":
        return out
    return c.pool.make(op, out.args, replace(out.type, dtype="int"))


def cast(c: Context, op: str, x: Expr) -> Expr:
    x = c.number(x)
    return c.elementwise(op, (c.lift(x, c.reduced) if x.type.shape == "static" else x,))


def of_bits(c: Context, op: str, x: Expr) -> Expr:
    """An integer from the bits of a float32. A number known before any data is rounded first."""
    return c.elementwise(op, (c.number(x),), "int")


def from_float_bits(c: Context, op: str, x: Expr) -> Expr:
    if x.type.dtype != "int":
        raise RuleError(f"{op} takes an integer, not {x.type}", "float_bits(x) makes one")
    return c.elementwise(op, (x,), "float")


def exp2(c: Context, op: str, x: Expr) -> Expr:
    x = c.exact(x)
    if x.type.dtype not in ("int", "bool"):
        raise RuleError(f"exp2 takes an integer, not {x.type}", "2**x takes any number")
    return c.elementwise(op, (c.number(x, "int"),), "float")


# definitions, of which no backend knows


def mod(c: Context, op: str, *args: Expr) -> Expr:
    a, b = c.same(args)
    whole = c.elementwise("floordiv", (a, b))
    return c.elementwise("sub", (a, c.elementwise("mul", (b, whole))))


def sign(c: Context, op: str, x: Expr) -> Expr:
    (x,) = c.same((x,))
    zero, below, above = (c.number(c.pool.const(i), x.type.dtype) for i in (0, -1, 1))
    return c.elementwise("where", (compare(c, "lt", x, zero), below, above))


def isnan(c: Context, op: str, x: Expr) -> Expr:
    return compare(c, "ne", c.number(x), c.number(x))


def isinf(c: Context, op: str, x: Expr) -> Expr:
    return compare(c, "eq", c.elementwise("abs", (c.number(x),)), c.pool.const(math.inf))


def clip(c: Context, op: str, x: Expr, low: Expr, high: Expr) -> Expr:
    return arithmetic(c, "min", arithmetic(c, "max", x, low), high)


def whole_number(c: Context, x: Expr, low: int, high: int) -> Expr:
    """x as an integer from low to high: clamped, then truncated; NaN becomes `low`."""
    inside = clip(c, "clip", x, c.pool.const(low), c.pool.const(high))
    return whole_element(c, inside)


def whole_element(c: Context, x: Expr) -> Expr:
    """x as int32: truncated to the nearest number that float32 has; NaN becomes 0."""
    if x.type.dtype != "float":
        return x
    return c.pool.make("trunc", (x,), replace(x.type, dtype="int"))


def truncated(c: Context, op: str, x: Expr) -> Expr:
    """x as an integer, clamped to int32; 0 if it is not finite."""
    if x.type.dtype != "float":
        return c.number(x, "int")
    if x.type.shape != "scalar":
        return whole_element(c, x)
    inside = whole_number(c, x, LEAST, LARGEST)
    return choose(c, "choose", test(c, "isfinite", x), inside, c.pool.const(0))


def trit(c: Context, x: Expr) -> Expr:
    """x, an element, as 0, 1 or 2: truncated; NaN becomes 0."""
    return c.pool.make("trit", (c.number(x),), Type("int", "n"))


# conditions


def compare(c: Context, op: str, *args: Expr) -> Expr:
    texts = all(a.type.dtype == "str" for a in args)
    return c.elementwise(op, args if texts else c.same(args), "bool")


def logic(c: Context, op: str, *args: Expr) -> Expr:
    return c.elementwise(op, tuple(map(c.condition, args)), "bool")


def test(c: Context, op: str, x: Expr) -> Expr:
    return c.elementwise(op, (c.number(x),), "bool")


def where(c: Context, op: str, condition: Expr, *either: Expr) -> Expr:
    condition, (a, b) = c.condition(condition), c.same(either)
    return c.elementwise("where", (condition, a, b))


def choose(c: Context, op: str, condition: Expr, *either: Expr) -> Expr:
    condition, (a, b) = c.condition(condition), c.same(either)
    shape, _ = c.shape((condition, a, b))
    op = "choose" if shape in ("static", "scalar") else "where"
    return c.elementwise(op, (condition, a, b))


# quantiles of distributions


def probit(c: Context, op: str, p: Expr) -> Expr:
    return real(c, op, c.static(op, p, "its number"))


def pareto_above(c: Context, op: str, *args: Expr) -> Expr:
    """The value that a generalized Pareto variable exceeds with probability p.

    With q = (mean / std)**2: shape (q - 1) / 2, scale mean * (q + 1) / 2 by moments.
    """
    c.need_one_number(op, args)
    mean, std, p = map(c.number, args)
    ratio = real(c, "div", mean, std)
    q, unit, two = real(c, "mul", ratio, ratio), c.pool.const(1.0), c.pool.const(2.0)
    less, more = real(c, "sub", q, unit), real(c, "add", q, unit)
    rest = real(c, "sub", unit, real(c, "pow", p, real(c, "div", less, two)))
    return real(c, "mul", mean, real(c, "mul", rest, real(c, "div", more, less)))


# draws


def random(c: Context, op: str, low: Expr, high: Expr) -> Expr:
    if not c.encoding:
        raise RuleError("random numbers are drawn in encode", "put what was drawn into the payload")
    return _drawn_between(c, "uniform", next(c.draws), low, high)


def shared(c: Context, op: str, low: Expr, high: Expr) -> Expr:
    if not c.encoding:
        raise RuleError("shared draws are made in encode", "decode knows them by their names")
    return _drawn_between(c, "shared", next(c.shared_draws), low, high)


def _drawn_between(c: Context, op: str, draw: int, low: Expr, high: Expr) -> Expr:
    """A draw in [low, high)."""
    u = c.pool.make(op, (), Type("float", "n"), draw)
    low, high = c.number(low), c.number(high)
    if all(x.op == "float" and x.args[0].value == i for i, x in enumerate((low, high))):
        return u
    width = c.elementwise("sub", (high, low))
    return c.elementwise("add", (low, c.elementwise("mul", (width, u))))


# ---- rule reductions ----------------------------------------------------------------------------
# Typing rules of reductions over a tensor, a group or a selection: many elements in, one value
# (or a table of values) out; and of reads of tables.


def extreme(c: Context, op: str, *args: Expr) -> Expr:
    """The extreme of elements, or of two values."""
    if len(args) == 2:
        return arithmetic(c, op, *args)
    return _total(c, op, _elements(op, c.number(args[0])))


def reduction(c: Context, op: str, x: Expr, condition: Expr | None = None) -> Expr:
    """sum, mean, std or norm2 of elements, or of those for which a condition holds."""
    x = _elements(op, c.number(x))
    if condition is None:
        return _moment(c, op, x, _size(c, x))
    condition, zero = c.condition(condition), c.number(c.pool.const(0))
    chosen = c.elementwise("where", (condition, x, zero))
    if chosen.type.shape == "matrix":
        raise RuleError("a condition chooses elements, not those of a matrix")
    size = count(c, "count", c.lift(condition, chosen.type.shape, chosen.type.of))
    return _moment(c, op, chosen, size)


def _moment(c: Context, op: str, x: Expr, size: Expr) -> Expr:
    """sum, mean, std or norm2 of x, with `size` elements."""
    if op == "sum":
        return _total(c, op, x)
    if op == "mean":
        return c.elementwise("div", (_total(c, "sum", x), size))
    squares = _total(c, "sum", c.elementwise("mul", (x, x)))
    if op == "norm2":
        return c.elementwise("sqrt", (squares,))
    mean = _moment(c, "mean", x, size)
    both = c.elementwise("div", (squares, size)), c.elementwise("mul", (mean, mean))
    variance = c.elementwise("max", (c.elementwise("sub", both), c.number(c.pool.const(0))))
    return c.elementwise("sqrt", (variance,))


def _total(c: Context, op: str, x: Expr) -> Expr:
    if x.type.shape == "kept":
        c.whole_tensor(f"{op} of selected elements")
    level = c.reduced if x.type.shape == "n" else "scalar"
    return c.pool.make(f"reduce_{op}", (x,), Type("float", level))


def _size(c: Context, x: Expr) -> Expr:
    """Number of elements that a reduction of x runs over, as a float."""
    if x.type.shape == "kept":
        return c.number(c.pool.make("count_kept", (), Type("int", "scalar"), x.type.of))
    if x.type.shape == "matrix":
        return c.number(arithmetic(c, "mul", *x.type.dims))
    if c.reduced == "group":
        return c.pool.make("group_size", (), Type("float", "group"))
    return c.number(c.n)


def _elements(op: str, x: Expr) -> Expr:
    if x.type.shape not in ("n", "kept", "matrix"):
        raise RuleError(f"{op} of {x.type}: it reduces elements, and this is one value already")
    return x


def count(c: Context, op: str, x: Expr) -> Expr:
    if x.type.dtype == "selection":
        c.whole_tensor("count of a selection")
        return c.pool.make("count_kept", (), Type("int", "scalar"), x.value)
    _elements(op, x)
    if x.op == "ge" and x.args[1].op == "lift" and x.args[1].args[0].op == "adjust":
        adjusted = x.args[1].args[0]
        if adjusted.args[0] is x.args[0]:
            # adjust has counted just these elements
            return c.pool.make("adjusted_count", (adjusted,), Type("float", "scalar"))
    return _total(c, "sum", c.number(c.number(c.condition(x), "int")))


# tables


def quantiles(c: Context, op: str, x: Expr, parts: Expr) -> Expr:
    x, parts = c.number(x), c.folded(c.exact(parts))
    c.whole_tensor(op, "remove `group:`, or write a table of levels, like [-1, 0, 1]")
    if parts.op != "const" or not isinstance(parts.value, int) or not 2 <= parts.value <= 4096:
        raise RuleError(
            f"{op}: the size of a table is a whole number from 2 to 4096",
            "it must follow from the parameters alone",
        )
    if x.type.shape != "n":
        raise RuleError(f"{op} takes elements first, not {x.type}")
    return c.pool.make(op, (x,), Type("float", "table", str(parts.value - 1)), parts.value)


def sum_by(c: Context, op: str, index: Expr, x: Expr, size: Expr) -> Expr:
    index, x = c.exact(index), c.number(x)
    if c.grouped:
        raise RuleError("a grouped spec has no rows", "remove `group:`")
    if index.type.dtype != "int":
        raise RuleError(f"sum_by takes integers first, not {index.type}", "int(x) makes them")
    if index.type.shape != "matrix":
        index, x = (c.lift(_every_element(op, a), "n") for a in (index, x))
    elif x.type.dims != index.type.dims:
        raise RuleError(f"sum_by takes an element for each index, not {x.type}")
    return c.pool.make(op, (index, x), matrix_type(c.pool.const(1), c.dimension(size)))


def literal(c: Context, op: str, *args: Expr) -> Expr:
    args = tuple(map(c.folded, args))
    if any(a.op != "const" or a.type.dtype not in ("int", "float") for a in args):
        hint = "those of all elements are by quantiles(x, q) or sum_by(i, x, q)"
        raise RuleError("numbers in brackets must follow from the parameters alone", hint)
    values = tuple(float(np.float32(a.value)) for a in args)
    if not all(map(math.isfinite, values)):
        raise RuleError("numbers in brackets are finite, as float32")
    return c.pool.make(op, (), Type("float", "table", str(len(values))), values)


def bucket(c: Context, op: str, x: Expr, edges: Expr) -> Expr:
    if edges.type.shape != "table":
        hint = "quantiles makes one, or write its edges: bucket(x, [-1, 0, 1])"
        raise RuleError(f"bucket takes a table, not {edges.type}", hint)
    if edges.op == "literal" and any(a >= b for a, b in pairwise(edges.value)):
        raise RuleError("the edges of bucket ascend", "write them from the least on, each once")
    x = _reader(c, op, c.number(x), edges)
    return c.pool.make(op, (x, edges), replace(x.type, dtype="int"))


def lookup(c: Context, op: str, table: Expr, index: Expr) -> Expr:
    if table.type.shape != "table" and not is_row(table):
        hint = "quantiles and [a, b, ...] make a table, sum_by a row"
        raise RuleError(f"lookup takes a table or a row, not {table.type}", hint)
    if index.type.dtype != "int":
        raise RuleError(f"lookup takes an integer, not {index.type}", "int(x) makes one")
    if index.type.shape != "matrix" or table.type.shape == "table":
        index = _reader(c, op, index, table)
    return c.pool.make(op, (c.number(table), index), replace(index.type, dtype="float"))


def _reader(c: Context, op: str, x: Expr, table: Expr) -> Expr:
    """x, which reads a table: elements, or values of any level if the table is a literal."""
    if table.op == "literal" and x.type.shape in ("scalar", "group", "kept", "matrix"):
        return x
    return c.lift(_every_element(op, x), "n")


def _every_element(op: str, x: Expr) -> Expr:
    if x.type.shape not in ("n", "scalar", "static"):
        raise RuleError(f"{op} looks at every element, not at {x.type}")
    return x


# ---- rule selections ----------------------------------------------------------------------------
# Typing rules of selections: thresholds, selections, and uses of selected elements. The size of
# a selection may depend on data.

# thresholds


def sample(c: Context, op: str, x: Expr, size: Expr) -> Expr:
    c.refuse_share(op, size)
    c.whole_tensor(op)
    x = c.number(x)
    if x.type.shape != "n":
        raise RuleError(f"sample takes elements, not {x.type}")
    return c.pool.make("sample", (x, c.static(op, size)), Type("float", "sample"))


def kth_largest(c: Context, op: str, x: Expr, k: Expr) -> Expr:
    c.refuse_share(op, k)
    c.whole_tensor(op)
    x, k = c.number(x), c.number(k)
    if x.type.shape not in ("n", "sample"):
        raise RuleError(f"kth_largest takes elements or a sample, not {x.type}")
    if k.type.shape not in ("static", "scalar"):
        raise RuleError(f"k is one number, not {k.type}")
    return c.pool.make(op, (x, k), Type("float", "scalar"))


def search(c: Context, op: str, *args: Expr) -> Expr:
    """adjust and bisect: elements first, then the numbers of the search."""
    c.whole_tensor(op)
    x, *rest = map(c.number, args)
    if x.type.shape != "n" or any(a.type.shape not in ("static", "scalar") for a in rest):
        raise RuleError(f"{op} takes elements first, then {len(rest)} numbers")
    return c.pool.make(op, (x, *rest), Type("float", "scalar"))


# selections


def selection(c: Context, op: str, key: Expr, limit: Expr | None = None) -> Expr:
    """top and filter."""
    if limit is not None:
        c.refuse_share(op, limit)
    if op == "top" or not c.encoding:
        c.whole_tensor(op, ROWS)
    limit = c.static(op, c.n if limit is None else limit)
    if "step" in depends(limit):
        raise RuleError(
            f"{op}: the bound must hold at every step",
            "what varies is the threshold: filter(x >= kth_largest(x, k), bound)",
        )
    given, key = key, c.number(key) if op == "top" else c.condition(key)
    if key.type.shape == "kept" and c.is_drawn(key.type.of):
        limit = arithmetic(c, "min", limit, c.selections[key.type.of].limit)
    elif key.type.shape != "n":
        raise RuleError(*_no_elements(op, given))
    if any(e.op == "in" for e in walk(key)):
        raise RuleError("a selection cannot depend on another selection")
    return c.pool.make(op, (key, limit), replace(key.type, dtype="selection"))


def _no_elements(op: str, x: Expr) -> tuple[str, str]:
    """Message and hint for a value that a selection cannot choose from."""
    if x.type.shape == "kept":
        actual = f"this has those of {x.type.of!r}"
        message = f"{op} selects among all elements or drawn ones, and {actual} alone"
        hint = f"one filter with both conditions: what selects {x.type.of!r} and ..."
        return message, hint if op == "filter" else f"{hint}, of x >= kth_largest(x, k)"
    if x.type.shape == "matrix":
        return f"{op} selects among elements, not those of a matrix", ROWS
    kinds = {"group": "one number of a group", "table": "a table", "sample": "a sample"}
    message = f"{op} selects among elements, and this is {kinds.get(x.type.shape, 'one number')}"
    return message, "x >= kth_largest(x, k) has one truth value for each" * (op == "filter")


def drawn(c: Context, op: str, size: Expr) -> Expr:
    """A selection of at least one element, so that a payload of them can show a NaN."""
    size = c.settled(size)
    c.refuse_share(op, size)
    c.whole_tensor(op)
    limit = arithmetic(c, "max", c.pool.const(1), c.static(op, size))
    if "step" in depends(limit):
        hint = "compute it from n and parameters"
        raise RuleError(f"{op}: the number must hold at every step", hint)
    return c.pool.make(op, (limit, limit), Type("selection", "n"))


# selected elements


def _selected(op: str, x: Expr) -> str:
    """The name of a selection."""
    if x.type.dtype != "selection":
        raise RuleError(f"{op} takes a selection, not {x.type}", "made by top() or filter()")
    return str(x.value)


def indices(c: Context, op: str, selection: Expr) -> Expr:
    name = _selected(op, selection)
    return c.pool.make(op, (), Type("int", "kept", name), name)


def gather(c: Context, op: str, x: Expr, selection: Expr) -> Expr:
    name, of = _selected("x[...]", selection), selection.type
    if (x.type.shape, x.type.of) != (of.shape, of.of) or x.type.dtype == "selection":
        hint = f"of those of {of.of!r}: x[{of.of}][{name}]" if of.of else ""
        raise RuleError(f"{x.type} has no elements to select", hint)
    return c.pool.make(op, (x,), Type(x.type.dtype, "kept", name), name)


def scatter(c: Context, op: str, index: Expr, value: Expr) -> Expr:
    if c.encoding:
        hint = "where(selection, a, b) changes a state's elements"
        raise RuleError("scatter belongs in decode", hint)
    value, of = c.number(value), index.type.of
    whole = (index.type.dtype, index.type.shape) == ("int", "kept")
    if index.op not in ("field", "indices") or not whole:
        raise RuleError(
            "scatter takes a payload field of indices first, or those of a drawn selection"
        )
    if value.type.shape == "kept" and value.type.of != of:
        raise RuleError("indices and values belong to different selections")
    within = c.selections[of].of if of in c.selections else ""
    result = Type("float", "kept" if within else "n", within)
    return c.pool.make(op, (index, c.lift(value, "kept", of)), result)


def spread(c: Context, op: str, condition: Expr, values: Expr) -> Expr:
    """A spread. check_arrays.py checks that the condition is that of the values' selection."""
    if c.encoding:
        raise RuleError("spread belongs in decode")
    inside, chosen = c.condition(condition), c.number(values)
    if inside.type.shape != "n":
        raise RuleError(f"spread takes a condition of every element first, not {condition.type}")
    if chosen.type.shape != "kept":
        raise RuleError(
            f"spread takes values of selected elements, not {values.type}",
            "where(c, a, b) takes values of all elements",
        )
    return c.pool.make(op, (inside, chosen), Type("float", "n"), chosen.type.of)


# ---- rule arrays --------------------------------------------------------------------------------

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
