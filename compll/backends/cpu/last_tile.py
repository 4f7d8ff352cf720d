"""A last, shorter tile: copied, padded with zeros, and walked over as a full one."""

from __future__ import annotations

from llvmlite import ir

from compll.backends.cpu import trit_tiles
from compll.backends.cpu.builder import Builder, Routine, at, loop
from compll.backends.cpu.instructions import traced
from compll.backends.cpu.printer import Printer
from compll.backends.cpu.storages import item_bytes
from compll.backends.cpu.types import I8, I32, I64, PTR, VOID, number
from compll.ir.storage import Storage
from compll.ir.tile import Array


class LastTile:
    """The last tile of the printer's piece. full: tiles before it; rest: elements."""

    def __init__(self, printer: Printer, full: ir.Value, rest: ir.Value) -> None:
        self.printer, self.b, self.full, self.rest = printer, printer.b, full, rest

    def place(self, array: Array) -> ir.Value:
        """Address of an array's last tile."""
        p, items = self.printer, 1 if array.domain.kind == "group" else self.printer.tile
        return at(self.b, p.pointers[array], p.bytes(self.full, array.storage.tile_bytes(items)))

    def copied(self, array: Array) -> ir.Value:
        """Address of a copy of an array's tile, with zeros behind its end; of a value per tile, its
        own address."""
        b, tile, size = self.b, self.printer.tile, item_bytes(array)
        if array.domain.kind == "group":
            return self.place(array)
        room = b.room(I8, tile * 4)
        if array.storage.packed and array.role != "payload":
            codes(array.storage, tile, wide=True)(b, self.place(array), room, self.rest)
        elif array.role != "payload":
            b.clear(room, number(I64, tile * size))
            b.copy(room, self.place(array), self.printer.bytes(self.rest, size))
        return room

    def copy_out(self, array: Array, room: ir.Value) -> None:
        """Copy a tile that a walk has written back to its place."""
        b, place = self.b, self.place(array)
        if array.storage.packed:
            codes(array.storage, self.printer.tile, wide=False)(b, room, place, self.rest)
        elif array.domain.kind != "group":
            b.copy(place, room, self.printer.bytes(self.rest, item_bytes(array)))


def codes(storage: Storage, tile: int, *, wide: bool) -> Routine:
    """The routine that moves codes of a shorter tile to their places in a full one (wide), or back."""
    name = f"{'widen' if wide else 'narrow'}_{'trits' if storage.trits else storage.bits}_{tile}"

    def shift(b: Builder, plane: ir.Value) -> ir.Value:
        return b.trunc(b.mul(plane, number(I64, storage.bits)), I32)

    def body(b: Builder, source: ir.Value, into: ir.Value, m: ir.Value) -> None:
        full, short = number(I64, storage.tile_bytes(tile)), traced(storage.tile_bytes)(b, m)
        before, after = (short, full) if wide else (full, short)
        with loop(b, after) as j:
            b.put(number(I8, trit_tiles.ONES if storage.trits else 0), into, j)
        with loop(b, m) as i:
            byte, place = b.zext(b.get(source, I8, b.urem(i, before)), I32), b.urem(i, after)
            one, other = b.udiv(i, before), b.udiv(i, after)
            if storage.trits:
                digit = b.urem(b.udiv(byte, trit_tiles.weight(b, one)), number(I32, 3))
                moved = b.mul(b.sub(digit, number(I32, 1)), trit_tiles.weight(b, other))
            else:
                code = b.and_(b.lshr(byte, shift(b, one)), number(I32, (1 << storage.bits) - 1))
                moved = b.shl(code, shift(b, other))
            b.put(b.add(b.get(into, I8, place), b.trunc(moved, I8)), into, place)

    return Routine(name, VOID, [PTR, PTR, I64], body)
