"""Routines of payload fields: those of varying length are stored and loaded, positions checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from compll.backends.cpu.builder import I32, at, c, number
from compll.backends.cpu.instructions import function
from compll.backends.cpu.printer import Printer
from compll.ir.tile import Array, Call
from compll.routines import huffman, streams
from compll.routines.language import Routine


class Coder(NamedTuple):
    """Routines that store values of varying length, and load them."""

    store: Routine
    load: Routine


#: routines that store and load fields of varying length
STREAMS = {
    "gaps": Coder(streams.store_gaps, streams.load_gaps),
    "golomb": Coder(streams.store_golomb, streams.load_golomb),
    "runs": Coder(streams.store_runs, streams.load_runs),
    "huffman": Coder(huffman.store_huffman, huffman.load_huffman),
}


def stream(printer: Printer, call: Call) -> ir.Value | None:
    """Store values of varying length in the payload, or load them from it. In a check: true if they
    are as they should be; None in other kernels."""
    b, f, coder = printer.b, call.attr, STREAMS[call.routine]
    values = call.made[0] if printer.kernel.decodes else call.views[0].value.attr
    array, count = printer.pointers[values], printer.items(values.domain)
    if f.layout.recoded:  # counted in bytes, not in positions
        count = printer.value(printer.kernel.sizes[values])
    among = c(f.bits) if f.storage == "huffman" else printer.among(f.of)
    b.store(number(I32, -1), at(b, array, c(-4)))
    if not printer.kernel.decodes:
        out = printer.pointers[call.made[0]]
        printer.sizes["length", f.name] = function(coder.store)(b, array, count, among, out)
        printer.fields()
        return None
    data = printer.pointers[Array.of(f, "incoming")]
    length = printer.value(printer.kernel.sizes[Array.of(f, "incoming")])
    given = [data, length, count, among, array]
    if printer.kernel.kind == "check":
        return b.icmp_signed("!=", function(coder.load)(b, *given), c(0))
    with b.if_then(b.icmp_signed("!=", printer.given["rows"], c(1))):
        function(coder.load)(b, *given)  # check loaded them for a single piece
    return None


def ascending(printer: Printer, call: Call) -> ir.Value:
    """True if positions ascend within the tensor."""
    b, f = printer.b, call.attr
    given = printer.pointers[Array.of(f, "incoming")], printer.kept(f.of), printer.among(f.of)
    return b.icmp_signed("!=", function(streams.ascending)(b, *given), c(0))


ROUTINES: dict[str, Callable[[Printer, Call], ir.Value | None]] = {
    **dict.fromkeys(STREAMS, stream), "ascending": ascending,
}  # fmt: skip
