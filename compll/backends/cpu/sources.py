"""Arrays that routines read: from memory, or computed from several arrays on each read.

PowerSGD reads gradient plus residual three times a step; an array of their sum would cost more than
the products.
"""

from __future__ import annotations

from llvmlite import ir

from compll.backends.cpu import instructions as ins
from compll.backends.cpu.builder import Builder, Variable, at
from compll.backends.cpu.printer import Printer
from compll.backends.cpu.storages import item_bytes, load_as
from compll.backends.cpu.types import F64, KINDS, c, lanes, number
from compll.ir.tile import Value, View, order_inside


def every(b: Builder, value: ir.Value, count: int) -> ir.Value:
    """A value in all lanes; 0 lanes: the value itself."""
    return b.splat(value, count) if count else value


def wide(b: Builder, x: ir.Value) -> ir.Value:
    """float32 as float64."""
    return b.fpext(x, lanes(F64, x))


class Source:
    """The lanes of a view, in the kernel that the printer builds. made: lanes that are
    computed already, by their values."""

    def __init__(self, printer: Printer, view: View) -> None:
        self.printer, self.b, self.view = printer, printer.b, view
        self.kind = KINDS[view.value.kind]
        matrix = view.matrix
        n = printer.row["n"]
        self.rows, self.cols = (
            (c(1), n)
            if matrix is None
            else (printer.value(matrix.rows), printer.value(matrix.cols))
        )
        self.size = n if matrix is None else printer.value(matrix.size)
        #: number of elements; zeros follow
        self.valid = n if view.ends else self.size
        if view.turned:  # the rows in memory
            self.rows, self.cols = self.cols, self.rows
        for v in values_of_piece(view.value):
            printer.value(v)  # before any loop

    def load(
        self, index: ir.Value, count: int, made: dict[int, ir.Value] | None = None
    ) -> ir.Value:
        """Elements from `index` on; 0 lanes: a single one."""
        return evaluated(self.printer, self.view.value, index, count, dict(made or {}))

    def place(self, row: ir.Value, column: ir.Value) -> ir.Value:
        """Index of an element of the matrix."""
        row, column = (column, row) if self.view.turned else (row, column)
        return self.b.add(self.b.mul(row, self.cols), column)

    def inside(self, index: ir.Value, lane: ir.Value = None) -> ir.Value:
        """An element; zero beyond the end. lane: condition that its row exists."""
        b = self.b
        there = b.icmp_signed("<", index, self.valid)
        there = there if lane is None else b.and_(there, lane)
        found = Variable(b, number(self.kind, 0))
        with b.if_then(there):
            found.set(self.load(index, 0))
        return found.get()


def values_of_piece(value: Value) -> list[Value]:
    """The piece's values in an expression of lanes."""
    return [v for v in order_inside([value]) if v.level == "piece"]


def evaluated(
    printer: Printer, v: Value, index: ir.Value, count: int, known: dict[int, ir.Value]
) -> ir.Value:
    """Lanes of a value from `index` on: loads, and expressions of loads."""
    b = printer.b
    if id(v) in known:
        return known[id(v)]
    if v.level == "piece":
        found = every(b, printer.value(v), count)
    elif v.op == "load":
        place = at(b, printer.pointers[v.attr], b.mul(index, c(item_bytes(v.attr))))
        found = load_as(b, place, v.attr.storage.name, count)
        found = ins.convert(b, found, KINDS[v.kind])
    else:
        found = ins.apply(b, v, [evaluated(printer, a, index, count, known) for a in v.args])
    known[id(v)] = found
    return found


def vector(kind: ir.Type, count: int) -> ir.Value:
    """The type of `count` lanes; 0: of a single number."""
    return ir.VectorType(kind, count) if count else kind


def zeros(kind: ir.Type, count: int) -> ir.Value:
    """`count` zeros; 0: a single one."""
    return ir.Constant(vector(kind, count), None if count else 0)
