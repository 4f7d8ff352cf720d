"""Typing rules of reductions over a tensor, a group or a selection: many elements in, one value
(or a table of values) out; and of reads of tables."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from compll.errors import RuleError
from compll.frontend.rule_context import Context, is_row, matrix_type
from compll.frontend.rule_elements import arithmetic
from compll.ir.expr import Expr, Type


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
