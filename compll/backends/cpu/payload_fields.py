"""Places of a payload's fields, and its counts and lengths, which decide the places."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from compll.backends.cpu.builder import I32, I64, at, number
from compll.backends.cpu.storages import code_bytes, item_bytes
from compll.ir.layout import header
from compll.ir.module import Field
from compll.ir.tile import STATUS


class PayloadFields:
    """Fields of the current piece of `printer` (a Printer).

    sizes: elements of selections, and lengths: bytes of fields, by name, for those that differ from
    payload to payload, once they are known.
    """

    def __init__(self, printer: Any) -> None:
        self.printer, self.b = printer, printer.b
        self.spec, self.tile = printer.spec, printer.tile
        self.sizes: dict[str, ir.Value] = {}
        self.lengths: dict[str, ir.Value] = {}

    def header_place(self, name: str, *, length: bool) -> ir.Value:
        """Address of a selection's count or a field's length in the payload."""
        counted, lengths = header(self.spec)
        index = len(counted) + lengths.index(name) if length else counted.index(name)
        return at(self.b, self.start, number(I64, 4 * index))

    def read_header(self) -> None:
        """Read the counts and lengths that a payload begins with."""
        self.find_start("payload", "at")
        b, (counted, lengths) = self.b, header(self.spec)
        for name in counted:
            place = self.header_place(name, length=False)
            self.sizes[name] = b.zext(b.load(place, typ=I32, align=1), I64)
        for name in lengths:
            place = self.header_place(name, length=True)
            self.lengths[name] = b.zext(b.load(place, typ=I32, align=1), I64)

    def find_start(self, payload: str, starts: str) -> ir.Value:
        """Find the piece's payload."""
        b = self.b
        base = b.load(
            at(b, self.printer.given[starts], self.printer.bytes(self.printer.p, 8)), typ=I64
        )
        self.start = at(b, self.printer.given[payload], base)
        return self.start

    def fields(self, payload: str, prefix: str, starts: str) -> ir.Value:
        """Set pointers to a payload's fields; returns its length without the status byte."""
        b = self.b
        start = self.find_start(payload, starts)
        length: ir.Value = number(I64, 4 * sum(map(len, header(self.spec))))
        for f in self.spec.fields:
            self.printer.pointers[f"{prefix} {f.name}"] = at(b, start, length)
            size = self.size(f)
            if size is None:
                return length  # places of later fields are not known yet
            length = b.add(length, size)
        self.printer.pointers[f"{prefix} {STATUS.name}"] = at(b, start, length)
        return length

    def size(self, f: Field) -> ir.Value:
        """Bytes of a field; None while unknown."""
        if f.layout.varying:
            return self.lengths.get(f.name)
        if f.shape == "table":
            return number(I64, int(f.of) * item_bytes(f))
        if f.shape == "matrix":
            return self.bytes_of(f, self.printer.value(self.printer.kernel.sizes[f.name].size))
        n = self.kept(f.of)
        if n is None:
            return None
        if not f.packed:
            counts = {"scalar": number(I64, 1), "group": self.printer.tiles}
            count = counts.get(f.shape, n)
            return self.printer.bytes(count, item_bytes(f))
        return self.bytes_of(f, n)

    def bytes_of(self, f: Field, n: ir.Value) -> ir.Value:
        """Bytes of n values of a field."""
        b = self.b
        if not f.packed:
            return self.printer.bytes(n, item_bytes(f))
        full = b.udiv(n, number(I64, self.tile))
        rest = b.urem(n, number(I64, self.tile))
        return b.add(self.printer.bytes(full, f.packed_bytes(self.tile)), code_bytes(b, f, rest))

    def among(self, selection: str) -> ir.Value:
        """Number of elements among which the selection chooses."""
        return self.kept(self.spec.among(selection))

    def kept(self, selection: str) -> ir.Value:
        """Elements of a selection; "": of the piece."""
        if selection in header(self.spec)[0]:
            return self.sizes.get(selection)
        if selection:
            return self.printer.value(self.printer.kernel.limits[selection])
        return self.printer.row["n"]
