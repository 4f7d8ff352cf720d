"""Fields of varying length: the routines that store and load them, and when they are called."""

from __future__ import annotations

from typing import Any

from compll.backends.cpu import elias_stream, gap_stream, golomb_stream, run_stream
from compll.backends.cpu.builder import I32, I64, at, number
from compll.ir.tile import Stream

#: routines that store and load fields of varying length
STREAMS: dict[str, Any] = {
    "gaps": gap_stream, "golomb": golomb_stream.CODE, "elias": elias_stream.CODE, "runs": run_stream,
}  # fmt: skip


def stream(printer: Any, step: Stream) -> None:
    """Values of varying length, to the payload or from there."""
    b, f, routine = printer.b, step.field, STREAMS[step.field.storage]
    array = printer.pointers[f"{step.array.shape} {step.array.name}"]
    runs = f.storage == "runs"  # of bytes, not of positions
    count = printer.payload.size(step.array) if runs else printer.payload.kept(f.of)
    b.store(number(I32, -1), at(b, array, number(I64, -4)))
    if printer.encodes:
        out = printer.pointers[f"out {f.name}"]
        end = b.call(routine.store(printer.helpers), [array, count, printer.row["n"], out])
        printer.payload.lengths[f.name] = b.sub(end, b.ptrtoint(out, I64))
        place = printer.payload.header_place(f.name, length=True)
        b.store(b.trunc(printer.payload.lengths[f.name], I32), place, align=1)
        printer.payload.fields("payload", "out", "at")
        return
    data = printer.pointers[f"in {f.name}"]
    end = at(b, data, printer.payload.lengths[f.name])
    given = [data, end, count, printer.row["n"], array]
    if printer.kernel.name == "check":
        found = b.call(routine.load(printer.helpers), given)
        printer.good = b.and_(printer.good, b.icmp_signed("!=", found, number(I64, 0)))
        return
    with b.if_then(b.icmp_signed("!=", printer.given["rows"], number(I64, 1))):
        b.call(routine.load(printer.helpers), given)  # those of one piece are there, from check
