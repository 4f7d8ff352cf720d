"""Typing rules of reductions: many elements in, one value (or a table of values) out."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np

from compll.errors import RuleError
from compll.frontend.rule_elements import Rules
from compll.ir import matrices
from compll.ir.expr import Expr, Type


class ReductionRules:
    """Rules of reductions over a tensor, a group or a selection, and of tables."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.pool = rules, rules.pool

    def extreme(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if len(args) == 2:
            return self.rules.arithmetic(op, args)
        return self.reduction(op, args)

    def reduction(self, op: str, args: tuple[Expr, ...]) -> Expr:
        x = self.rules.number(args[0], "float")
        self.need_elements(op, x)
        if op in ("min", "max"):
            return self.total(op, x)
        if len(args) == 2:
            return self.moments(op, *self.masked(x, self.rules.condition(args[1])))
        return self.moments(op, x, self.size(x))

    def masked(self, x: Expr, c: Expr) -> tuple[Expr, Expr]:
        """x if c holds, else zero; and the number of elements for which c holds."""
        zero = self.rules.number(self.pool.const(0), "float")
        held = self.rules.elementwise("where", (c, x, zero))
        if held.type.shape == "matrix":
            raise RuleError("a condition chooses elements, not those of a matrix")
        return held, self.count("count", (self.rules.lift(c, held.type.shape, held.type.of),))

    def moments(self, op: str, x: Expr, size: Expr) -> Expr:
        """sum, mean, std or norm2 of x, with `size` elements."""
        if op == "sum":
            return self.total(op, x)
        if op == "mean":
            return self.rules.elementwise("div", (self.total("sum", x), size))
        squares = self.total("sum", self.rules.elementwise("mul", (x, x)))
        if op == "norm2":
            return self.rules.elementwise("sqrt", (squares,))
        mean = self.rules.elementwise("div", (self.total("sum", x), size))
        spread = self.rules.elementwise(
            "sub",
            (
                self.rules.elementwise("div", (squares, size)),
                self.rules.elementwise("mul", (mean, mean)),
            ),
        )
        zero = self.rules.number(self.pool.const(0), "float")
        return self.rules.elementwise("sqrt", (self.rules.elementwise("max", (spread, zero)),))

    def total(self, op: str, x: Expr) -> Expr:
        if x.type.shape == "kept":
            self.rules.whole_tensor(f"{op} of selected elements")
        shape = self.rules.whole if x.type.shape == "n" else "scalar"
        return self.pool.make(f"reduce_{op}", (x,), Type("float", shape))

    def size(self, x: Expr) -> Expr:
        """Number of elements that a reduction of x runs over, as a float."""
        if x.type.shape == "kept":
            return self.rules.number(
                self.pool.make("count_kept", (), Type("int", "scalar"), x.type.of), "float"
            )
        if x.type.shape == "matrix":
            return self.rules.number(self.rules.arithmetic("mul", x.type.dims), "float")
        if self.rules.whole == "group":
            return self.pool.make("group_size", (), Type("float", "group"))
        return self.rules.number(self.pool.make("param", (), Type("int", "static"), "n"), "float")

    def need_elements(self, op: str, x: Expr) -> None:
        if x.type.shape not in ("n", "kept", "matrix"):
            raise RuleError(f"{op} of {x.type}: it reduces elements, and this is one value already")

    def count(self, op: str, args: tuple[Expr, ...]) -> Expr:
        (x,) = args
        if x.type.dtype == "selection":
            self.rules.whole_tensor("count of a selection")
            return self.pool.make("count_kept", (), Type("int", "scalar"), x.value)
        self.need_elements(op, x)
        if x.op == "ge" and x.args[1].op == "lift" and x.args[1].args[0].op == "adjust":
            adjusted = x.args[1].args[0]
            if adjusted.args[0] is x.args[0]:
                # adjust has counted just these elements
                return self.pool.make("adjusted_count", (adjusted,), Type("float", "scalar"))
        ones = self.rules.number(self.rules.number(self.rules.condition(x), "int"), "float")
        return self.total("sum", ones)

    # tables

    def table(self, op: str, args: tuple[Expr, ...], size: Expr, less: int) -> Expr:
        """A table over the elements `args`, of `size` minus `less` values."""
        self.rules.whole_tensor(op)
        if size.op != "const" or not isinstance(size.value, int) or not 2 <= size.value <= 4096:
            raise RuleError(
                f"{op}: the size of a table is a whole number from 2 to 4096",
                "it must follow from the parameters alone",
            )
        if any(a.type.shape != "n" for a in args):
            raise RuleError(f"{op} takes elements first, not {args[0].type}")
        made = Type("float", "table", str(size.value - less))
        return self.pool.make(op, args, made, size.value)

    def quantiles(self, op: str, args: tuple[Expr, ...]) -> Expr:
        return self.table(op, (self.rules.number(args[0], "float"),), args[1], 1)

    def sum_by(self, op: str, args: tuple[Expr, ...]) -> Expr:
        index, x = args[0], self.rules.number(args[1], "float")
        if self.rules.grouped:
            raise RuleError("a grouped spec has no rows", "remove `group:`")
        if index.type.dtype != "int":
            raise RuleError(f"sum_by takes integers first, not {index.type}", "int(x) makes them")
        given: tuple[Expr, ...] = (index, x)
        if index.type.shape != "matrix":
            given = tuple(self.rules.lift(self.elements(op, a), "n") for a in given)
        elif x.type.dims != index.type.dims:
            raise RuleError(f"sum_by takes an element for each index, not {x.type}")
        size = matrices.dimension(args[2])
        return self.pool.make(op, given, matrices.made(self.pool.const(1), size))

    def literal(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if any(a.op != "const" or a.type.dtype not in ("int", "float") for a in args):
            hint = "those of all elements are by quantiles(x, q) or sum_by(i, x, q)"
            raise RuleError("numbers in brackets must follow from the parameters alone", hint)
        values = tuple(float(np.float32(a.value)) for a in args)
        if not all(map(math.isfinite, values)):
            raise RuleError("numbers in brackets are finite, as float32")
        return self.pool.make(op, (), Type("float", "table", str(len(values))), values)

    def bucket(self, op: str, args: tuple[Expr, ...]) -> Expr:
        table = args[1]
        if table.type.shape != "table":
            hint = "quantiles makes one, or write its edges: bucket(x, [-1, 0, 1])"
            raise RuleError(f"bucket takes a table, not {table.type}", hint)
        if table.op == "literal" and any(a >= b for a, b in pairwise(table.value)):
            raise RuleError("the edges of bucket ascend", "write them from the least on, each once")
        x = self.read(op, self.rules.number(args[0], "float"), table)
        return self.pool.make(op, (x, table), replace(x.type, dtype="int"))

    def read(self, op: str, x: Expr, table: Expr) -> Expr:
        """The read of a table by elements, or by values of any level if the table is a literal."""
        if table.op == "literal" and x.type.shape in ("scalar", "group", "kept", "matrix"):
            return x
        return self.rules.lift(self.elements(op, x), "n")

    def lookup(self, op: str, args: tuple[Expr, ...]) -> Expr:
        table = args[0]
        if table.type.shape != "table" and not matrices.row(table):
            hint = "quantiles and [a, b, ...] make a table, sum_by a row"
            raise RuleError(f"lookup takes a table or a row, not {table.type}", hint)
        if args[1].type.dtype != "int":
            raise RuleError(f"lookup takes an integer, not {args[1].type}", "int(x) makes one")
        index = args[1]
        if index.type.shape != "matrix" or table.type.shape == "table":
            index = self.read(op, index, table)
        made = replace(index.type, dtype="float")
        return self.pool.make(op, (self.rules.number(table, "float"), index), made)

    def elements(self, op: str, x: Expr) -> Expr:
        if x.type.shape not in ("n", "scalar", "static"):
            raise RuleError(f"{op} looks at every element, not at {x.type}")
        return x
