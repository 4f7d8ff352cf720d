"""Exported functions: they keep denormal numbers, whatever their caller's thread does with them."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from compll.backends.cpu.builder import Builder
from compll.backends.cpu.types import I32, I64, PTR, VOID, number

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
