"""Tile programs as LLVM IR: a function over a batch's pieces, which calls one for each walk.

A last, shorter tile is copied to scratch memory and padded with zeros, walked over as a full one,
and its results are copied back; its packed codes are laid out differently (see [Note: packing] in
layout.py).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir

from compll.backends.cpu import calls, routines
from compll.backends.cpu import instructions as ins
from compll.backends.cpu.builder import (
    F32,
    I32,
    I64,
    KINDS,
    PTR,
    VOID,
    Builder,
    at,
    c,
    loop,
    number,
)
from compll.backends.cpu.instructions import finite_or, stored_as, zero
from compll.backends.cpu.printer import COLUMNS, Printer
from compll.backends.cpu.walks import WalkCalls
from compll.ir.tile import GRADIENT, USED, WRONG, Call, Kernel, Op, Store, Walk, When

# ---- exports ------------------------------------------------------------------------------------
# Exported functions: they keep denormal numbers, whatever their caller's thread does with them.

#: bits of the control register that flush denormal numbers: results and operands of x86; ARM's FZ
FLUSH = {"x86_64": 0x8040, "aarch64": 1 << 24}


def export(module: ir.Module, name: str, body: ir.Function) -> None:
    """A function that calls a kernel's body with denormal numbers kept: otherwise payloads would
    differ."""
    function = ir.Function(module, body.function_type, name)
    b = Builder(function.append_basic_block("entry"))
    with kept(b):
        b.call(body, function.args, attrs=("noinline",))
    b.ret_void()


@contextmanager
def kept(b: Builder) -> Iterator[None]:
    """Instructions that run with denormal numbers kept. LLVM may move arithmetic across the change
    of the control register, so they are a call that is not inlined."""
    processor = platform.machine()
    if processor not in FLUSH:
        yield
        return
    access = _on_x86 if processor == "x86_64" else _on_arm
    before, write = access(b)
    write(b.and_(before, number(before.type, ~FLUSH[processor])))
    yield
    write(before)


def _on_x86(b: Builder) -> tuple[ir.Value, ir.Value]:
    """The control register's value, and a function that writes it."""
    place, kind = b.alloca(I32), ir.FunctionType(VOID, [PTR])
    b.call(b.module.declare_intrinsic("llvm.x86.sse.stmxcsr", (), kind), [place])
    load = b.module.declare_intrinsic("llvm.x86.sse.ldmxcsr", (), kind)

    def write(value: ir.Value) -> None:
        b.store(value, place)
        b.call(load, [place])

    return b.load(place, typ=I32), write


def _on_arm(b: Builder) -> tuple[ir.Value, ir.Value]:
    get = b.module.declare_intrinsic("llvm.aarch64.get.fpcr", (), ir.FunctionType(I64, []))
    put = b.module.declare_intrinsic("llvm.aarch64.set.fpcr", (), ir.FunctionType(VOID, [I64]))
    return b.call(get, []), lambda value: b.call(put, [value])


# ---- kernels ------------------------------------------------------------------------------------


def module_text(name: str, kernels: Sequence[Kernel]) -> str:
    """The LLVM IR of a module's kernels."""
    module = ir.Module(name)
    for kernel in kernels:
        KernelPrinter(module, kernel).emit()
    return str(module)


class KernelPrinter:
    """Prints one kernel: a loop over pieces, and a piece's steps in order."""

    def __init__(self, module: ir.Module, kernel: Kernel) -> None:
        self.kernel, self.printer = kernel, Printer(module, kernel)
        self.b = self.printer.b
        self.walks = WalkCalls(self.printer)
        #: in a check, the block that ends it
        self.wrong: ir.Block | None = None

    def emit(self) -> None:
        """Build the function's body."""
        b, p = self.b, self.printer
        export(p.module, self.kernel.name, p.function)
        if self.kernel.kind in ("set", "add") and "check body" in p.module.globals:
            b.call(p.module.globals["check body"], p.function.args, attrs=("noinline",))
            with b.if_then(b.icmp_signed("!=", self.bad(), c(0)), likely=False):
                b.ret_void()
        with loop(b, p.given["rows"]) as i:
            row = at(b, p.given["table"], b.mul(i, c(8 * len(COLUMNS))))
            columns = {
                name: b.load(at(b, row, c(8 * k)), typ=I64) for k, name in enumerate(COLUMNS)
            }
            with b.if_then(b.icmp_signed(">", columns["n"], c(0))):
                p.open_piece(i, columns)
                p.fields()
                self.check() if self.kernel.kind == "check" else self.steps(self.kernel.steps)
        if self.walks.past:
            b.fence("seq_cst")  # from here on other threads see stores that bypassed the cache
        b.ret_void()

    def bad(self) -> ir.Value:
        """The number, from 1, of a piece with positions outside its tensor; negative for one with a
        wrong length; 0 if there is none."""
        return self.b.load(self.printer.given["bad"], typ=I64)

    def check(self) -> None:
        """The steps of a check, which end at the first that finds the piece's payload wrong."""
        before, self.wrong = self.bad(), self.b.append_basic_block("wrong")
        self.steps(self.kernel.steps)
        self.b.store(before, self.printer.given["bad"])
        self.b.branch(self.wrong)
        self.b.position_at_end(self.wrong)

    def require(self, good: ir.Value, *, positions: bool = False) -> None:
        """Go on with a check if this holds; else report the piece. positions: these are bad."""
        b, piece = self.b, self.b.add(self.printer.p, c(1))
        b.store(piece if positions else b.neg(piece), self.printer.given["bad"])
        go_on = b.append_basic_block("good")
        b.cbranch(good, go_on, self.wrong)
        b.position_at_end(go_on)

    # steps

    def steps(self, steps: list[Op]) -> None:
        """Steps in order."""
        for step in steps:
            STEPS[type(step)](self, step)

    def walk(self, walk: Walk) -> None:
        """A walk, which makes counts of its selections."""
        p = self.printer
        if walk.product is not None:
            return calls.walk(p, walk, walk.product)
        for compact in walk.compacts:
            most = c(0) if compact.limit is None else p.value(compact.limit)
            self.walks.open_counts(compact.selection, most)
        self.walks.run(walk, p.items(walk.domain))
        for name in [compact.selection for compact in walk.compacts]:
            p.sizes["counted", name] = self.b.load(p.counts[name], typ=I64)
        return p.fields()

    def call(self, step: Call) -> None:
        """A routine. That of a field may find the payload wrong."""
        if step.routine in routines.SEARCHES:
            routines.SEARCHES[step.routine](self.printer, self.walks, step)
        elif step.routine in routines.FIELDS:
            good = routines.FIELDS[step.routine](self.printer, step)
            if good is not None:
                self.require(good, positions=self.printer.spec.decode.op == "scatter")
        else:
            calls.emit(self.printer, step)

    def when(self, step: When) -> None:
        """Steps under a condition. Their results are in memory, and are set to 0 before."""
        b, p, condition = self.b, self.printer, self.printer.value(step.condition)
        for inner in step.steps:
            if isinstance(inner, Walk):
                for f in inner.folds:
                    self.walks.clear_total(f)
            elif isinstance(inner, Call):
                assert inner.routine in routines.SEARCHES, inner
                for v in inner.results:
                    b.store(number(KINDS[v.kind], 0), p.made(v))
            else:
                assert isinstance(inner, Store), inner
        before = dict(p.local)
        with b.if_then(condition if step.wanted else b.not_(condition)):
            self.steps(step.steps)
        p.local = before

    def store(self, s: Store) -> None:
        """A value of the piece: for a check, the whole gradient, a state or the payload."""
        b, p, value = self.b, self.printer, self.printer.value(s.value)
        if s.array is WRONG:
            return self.require(b.icmp_signed("==", value, number(I32, 0)))
        if s.array is GRADIENT:
            return self.fill(value)
        if s.array is USED:
            b.store(value, p.used())
            return None
        out, storage = p.pointers[s.array], s.array.storage.name
        if s.value.kind == "table":
            return b.copy(out, value, c(4 * int(s.array.domain.of)))
        value = ins.convert(b, value, I32 if s.value.kind in ("i32", "i64") else F32)
        if s.array.role == "state":
            value = finite_or(b, value, p.before[s.array], storage)
        b.store(stored_as(b, value, storage), out, align=1)
        return None

    def fill(self, value: ir.Value) -> None:
        """Store one number everywhere, most often zero."""
        b, p = self.b, self.printer
        with b.if_else(b.fcmp_ordered("==", value, number(F32, 0.0))) as (then, otherwise):
            with then:
                zero(b, p.pointers[GRADIENT], p.bytes(p.row["n"], 4))
            with otherwise, loop(b, p.row["n"]) as i:
                b.store(value, at(b, p.pointers[GRADIENT], p.bytes(i, 4)))


#: how steps are printed, by their class
STEPS: dict[type, Callable[..., None]] = {
    Walk: KernelPrinter.walk, Call: KernelPrinter.call, When: KernelPrinter.when,
    Store: KernelPrinter.store,
}  # fmt: skip
