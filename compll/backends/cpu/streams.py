"""Routines of payload fields: those of varying length are stored and loaded, positions checked."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from llvmlite import ir

from compll.backends.cpu import gap_stream, golomb_stream, huffman_stream, run_stream
from compll.backends.cpu.builder import Builder, Variable, at, loop, routine
from compll.backends.cpu.printer import Printer
from compll.backends.cpu.types import I32, I64, PTR, c, number
from compll.ir.tile import Array, Call

#: routines that store and load fields of varying length
STREAMS: dict[str, ModuleType] = {
    "gaps": gap_stream, "golomb": golomb_stream, "runs": run_stream, "huffman": huffman_stream,
}  # fmt: skip


def stream(printer: Printer, call: Call) -> ir.Value | None:
    """Store values of varying length in the payload, or load them from it. In a check: true if they
    are as they should be; None in other kernels."""
    b, f, kind = printer.b, call.attr, STREAMS[call.routine]
    own = call.made[0] if printer.kernel.decodes else call.views[0].value.attr
    array, count = printer.pointers[own], printer.items(own.domain)
    if f.layout.recoded:  # counted in bytes, not in positions
        count = printer.value(printer.kernel.sizes[own])
    among = c(f.bits) if f.storage == "huffman" else printer.among(f.of)
    b.store(number(I32, -1), at(b, array, c(-4)))
    if not printer.kernel.decodes:
        out = printer.pointers[call.made[0]]
        end = kind.store(b, array, count, among, out)
        printer.sizes["length", f.name] = b.sub(end, b.ptrtoint(out, I64))
        printer.fields()
        return None
    data = printer.pointers[Array.of(f, "incoming")]
    length = printer.value(printer.kernel.sizes[Array.of(f, "incoming")])
    given = [data, at(b, data, length), count, among, array]
    if printer.kernel.kind == "check":
        return b.icmp_signed("!=", kind.load(b, *given), c(0))
    with b.if_then(b.icmp_signed("!=", printer.given["rows"], c(1))):
        kind.load(b, *given)  # check loaded them for a single piece
    return None


def ascending(printer: Printer, call: Call) -> ir.Value:
    """True if positions ascend within the tensor."""
    f = call.attr
    place = printer.pointers[Array.of(f, "incoming")]
    found = _ascending(printer.b, place, printer.kept(f.of), printer.among(f.of))
    return printer.b.icmp_signed("!=", found, c(0))


@routine(I64, PTR, I64, I64)
def _ascending(b: Builder, positions: ir.Value, count: ir.Value, n: ir.Value) -> ir.Value:
    """1 if each position is above the one before and below n, else 0."""
    before, good = Variable(b, c(-1)), Variable(b, c(1))
    with loop(b, count) as i:
        place = at(b, positions, b.mul(i, c(4)))
        position = b.zext(b.load(place, typ=I32, align=1), I64)
        above = b.icmp_signed(">", position, before.get())
        good.set(b.and_(good.get(), b.zext(above, I64)))
        before.set(position)
    return b.and_(good.get(), b.zext(b.icmp_signed("<", before.get(), n), I64))


ROUTINES: dict[str, Callable[[Printer, Call], ir.Value | None]] = {
    **dict.fromkeys(STREAMS, stream), "ascending": ascending,
}  # fmt: skip
