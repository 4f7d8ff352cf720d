"""Fields of varying length: the routines that store and load them, and their calls."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from compll.backends.cpu import gap_stream, golomb_stream, huffman_stream, run_stream
from compll.backends.cpu.builder import I32, I64, PTR, Builder, Variable, at, c, loop, number
from compll.ir.tile import Ascending, Stream

#: routines that store and load fields of varying length
STREAMS: dict[str, Any] = {
    "gaps": gap_stream, "golomb": golomb_stream, "runs": run_stream, "huffman": huffman_stream,
}  # fmt: skip


def stream(printer: Any, step: Stream) -> None:
    """Store values of varying length in the payload, or load them from it."""
    b, f, routine = printer.b, step.field, STREAMS[step.field.storage]
    array = printer.pointers[f"{step.array.shape} {step.array.name}"]
    # codes are counted in bytes, not in positions
    count = printer.payload.size(step.array) if f.recoded else printer.payload.kept(f.of)
    among = c(f.bits) if f.storage == "huffman" else printer.payload.among(f.of)
    b.store(number(I32, -1), at(b, array, number(I64, -4)))
    if printer.encodes:
        out = printer.pointers[f"out {f.name}"]
        end = b.call(routine.store(printer.helpers), [array, count, among, out])
        printer.payload.lengths[f.name] = b.sub(end, b.ptrtoint(out, I64))
        place = printer.payload.header_place(f.name, length=True)
        b.store(b.trunc(printer.payload.lengths[f.name], I32), place, align=1)
        printer.payload.fields("payload", "out", "at")
        return
    data = printer.pointers[f"in {f.name}"]
    end = at(b, data, printer.payload.lengths[f.name])
    given = [data, end, count, among, array]
    if printer.kernel.name == "check":
        found = b.call(routine.load(printer.helpers), given)
        printer.good = b.and_(printer.good, b.icmp_signed("!=", found, number(I64, 0)))
        return
    with b.if_then(b.icmp_signed("!=", printer.given["rows"], number(I64, 1))):
        b.call(routine.load(printer.helpers), given)  # check loaded them for a single piece


def ascending(printer: Any, step: Ascending) -> None:
    """Have a check report positions that do not ascend within the tensor."""
    routine = printer.helpers.get("ascending", I64, [PTR, I64, I64], _ascending)
    given = [printer.pointers[f"in {step.field.name}"], printer.payload.kept(step.field.of)]
    found = printer.b.call(routine, [*given, printer.payload.among(step.field.of)])
    inside = printer.b.icmp_signed("!=", found, c(0))
    printer.good = printer.b.and_(printer.good, inside)


def _ascending(b: Builder, positions: ir.Value, count: ir.Value, n: ir.Value) -> ir.Value:
    """The function ascending(positions, count, n): 1 if each is above the one before and below n,
    else 0."""
    before, good = Variable(b, c(-1)), Variable(b, c(1))
    with loop(b, count) as i:
        place = at(b, positions, b.mul(i, c(4)))
        position = b.zext(b.load(place, typ=I32, align=1), I64)
        above = b.icmp_signed(">", position, before.get())
        good.set(b.and_(good.get(), b.zext(above, I64)))
        before.set(position)
    return b.and_(good.get(), b.zext(b.icmp_signed("<", before.get(), n), I64))
