"""Stores past the cache, of arrays that are more than it holds; see docs/tile-ir.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from compll.backends.cpu.builder import F32, I1, I8, I32, I64, PTR, VOID, at, loop, number

#: bytes from which on an array is written past the cache: more than it holds
PAST = 1 << 24


def gains() -> bool:
    """Whether this processor is known to gain by them."""
    return bool(llvm.get_host_cpu_name().startswith("znver"))


def zero(printer: Any) -> None:
    """The gradient's elements, past the cache where they are more than it holds."""
    b, size = printer.b, printer.bytes(printer.row["n"], 4)
    if not gains():
        return _clear(printer, number(I64, 0), size)
    with b.if_else(large(printer, {"g": 4})) as (then, otherwise):
        with then:
            start = b.and_(b.neg(b.ptrtoint(printer.pointers["g"], I64)), number(I64, 63))
            lines = b.add(start, b.and_(b.sub(size, start), number(I64, -64)))
            _clear(printer, number(I64, 0), start)
            with loop(b, lines, 64, start) as offset:
                zeros = ir.Constant(ir.VectorType(F32, 16), None)
                made = b.store(zeros, at(b, printer.pointers["g"], offset), align=64)
                made.set_metadata("nontemporal", b.module.add_metadata([number(I32, 1)]))
            _clear(printer, lines, size)
            b.fence("seq_cst")
        with otherwise:
            _clear(printer, number(I64, 0), size)
    return None


def _clear(printer: Any, start: Any, stop: Any) -> None:
    """Bytes of the gradient from `start` to `stop`."""
    b = printer.b
    known = b.declared("llvm.memset.p0.i64", VOID, [PTR, I8, I64, I1])
    place = at(b, printer.pointers["g"], start)
    b.call(known, [place, number(I8, 0), b.sub(stop, start), number(I1, 0)])


def large(printer: Any, arrays: Mapping[str, int]) -> Any:
    """Whether arrays are more than caches hold, and begin where stores past them may.

    arrays: the bytes of their elements, as many as the piece has.
    """
    b = printer.b
    found: Any = number(I1, 1)
    for name, size in arrays.items():
        much = b.icmp_signed(">=", printer.bytes(printer.row["n"], size), number(I64, PAST))
        address = b.ptrtoint(printer.pointers[name], I64)
        even = b.icmp_unsigned("==", b.and_(address, number(I64, 15)), number(I64, 0))
        found = b.and_(found, b.and_(much, even))
    return found
