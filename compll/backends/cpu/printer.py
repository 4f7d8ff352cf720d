"""Tile programs as LLVM IR: a function over a batch's pieces, which calls one for each walk.

A last, shorter tile is copied to scratch memory and padded with zeros, walked over as a full one,
and its results are copied back; its packed codes are laid out differently (see [Note: packing] in
layout.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from compll.backends.cpu import denormals, table_steps
from compll.backends.cpu import instructions as ins
from compll.backends.cpu.builder import (
    F32,
    F64,
    I1,
    I8,
    I32,
    I64,
    KINDS,
    PTR,
    VOID,
    Builder,
    at,
    loop,
    number,
)
from compll.backends.cpu.calls import Calls
from compll.backends.cpu.helpers import Helpers
from compll.backends.cpu.interface import GIVEN, signature
from compll.backends.cpu.kth_largest import KthLargestSearch
from compll.backends.cpu.nontemporal_stores import zero
from compll.backends.cpu.payload_fields import PayloadFields
from compll.backends.cpu.storages import finite_or, item_bytes, load_as, stored_as
from compll.backends.cpu.streams import ascending, stream
from compll.backends.cpu.threshold_search import Tries
from compll.backends.cpu.walk_calls import WalkCalls
from compll.ir.layout import header
from compll.ir.tile import (
    STATUS,
    Ascending,
    Call,
    Kernel,
    Op,
    Search,
    Store,
    Stream,
    Value,
    Walk,
    When,
)

#: columns of a batch's table
COLUMNS = ("start", "n", "tensor", "first", "state")
TYPES = {ctypes.c_void_p: PTR, ctypes.c_int64: I64, ctypes.c_float: F32, ctypes.c_int8: I8}

SEARCHES: dict[str, Callable[[ir.Value, Search], None]] = {
    "kth_largest": lambda printer, step: KthLargestSearch(printer, step).emit(),
    "adjust": lambda printer, step: Tries(printer, step).emit(),
    "bisect": lambda printer, step: Tries(printer, step).emit(),
    "quantiles": table_steps.quantiles,
}


def module_text(name: str, kernels: Sequence[Kernel]) -> str:
    """The LLVM IR of a module's kernels."""
    module = ir.Module(name)
    helpers = Helpers(module)
    for kernel in kernels:
        Printer(module, kernel, helpers).emit()
    return str(module)


def export(module: ir.Module, name: str, body: Any) -> None:
    """A function that calls a kernel's body and keeps denormal numbers, whatever the caller's
    thread does with them: otherwise its payloads would differ."""
    function = ir.Function(module, body.function_type, name)
    b = Builder(function.append_basic_block("entry"))
    with denormals.kept(b):
        b.call(body, function.args, attrs=("noinline",))
    b.ret_void()


class Printer:
    """Builds the functions of one kernel."""

    def __init__(self, module: ir.Module, kernel: Kernel, helpers: Helpers) -> None:
        self.module, self.kernel, self.helpers = module, kernel, helpers
        self.tile, self.spec = kernel.tile, kernel.module
        kinds = [TYPES[kind] for kind in signature(kernel)]
        kind = ir.FunctionType(VOID, kinds)
        self.function = ir.Function(module, kind, f"{kernel.name} body")
        self.function.linkage = "internal"
        names = [*GIVEN, *(f"state {s.name}" for s in kernel.states)]
        names += [f"{what} {f.name}" for f in kernel.added for what in ("sum", "sum at")]
        self.given = dict(zip(names, self.function.args, strict=True))
        self.encodes = not kernel.name.startswith(("decode", "check"))
        self.hops = "hop" in kernel.name
        self.routines = Calls(self)
        self.calls = WalkCalls(self)
        self.b = Builder(self.function.append_basic_block("entry"))

    def emit(self) -> None:
        """Build the function's body: a loop over pieces."""
        b = self.b
        export(self.module, self.kernel.name, self.function)
        if self.kernel.name.startswith("decode") and "check body" in self.module.globals:
            b.call(self.module.globals["check body"], self.function.args, attrs=("noinline",))
            with b.if_then(b.icmp_signed("!=", self.bad(), number(I64, 0)), likely=False):
                b.ret_void()
        with loop(b, self.given["rows"]) as p:
            row = at(b, self.given["table"], b.mul(p, number(I64, 40)))
            self.row = {
                name: b.load(at(b, row, number(I64, 8 * i)), typ=I64)
                for i, name in enumerate(COLUMNS)
            }
            self.p = p
            with b.if_then(b.icmp_signed(">", self.row["n"], number(I64, 0))):
                self.piece()
        if self.calls.past:
            b.fence("seq_cst")  # from here on other threads see stores that bypassed the cache
        b.ret_void()

    def bad(self) -> ir.Value:
        """The number, from 1, of a piece with positions outside its tensor; 0 if there is none."""
        return self.b.load(self.given["bad"], typ=I64)

    def piece(self) -> None:
        b, n = self.b, self.row["n"]
        self.local: dict[int, ir.Value] = {}
        self.rooms: dict[int, ir.Value] = {}
        self.tiles = b.udiv(b.add(n, number(I64, self.tile - 1)), number(I64, self.tile))
        self.pointers = {"g": at(b, self.given["x"], self.bytes(self.row["start"], 4))}
        self.open_states()
        self.open_sums()
        self.counts: dict[str, ir.Value] = {}
        self.payload = PayloadFields(self)
        for i, f in enumerate(self.kernel.scratch):
            offset = b.add(b.mul(self.given["room"], number(I64, i)), number(I64, 64))
            self.pointers[f"{f.shape} {f.name}"] = at(b, self.given["scratch"], offset)
        for name in [one.selection for w in self.kernel.walks for one in w.compacts]:
            self.counts[name] = self.pointers[f"count {name}"] = b.room(I64, 2)
        if self.kernel.name == "check":
            return self.check()
        if not self.encodes:
            self.payload.read_header()
        self.payload.fields("payload", "out" if self.encodes else "in", "at")
        if self.hops:
            self.payload.fields("data", "in", "data_at")
        self.steps(self.kernel.steps)
        if self.encodes:
            self.close(self.payload.fields("payload", "out", "at"))
        return None

    def room(self, number_of: int) -> ir.Value:
        """Memory for a routine's own use."""
        index = len(self.kernel.scratch) + number_of
        offset = self.b.mul(self.given["room"], number(I64, index))
        return at(self.b, self.given["scratch"], self.b.add(offset, number(I64, 64)))

    def open_sums(self) -> None:
        """Set pointers to the piece's sums over the ranks."""
        b = self.b
        for f in self.kernel.added:
            begin = b.load(at(b, self.given[f"sum at {f.name}"], self.bytes(self.p, 8)), typ=I64)
            self.pointers[f"in {f.name}"] = at(b, self.given[f"sum {f.name}"], begin)

    def open_states(self) -> None:
        """Set pointers to the piece's states. Loads states of one number before any is stored."""
        b = self.b
        self.before: dict[str, ir.Value] = {}
        for s in self.kernel.states:
            name, index = f"state {s.name}", self.row["tensor" if s.shape == "scalar" else "state"]
            self.pointers[name] = at(b, self.given[name], self.bytes(index, item_bytes(s)))
            if s.shape == "scalar":
                self.before[s.name] = b.load(self.pointers[name], typ=F32)

    def check(self) -> None:
        """Report a payload with another length than its counts say, and bad positions."""
        b = self.b
        piece = b.add(self.p, number(I64, 1))
        used = b.load(at(b, self.given["used"], self.bytes(self.p, 8)), typ=I64)
        before = self.bad()
        b.store(b.neg(piece), self.given["bad"])
        head = 4 * sum(map(len, header(self.spec)))
        with b.if_then(b.icmp_signed(">=", used, number(I64, head))):
            self.payload.read_header()
            fits: ir.Value = number(I1, 1)
            for name, size in self.payload.sizes.items():
                most = self.value(self.kernel.limits[name])
                fits = b.and_(fits, b.icmp_signed("<=", size, most))
            end = b.add(
                self.payload.fields("payload", "in", "at"), number(I64, int(self.spec.status))
            )
            with b.if_then(b.and_(fits, b.icmp_signed("==", end, used))):
                self.good: ir.Value = number(I1, 1)
                self.steps(self.kernel.steps)
                wrong = piece if self.spec.decode.op == "scatter" else b.neg(piece)
                b.store(b.select(self.good, before, wrong), self.given["bad"])

    def bytes(self, count: ir.Value, size: int) -> ir.Value:
        """Bytes of `count` elements."""
        return self.b.mul(count, number(I64, size))

    def close(self, end: ir.Value) -> None:
        """Write the payload's length."""
        b = self.b
        if self.spec.status:
            end = b.add(end, number(I64, 1))
        b.store(end, at(b, self.given["used"], self.bytes(self.p, 8)))

    # values of a piece

    def value(self, v: Value) -> ir.Value:
        """A value of the piece, built on first use."""
        if id(v) not in self.local:
            self.local[id(v)] = self.make(v)
        return self.local[id(v)]

    def make(self, v: Value) -> ir.Value:
        b = self.b
        if v.op == "const":
            return number(KINDS[v.kind], v.attr)
        if id(v) in self.rooms:
            return b.load(self.rooms[id(v)], typ=KINDS[v.kind])
        if v.op == "size":
            return self.row["n"]
        if v.op in ("scale", "workers"):
            return self.given[v.op]
        if v.op == "static":
            return self.static(v)
        if v.op == "total":
            return self.calls.total(v)
        if v.op == "counted":
            return self.payload.kept(v.attr)
        if v.op in ins.LONG and v.kind == "f64":
            kinds = [F64] * len(v.args)
            function = self.helpers.get(f"called_{v.op}", F64, kinds, ins.ROWS[v.op])
            return b.call(function, [self.value(a) for a in v.args])
        if v.op == "told":
            status = b.load(self.pointers[f"in {STATUS.name}"], typ=I8)
            return b.icmp_unsigned("!=", status, number(I8, 0))
        if v.op == "load" and v.attr.name in self.before:
            return ins.convert(b, self.before[v.attr.name], KINDS[v.kind])
        if v.op in table_steps.VALUES:
            return table_steps.VALUES[v.op](self, v)
        if v.kind == "table":
            return self.pointers[f"in {v.attr.name}"]
        if v.op == "load":
            found = load_as(b, self.pointers[f"in {v.attr.name}"], v.attr.storage, 0)
            if v.attr.storage == "uint32":
                return b.zext(found, I64)
            return ins.convert(b, found, KINDS[v.kind])
        return ins.apply(b, v, [self.value(a) for a in v.args])

    def static(self, v: Value) -> ir.Value:
        """An entry of the piece's row of numbers from the host."""
        b = self.b
        index = b.add(self.bytes(self.p, len(self.kernel.statics)), number(I64, v.attr))
        found = b.load(at(b, self.given["statics"], self.bytes(index, 8)), typ=F64)
        if v.kind == "bool":
            return b.fcmp_unordered("!=", found, number(F64, 0.0))
        return ins.convert(b, found, KINDS[v.kind])

    # steps

    def steps(self, steps: list[Op]) -> None:
        """Steps in order; states of one number are stored at the end."""
        states = [s for s in steps if isinstance(s, Store) and s.target == "state"]
        for step in steps:
            if step not in states:
                self.step(step)
        for s, value in [(s, self.value(s.value)) for s in states]:
            assert s.field is not None
            value = ins.convert(self.b, value, F32)
            value = finite_or(self.b, value, self.before[s.name], s.field.storage)
            self.b.store(value, self.pointers[f"state {s.name}"])

    def step(self, step: Op) -> None:
        if isinstance(step, Walk):
            self.walk(step)
        elif isinstance(step, Call):
            self.routines.emit(step)
        elif isinstance(step, Stream):
            stream(self, step)
        elif isinstance(step, Ascending):
            ascending(self, step)
        elif isinstance(step, Search):
            SEARCHES[step.how](self, step)
        elif isinstance(step, When):
            self.when(step)
        elif step.target == "wrong":
            fits = self.b.icmp_signed("==", self.value(step.value), number(I32, 0))
            self.good = self.b.and_(self.good, fits)
        elif step.target == "fill":
            self.fill(self.value(step.value))
        else:
            self.store(step)

    def when(self, step: When) -> None:
        """Steps under a condition. Their results are in memory, and are set to 0 before."""
        b, condition = self.b, self.value(step.condition)
        for one in step.steps:
            if not isinstance(one, Store):
                self.clear(one)
        before = dict(self.local)
        with b.if_then(condition if step.wanted else b.not_(condition)):
            self.steps(step.steps)
        self.local = before

    def clear(self, step: Op) -> None:
        """Set a step's results to 0, in case it is skipped."""
        if isinstance(step, Walk):
            for f in step.folds:
                self.calls.clear_total(f)
        else:
            assert isinstance(step, Search)
            for v in step.made:
                self.b.store(number(KINDS[v.kind], 0), self.made(v))

    def fill(self, value: ir.Value) -> None:
        """Store one number everywhere, most often zero."""
        b, size = self.b, self.bytes(self.row["n"], 4)
        with b.if_else(b.fcmp_ordered("==", value, number(F32, 0.0))) as (then, otherwise):
            with then:
                zero(b, self.pointers["g"], size)
            with otherwise, loop(b, self.row["n"]) as i:
                b.store(value, at(b, self.pointers["g"], self.bytes(i, 4)))

    def made(self, v: Value) -> ir.Value:
        """Memory for a value that a search makes."""
        if id(v) not in self.rooms:
            self.rooms[id(v)] = self.b.room(KINDS[v.kind])
        return self.rooms[id(v)]

    def store(self, s: Store) -> None:
        """Store a value of the piece in the payload."""
        assert s.field is not None
        if s.value.kind == "table":
            out = self.pointers[f"out {s.name}"]
            return table_steps.store(self, self.value(s.value), int(s.field.of), out)
        kind = I32 if s.value.kind in ("i32", "i64") else F32
        kind = F64 if s.field.storage == "float64" else kind
        value = ins.convert(self.b, self.value(s.value), kind)
        self.b.store(
            stored_as(self.b, value, s.field.storage), self.pointers[f"out {s.name}"], align=1
        )
        return None

    def walk(self, walk: Walk) -> None:
        """A walk. Stores counts of its selections, which decide the places of fields."""
        if self.routines.walk(walk):
            return
        for one in walk.compacts:
            most = number(I64, 0) if one.limit is None else self.value(one.limit)
            self.open_counts(one.selection, most)
        count = self.value(walk.matrix.size) if walk.matrix else self.payload.kept(walk.of)
        self.calls.run(walk, count)
        for name in [c.selection for c in walk.compacts if c.selection in header(self.spec)[0]]:
            count = self.payload.sizes[name] = self.b.load(self.counts[name], typ=I64)
            place = self.payload.header_place(name, length=False)
            self.b.store(self.b.trunc(count, I32), place, align=1)
            self.payload.fields("payload", "out", "at")

    def open_counts(self, selection: str, limit: ir.Value) -> None:
        """Reset a selection's counts: nothing is compacted, and `limit` elements may be."""
        for i, value in enumerate((number(I64, 0), limit)):
            self.b.store(value, at(self.b, self.counts[selection], number(I64, 8 * i)))
