"""A kernel's function while it is built: pointers to its arrays, and values of the current piece."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from copy import copy

from llvmlite import ir

from compll.backends.cpu import instructions as ins
from compll.backends.cpu.builder import (
    F32,
    F64,
    I8,
    I32,
    I64,
    KINDS,
    PTR,
    VOID,
    Builder,
    Variable,
    at,
    c,
    lanes,
    number,
)
from compll.backends.cpu.instructions import item_bytes, load_as
from compll.backends.cpu.interface import GIVEN, signature
from compll.backends.cpu.lanes import LEAST, MOST
from compll.ir.tile import (
    GRADIENT,
    SIZES,
    Array,
    Domain,
    Kernel,
    Role,
    Value,
    View,
    order,
    order_inside,
)
from compll.numerics import draws
from compll.numerics.numbers import LANES
from compll.routines import tables

#: columns of a batch's table
COLUMNS = ("start", "n", "tensor", "first", "state")
TYPES = {ctypes.c_void_p: PTR, ctypes.c_int64: I64, ctypes.c_float: F32, ctypes.c_int8: I8}
#: totals of folds over the tiles, by fold: type, number of accumulators (lanes, from 0), and start
#: value
TOTALS: dict[str, tuple[ir.Value, int, float]] = {
    "sum": (F64, LANES, 0.0), "count": (I64, 1, 0), "max": (I32, 1, LEAST), "min": (I32, 1, MOST),
}  # fmt: skip


class Printer:
    """Builds the function of one kernel, and knows what its current piece has."""

    def __init__(self, module: ir.Module, kernel: Kernel) -> None:
        self.module, self.kernel = module, kernel
        self.tile, self.spec = kernel.tile, kernel.module
        kinds = [TYPES[kind] for kind in signature(kernel)]
        self.function = ir.Function(module, ir.FunctionType(VOID, kinds), f"{kernel.name} body")
        self.function.linkage = "internal"
        names = [*GIVEN, *kernel.states, *(key for a in kernel.sums for key in (a, (a, "at")))]
        self.given: dict[Hashable, ir.Value] = dict(zip(names, self.function.args, strict=True))
        self.b = Builder(self.function.append_basic_block("entry"))
        #: the number of the piece, and its row of the batch's table
        self.p: ir.Value = c(0)
        self.row: dict[str, ir.Value] = {}
        #: values that are known, and memory of those that steps make
        self.local: dict[Value, ir.Value] = {}
        self.results: dict[Value, ir.Value] = {}
        self.totals: dict[Value, ir.Value] = {}
        #: counts of selections and lengths of fields that steps have made, by instruction and name
        self.sizes: dict[tuple[str, str], ir.Value] = {}
        self.pointers: dict[Array, ir.Value] = {}
        #: states of one number, before any is stored
        self.before: dict[Array, ir.Value] = {}
        #: places for the numbers of selected elements, and of those that arrays have spread
        self.counts: dict[str | Array, ir.Value] = {}

    def open_piece(self, p: ir.Value, row: dict[str, ir.Value]) -> None:
        """Begin the piece of number p, whose row of the batch's table is given."""
        b, self.p, self.row = self.b, p, row
        self.pointers[GRADIENT] = at(b, self.given["x"], self.bytes(row["start"], 4))
        self.open_states()
        for array in self.kernel.sums:
            begin = b.load(at(b, self.given[array, "at"], self.bytes(p, 8)), typ=I64)
            self.pointers[array] = at(b, self.given[array], begin)
        for i, array in enumerate(self.kernel.scratch):
            self.pointers[array] = self.scratch(i)

    def open_states(self) -> None:
        """Set pointers to the piece's states. Loads states of one number before any is stored."""
        b = self.b
        for s in self.kernel.states:
            single = s.domain.kind == "scalar"
            index = self.row["tensor" if single else "state"]
            self.pointers[s] = at(b, self.given[s], self.bytes(index, item_bytes(s)))
            if single:
                self.before[s] = b.load(self.pointers[s], typ=F32)

    def scratch(self, index: int) -> ir.Value:
        """Address of an array of scratch memory."""
        offset = self.b.add(self.b.mul(self.given["array_bytes"], c(index)), c(64))
        return at(self.b, self.given["scratch"], offset)

    def workspace(self, number_of: int) -> ir.Value:
        """Memory for a routine's own use."""
        return self.scratch(len(self.kernel.scratch) + number_of)

    def bytes(self, count: ir.Value, size: int) -> ir.Value:
        """Bytes of `count` elements."""
        return self.b.mul(count, c(size))

    @contextmanager
    def outlined(self, name: str) -> Iterator[Printer]:
        """Build the body of the `with` as a function of its own, by the printer that it yields, and
        call it here: so each can use all registers.

        The function gets all values that are known so far; LLVM removes unused ones.
        """
        inner, tables = copy(self), ("given", "row", "pointers", "local")
        before = {what: getattr(self, what) for what in tables}
        values = [v for of in before.values() for v in of.values()]
        values = list(dict.fromkeys(v for v in values if not isinstance(v, ir.Constant)))
        kind = ir.FunctionType(VOID, [v.type for v in values])
        function = ir.Function(self.module, kind, self.module.get_unique_name(name))
        function.linkage = "internal"
        function.attributes.add("noinline")
        inside = dict(zip(values, function.args, strict=True))
        for what, of in before.items():
            setattr(inner, what, {key: inside.get(v, v) for key, v in of.items()})
        inner.b = Builder(function.append_basic_block("entry"))
        yield inner
        inner.b.ret_void()
        self.b.call(function, values)

    # the payload

    def payload(self, role: Role) -> ir.Value:
        """Address of the piece's payload, or of the one that a hop is given."""
        b, given = self.b, role == "incoming" and not self.kernel.decodes
        payload, starts = ("data", "data_at") if given else ("payload", "at")
        begin = b.load(at(b, self.given[starts], self.bytes(self.p, 8)), typ=I64)
        return at(b, self.given[payload], begin)

    def fields(self) -> None:
        """Set pointers to fields whose starts are known by now: steps make counts and lengths."""
        for array, start in self.kernel.starts.items():
            needed = [(v.op, v.attr) for v in order([start]) if v.op in SIZES]
            if array not in self.pointers and all(size in self.sizes for size in needed):
                self.pointers[array] = at(self.b, self.payload(array.role), self.value(start))

    def used(self) -> ir.Value:
        """Address of the length of the piece's payload."""
        return at(self.b, self.given["used"], self.bytes(self.p, 8))

    def items(self, domain: Domain) -> ir.Value:
        """Items of a domain."""
        if domain.kind == "matrix":
            return self.value(self.kernel.extents[domain.dims].size)
        return self.kept(domain.of)

    def among(self, selection: str) -> ir.Value:
        """Number of elements among which the selection chooses."""
        return self.kept(self.spec.among(selection))

    def kept(self, selection: str) -> ir.Value:
        """Elements of a selection; "": of the piece."""
        return self.value(self.kernel.counts[selection])

    # values of the piece

    def value(self, v: Value) -> ir.Value:
        """A value of the piece, built on first use."""
        if v not in self.local:
            self.local[v] = self.make(v)
        return self.local[v]

    def make(self, v: Value) -> ir.Value:
        """A value: one that a step made, or that a method op_NAME builds, or an instruction."""
        if v in self.results:
            return self.b.load(self.results[v], typ=KINDS[v.kind])
        special = getattr(self, f"op_{v.op}", None)
        if special is not None:
            return special(v)
        args = [self.value(a) for a in v.args]
        if v.op in ins.CALLED and v.kind == "f64":
            return ins.CALLED[v.op](self.b, *args)
        return ins.apply(self.b, v, args)

    def made(self, v: Value) -> ir.Value:
        """Memory for a result of a routine."""
        if v not in self.results:
            self.results[v] = self.b.stack(KINDS[v.kind])
        return self.results[v]

    def draw_keys(self, seed: ir.Value, draw: int, upper: ir.Value) -> ir.Value:
        """The keys of a draw of the piece (see [Note: random draws] in draws.py)."""
        words = [seed, self.given["step"], self.row["tensor"], c(draw & draws.MASK), upper]
        return ins.draw_keys(self.b, *words)

    def op_const(self, v: Value) -> ir.Value:
        return number(KINDS[v.kind], v.attr)

    def op_size(self, v: Value) -> ir.Value:
        return self.row["n"]

    def op_scale(self, v: Value) -> ir.Value:
        return self.given[v.op]

    op_workers = op_scale

    def op_static(self, v: Value) -> ir.Value:
        """An entry of the piece's row of numbers from the host."""
        b = self.b
        index = b.add(self.bytes(self.p, len(self.kernel.statics)), c(v.attr))
        result = b.load(at(b, self.given["statics"], self.bytes(index, 8)), typ=F64)
        if v.kind == "bool":
            return b.fcmp_unordered("!=", result, number(F64, 0.0))
        return ins.convert(b, result, KINDS[v.kind])

    def op_counted(self, v: Value) -> ir.Value:
        return self.sizes[v.op, v.attr]

    op_length = op_counted

    def op_used(self, v: Value) -> ir.Value:
        return self.b.load(self.used(), typ=I64)

    def op_header(self, v: Value) -> ir.Value:
        """A number of the header; 0 if the payload is too short for it."""
        b, result = self.b, Variable(self.b, c(0))
        with b.if_then(b.icmp_signed(">=", self.op_used(v), c(v.attr + 4))):
            place = at(b, self.payload("incoming"), c(v.attr))
            result.set(b.zext(b.load(place, typ=I32, align=1), I64))
        return result.get()

    def op_load(self, v: Value) -> ir.Value:
        b, storage = self.b, v.attr.storage.name
        if v.attr in self.before:
            return ins.convert(b, self.before[v.attr], KINDS[v.kind])
        place = self.pointers[v.attr]
        if v.kind == "table":
            return place
        result = load_as(b, place, storage, 0)
        return b.zext(result, I64) if storage == "uint32" else ins.convert(b, result, KINDS[v.kind])

    def op_total(self, v: Value) -> ir.Value:
        """The total of a fold over all tiles."""
        b, (f,) = self.b, v.args
        kind, _, start = TOTALS[f.attr]
        result = b.load(self.totals[f], typ=kind)
        if f.attr == "count":
            return b.sitofp(result, F64)
        if f.attr == "sum" or v.kind == "i32":
            return result
        nothing = b.icmp_signed("==", result, number(I32, start))
        return b.fpext(b.select(nothing, number(F32, 0.0), ins.ROWS["from_key"](b, result)), F64)

    # tables

    def op_table(self, v: Value) -> ir.Value:
        """Memory for a table that a step makes."""
        return self.b.stack(F32, int(v.attr.domain.of))

    def op_buckets(self, v: Value) -> ir.Value:
        """The data that finds the bucket of a number in a table."""
        room = self.b.stack(I8, tables.bucket_bytes(v.attr))
        ins.function(tables.buckets, edges=v.attr)(self.b, self.value(v.args[0]), room)
        return room

    def op_bucket(self, v: Value) -> ir.Value:
        b, (key, table) = self.b, map(self.value, v.args)
        return b.extract_element(ins.bucket(b, table, b.splat(key, 1), v.attr), number(I32, 0))

    def op_lookup(self, v: Value) -> ir.Value:
        b, (table, index) = self.b, map(self.value, v.args)
        place = b.trunc(ins.clipped(b, index, v.attr), I32)
        return b.extract_element(ins.gathered(b, table, b.splat(place, 1), F32), number(I32, 0))


# ---- sources ------------------------------------------------------------------------------------
# Arrays that routines read: from memory, or computed from several arrays on each read.
# PowerSGD reads gradient plus residual three times a step; an array of their sum would cost
# more than the products.


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
        self, index: ir.Value, count: int, made: dict[Value, ir.Value] | None = None
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
        result = Variable(b, number(self.kind, 0))
        with b.if_then(there):
            result.set(self.load(index, 0))
        return result.get()


def values_of_piece(value: Value) -> list[Value]:
    """The piece's values in an expression of lanes."""
    return [v for v in order_inside([value]) if v.level == "piece"]


def evaluated(
    printer: Printer, v: Value, index: ir.Value, count: int, values: dict[Value, ir.Value]
) -> ir.Value:
    """Lanes of a value from `index` on: loads, and expressions of loads."""
    b = printer.b
    if v in values:
        return values[v]
    if v.level == "piece":
        result = every(b, printer.value(v), count)
    elif v.op == "load":
        place = at(b, printer.pointers[v.attr], b.mul(index, c(item_bytes(v.attr))))
        result = load_as(b, place, v.attr.storage.name, count)
        result = ins.convert(b, result, KINDS[v.kind])
    else:
        result = ins.apply(b, v, [evaluated(printer, a, index, count, values) for a in v.args])
    values[v] = result
    return result


def vector(kind: ir.Type, count: int) -> ir.Value:
    """The type of `count` lanes; 0: of a single number."""
    return ir.VectorType(kind, count) if count else kind


def zeros(kind: ir.Type, count: int) -> ir.Value:
    """`count` zeros; 0: a single one."""
    return ir.Constant(vector(kind, count), None if count else 0)
