"""Trits of a tile, five in a byte: [Note: trits] in reference/trits.py.

Within a walk each code of a tile takes a byte; the codes are packed once all are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from compll.backends.cpu.builder import Builder, at, loop
from compll.backends.cpu.types import I8, I16, I32, I64, number
from compll.ir.tile import Array, Walk

DIGITS, ONES = 5, 121
CHUNK = 16


class Tiles:
    """Codes of the current tile, a byte each, for a walk's arrays of trits. pointers: to all of the
    walk's arrays."""

    def __init__(
        self, b: Builder, tile: int, walk: Walk, pointers: dict[Array, ir.Value]
    ) -> None:  # fmt: skip
        self.b, self.pointers = b, pointers
        self.width = -(-tile // DIGITS)
        read = [v.attr for v in walk.values if v.op == "unpack"]
        written = [s.array for s in walk.stores]
        self.read, self.written = (
            list(dict.fromkeys(a for a in arrays if a.storage.trits)) for arrays in (read, written)
        )
        self.codes = {a: b.room(I8, DIGITS * self.width) for a in (*self.read, *self.written)}
        for room in self.codes.values():
            for i in range(tile, DIGITS * self.width):  # padding of the last byte
                b.store(number(I8, 1), at(b, room, number(I64, i)))

    def bytes(self, array: Array, t: ir.Value) -> ir.Value:
        """The bytes of tile t in an array."""
        return at(self.b, self.pointers[array], self.b.mul(t, number(I64, self.width)))

    def unpack(self, t: ir.Value) -> None:
        """Unpack the codes of all arrays that the walk reads."""
        for array in self.read:
            unpack(self.b, self.bytes(array, t), self.codes[array], self.width)

    def pack(self, t: ir.Value) -> None:
        """Pack the codes of all arrays that the walk writes."""
        for array in self.written:
            pack(self.b, self.codes[array], self.bytes(array, t), self.width)


@contextmanager
def _vectors(b: Builder, width: int) -> Iterator[tuple[int, ir.Value]]:
    """A loop whose body the `with` builds, over `width` bytes: the bytes of a vector, and the first
    one.

    The last vector may overlap the one before.
    """
    size = min(CHUNK, 1 << width.bit_length() - 1)
    if size == width:
        yield size, number(I64, 0)
        return
    last = number(I64, width - size)
    with loop(b, number(I64, width), size) as offset:
        yield size, b.select(b.icmp_signed("<", offset, last), offset, last)


def pack(b: Builder, codes: ir.Value, out: ir.Value, width: int) -> None:
    """Pack 5 * width codes, bytes of 0, 1 or 2, into `width` bytes."""
    with _vectors(b, width) as (size, start):
        kind = ir.VectorType(I8, size)
        found: ir.Value = ir.Constant(kind, [0] * size)
        for digit in range(DIGITS):
            place = at(b, codes, b.add(start, number(I64, digit * width)))
            tripled = b.add(b.add(found, found), found)
            found = b.add(tripled, b.load(place, typ=kind, align=1))
        b.store(found, at(b, out, start), align=1)


def unpack(b: Builder, data: ir.Value, codes: ir.Value, width: int) -> None:
    """Inverse of pack."""
    with _vectors(b, width) as (size, start):
        kind, wide = ir.VectorType(I8, size), ir.VectorType(I16, size)
        three, by, down = (ir.Constant(wide, [c] * size) for c in (3, 171, 9))
        left: ir.Value = b.zext(b.load(at(b, data, start), typ=kind, align=1), wide)
        found = []
        for _ in range(DIGITS - 1):
            rest = b.lshr(b.mul(left, by), down)  # a third, exact below 256
            found.append(b.trunc(b.sub(left, b.mul(rest, three)), kind))
            left = rest
        found.append(b.trunc(b.urem(left, three), kind))  # 3 in bytes that no pack makes
        # in order, once all are known: LLVM's scalar replacement breaks stores in other orders
        for digit, code in enumerate(reversed(found)):
            place = at(b, codes, b.add(start, number(I64, digit * width)))
            b.store(code, place, align=1)


def weight(b: Builder, plane: ir.Value) -> ir.Value:
    """3**(4 - plane)."""
    found: ir.Value = number(I32, 81)
    for i, weight in enumerate((27, 9, 3, 1), 1):
        here = b.icmp_unsigned(">=", plane, number(I64, i))
        found = b.select(here, number(I32, weight), found)
    return found
