"""Stores that bypass the cache, for arrays that it cannot hold; see docs/how/tile-ir.md."""

from __future__ import annotations

from collections.abc import Iterable

from llvmlite import ir

from compll.backends.cpu import processor
from compll.backends.cpu.builder import Builder, at, loop
from compll.backends.cpu.types import F32, I1, I32, I64, number

#: bytes from which stores to an array bypass the cache, which cannot hold it
PAST = 1 << 24


def gains() -> bool:
    """True if this processor is known to gain from them."""
    return processor.NAME.startswith("znver")


def zero(b: Builder, pointer: ir.Value, size: ir.Value) -> None:
    """Set `size` bytes to 0. If the cache cannot hold them they bypass it, which gains on all
    processors: a cache would first load the bytes to be overwritten."""
    with b.if_else(large(b, [(pointer, size)])) as (then, otherwise):
        with then:
            start = b.and_(b.neg(b.ptrtoint(pointer, I64)), number(I64, 63))
            lines = b.add(start, b.and_(b.sub(size, start), number(I64, -64)))
            _clear(b, pointer, number(I64, 0), start)
            with loop(b, lines, 64, start) as offset:
                zeros = ir.Constant(ir.VectorType(F32, 16), None)
                made = b.store(zeros, at(b, pointer, offset), align=64)
                made.set_metadata("nontemporal", b.module.add_metadata([number(I32, 1)]))
            _clear(b, pointer, lines, size)
            b.fence("seq_cst")
        with otherwise:
            _clear(b, pointer, number(I64, 0), size)


def _clear(b: Builder, pointer: ir.Value, start: ir.Value, stop: ir.Value) -> None:
    """Set bytes from `start` to `stop` to 0."""
    b.clear(at(b, pointer, start), b.sub(stop, start))


def large(b: Builder, arrays: Iterable[tuple[ir.Value, ir.Value]]) -> ir.Value:
    """True if the cache cannot hold the arrays and their addresses allow stores that bypass it.

    arrays: address and bytes of each.
    """
    found: ir.Value = number(I1, 1)
    for pointer, size in arrays:
        much = b.icmp_signed(">=", size, number(I64, PAST))
        even = b.and_(b.ptrtoint(pointer, I64), number(I64, 15))
        aligned = b.icmp_unsigned("==", even, number(I64, 0))
        found = b.and_(found, b.and_(much, aligned))
    return found
