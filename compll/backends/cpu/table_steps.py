"""Tables in a kernel's loop over pieces, which `printer` (a Printer) builds."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from compll.backends.cpu import table_routines as routines
from compll.backends.cpu.builder import F32, I8, I32, I64, number
from compll.ir.tile import Search, Value


def made(printer: Any, v: Value) -> ir.Value:
    """Memory for a table that a step makes."""
    if id(v) not in printer.local:
        printer.local[id(v)] = printer.b.room(F32, int(v.attr.of))
    return printer.local[id(v)]


def quantiles(printer: Any, step: Search) -> None:
    """Walk over the elements for their keys, and find the quantiles in them."""
    printer.walk(step.walk)
    keys, some, other = (printer.pointers[f"{f.shape} {f.name}"] for f in step.arrays)
    routine = routines.quantiles(printer.helpers, step.attr)
    given = [keys, printer.row["n"], some, other, made(printer, step.made[0])]
    printer.b.call(routine, given)


def buckets(printer: Any, v: Value) -> ir.Value:
    """The data that finds the bucket of a number in a table."""
    room = printer.b.room(I8, routines.bucket_bytes(v.attr))
    routine = routines.buckets(printer.helpers, v.attr)
    printer.b.call(routine, [printer.value(v.args[0]), room])
    return room


def bucket(printer: Any, v: Value) -> ir.Value:
    """The bucket of a number of the piece."""
    b, (key, table) = printer.b, map(printer.value, v.args)
    found = routines.bucket(b, table, b.splat(key, 1), v.attr)
    return b.extract_element(found, number(I32, 0))


def lookup(printer: Any, v: Value) -> ir.Value:
    """An entry of a table."""
    b, (table, index) = printer.b, map(printer.value, v.args)
    own = b.trunc(routines.clipped(b, index, v.attr), I32)
    found = routines.gathered(b, table, b.splat(own, 1), F32)
    return b.extract_element(found, number(I32, 0))


#: operators of the piece that use tables
VALUES = {"table": made, "buckets": buckets, "bucket": bucket, "lookup": lookup}


def store(printer: Any, table: ir.Value, size: int, out: ir.Value) -> None:
    """Store a table in the payload."""
    printer.b.copy(out, table, number(I64, 4 * size))
