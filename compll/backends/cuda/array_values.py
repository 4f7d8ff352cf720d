"""Expressions of specs that are computed an array at a time as instructions: what single elements make
is computed where it is needed, up to the arrays of `arrays` (an ArrayPrinter).

An element is known by its place in memory, which matrices, their transposes and rows share with what
they are made of (see View in arrays.cuh).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compll.backends.cuda.body import Body
from compll.backends.cuda.domains import PIECE, Domain, domain_of
from compll.ir.expr import Expr
from compll.ir.program import LIBRARY, Unsupported
from compll.ir.tile import Kernel, Value
from compll.passes.values import FOLDS, KINDS, Values

ARRAYS = ("n", "kept", "matrix")
#: operators whose elements do not follow from the same elements of their arguments
PLACED = (
    "field", "combined", "random_matrix", "gather", "indices", "matrix", "flat", "transpose",
    "take_columns", "matmul", "lookup", "hadamard", "scatter", "in", "orthonormal", "left_vectors",
    "right_vectors", "singular_values", "chosen", "sum_by", "row_max", "row_min", "top_columns",
    "place_columns",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Element:
    """What a function gives of an element's number and other lanes' names: its text in a kernel."""

    text: Callable[[Body, str, list[str]], str]


def element(e: Expr, text: Callable[[Body, str, list[str]], str], *args: Value) -> Value:
    """A lane that a function gives. text: of the kernel, the element's number, and args."""
    kind = "i32" if e.type.dtype == "bool" else KINDS[e.type.dtype]
    return Value("element", args, kind, "lane", Element(text))


def elementwise(e: Expr) -> bool:
    """Whether an element of it follows from the same element of its arguments."""
    states = e.op == "state" and e.type.shape == "matrix"
    return e.type.shape in ARRAYS and e.op not in PLACED and not states


class ArrayValues(Values):
    """Values that know matrices, selections that are drawn, and what ranks combine."""

    def __init__(self, arrays: Any, kernel: Kernel) -> None:
        super().__init__(kernel.module, kernel)
        self.arrays = arrays
        self.known: dict[tuple[Domain, int], Value] = {}

    def of(self, expr: Expr) -> Value:
        """The instruction that gives an expression's value; arrays that it needs are made now."""
        domain = domain_of(expr.type) if expr.type.shape in ARRAYS else PIECE
        if (domain, id(expr)) not in self.known:
            self.known[domain, id(expr)] = self.found(expr)
        return self.known[domain, id(expr)]

    def found(self, e: Expr) -> Value:
        if e.type.shape == "static":
            return self.static(e)
        if e.op in FOLDS and e.type.shape == "scalar":
            total: Value = self.arrays.total(e)
            return total
        if e.type.shape in ARRAYS and not elementwise(e):
            lane: Value = self.arrays.lane(e)
            return lane
        if e.op in LIBRARY:
            raise Unsupported(f"`{e.op}` in a spec that is computed an array at a time", "", e)
        for a in e.args:
            self.done[id(a)] = self.argument(a, e)
        wide = any(a.type.shape == "scalar" and a.type.dtype == "float" for a in e.args)
        return self.beside_numbers(e) if e.type.shape == "matrix" and wide else self.one(e)

    def argument(self, a: Expr, e: Expr) -> Value:
        """An argument's value; a row or column of one repeats."""
        if a.type.shape == "matrix" and e.type.shape == "matrix" and a.type.dims != e.type.dims:
            repeated: Value = self.arrays.repeated(a, e.type.dims)
            return repeated
        return self.of(a)

    def beside_numbers(self, e: Expr) -> Value:
        """A number beside a matrix is float64, as in the reference, and so is what is made of it."""
        args = [self.done[id(a)] for a in e.args]
        args = [self.make("convert", [v], "f64", v.level) if v.kind == "f32" else v for v in args]
        op = "where" if e.op == "choose" else e.op
        if e.type.dtype == "bool":
            return self.make(op, args, "bool", "lane")
        found = self.make(op, args, "f64", "lane")
        return self.make("convert", [found], KINDS[e.type.dtype], "lane")

    # operators

    def op_input(self, e: Expr, kind: str, level: str) -> Value:
        g = super().op_input(e, kind, level)
        return self.fed(g) if self.arrays.fed and self.module.feedback else g

    def op_state(self, e: Expr, kind: str, level: str) -> Value:
        if self.arrays.fed:
            return super().op_state(e, kind, level)
        zero = self.make("const", (), "f32" if level == "lane" else "f64", "piece", 0.0)
        return self.lanes(zero) if level == "lane" else zero

    def op_field(self, e: Expr, kind: str, level: str) -> Value:
        found: Value = self.arrays.read(e)
        return found

    op_combined = op_field

    def op_ones(self, e: Expr, kind: str, level: str) -> Value:
        return self.lanes(self.make("const", (), "f32", "piece", 1.0))
