"""A last, shorter tile: copied, padded with zeros, and walked over as a full one."""

from __future__ import annotations

from llvmlite import ir

from compll.backends.cpu import trit_tiles
from compll.backends.cpu.builder import Builder, Routine, at, loop
from compll.backends.cpu.printer import Printer
from compll.backends.cpu.storages import code_bytes, item_bytes
from compll.backends.cpu.types import I8, I32, I64, PTR, VOID, number
from compll.backends.cpu.walk_params import store_name
from compll.ir.module import Field
from compll.ir.tile import SCRATCH, Walk

#: an array's name, its field, its place, its copy's, and bytes of an element
Copy = tuple[str, Field | None, ir.Value, ir.Value, int]


class LastTile:
    """The last tile of the printer's piece. full: tiles before it; rest: elements."""

    def __init__(self, printer: Printer, full: ir.Value, rest: ir.Value) -> None:
        self.printer, self.b, self.full, self.rest = printer, printer.b, full, rest

    def copied(self, names: list[str], walk: Walk) -> tuple[dict[str, ir.Value], list[Copy]]:
        """Pointers to a walk's arrays: to copies of the tile with zeros behind its end, and those
        copies that the walk writes."""
        b, full = self.b, self.full
        pointers, after = {}, []
        made = {f"kept {f.name}" for c in walk.compacts for f, _ in c.parts}
        for name in names:
            anywhere = ("at", "count") if walk.of else ("at", "kept", "count", "spread")
            if name.startswith(anywhere) or name in made:  # no tile's
                pointers[name] = self.printer.pointers[name.removeprefix("at ")]
                continue
            place, size, f = where(self.printer, name, full)
            if f is not None and f.shape == "group":
                pointers[name] = place
                continue
            room = pointers[name] = b.room(I8, self.printer.tile * 4)
            self.copy_in(name, f, place, room, size)
            if any(store_name(s) == name for s in walk.stores):
                after.append((name, f, place, room, size))
        return pointers, after

    def copy_in(
        self, name: str, f: Field | None, place: ir.Value, room: ir.Value, size: int
    ) -> None:
        b, rest = self.b, self.rest
        if name.startswith("out"):
            return
        if f is not None and f.packed:
            codes(f, self.printer.tile, wide=True)(b, place, room, rest)
            return
        b.clear(room, number(I64, self.printer.tile * size))
        b.copy(room, place, self.printer.bytes(rest, size))

    def copy_out(
        self, name: str, f: Field | None, place: ir.Value, room: ir.Value, size: int
    ) -> None:
        b, rest = self.b, self.rest
        if f is not None and f.packed and name.startswith(("out", SCRATCH)):
            codes(f, self.printer.tile, wide=False)(b, room, place, rest)
            return
        b.copy(place, room, self.printer.bytes(rest, size))


def where(printer: Printer, name: str, full: ir.Value) -> tuple[ir.Value, int, Field | None]:
    """Address of an array's last tile, bytes of an element, and the array's field."""
    known = {f"state {s.name}": s for s in printer.kernel.states}
    for f in (*printer.spec.fields, *printer.kernel.added):
        known[f"in {f.name}"] = known[f"out {f.name}"] = f
    known |= {f"{SCRATCH} {f.name}": f for f in printer.kernel.scratch if f.shape == SCRATCH}
    found = known.get(name)
    if found is None:
        return at(printer.b, printer.pointers[name], printer.bytes(full, 4 * printer.tile)), 4, None
    per = printer.tile * item_bytes(found)
    if found.packed or found.shape == "group":
        per = found.packed_bytes(printer.tile) if found.packed else item_bytes(found)
    place = at(printer.b, printer.pointers[name], printer.bytes(full, per))
    return place, max(1, item_bytes(found)), found


def codes(f: Field, tile: int, *, wide: bool) -> Routine:
    """The routine that moves codes of a shorter tile to their places in a full one (wide), or back."""
    name = f"{'widen' if wide else 'narrow'}_{'trits' if f.trits else f.bits}_{tile}"

    def shift(b: Builder, plane: ir.Value) -> ir.Value:
        return b.trunc(b.mul(plane, number(I64, f.bits)), I32)

    def body(b: Builder, source: ir.Value, into: ir.Value, m: ir.Value) -> None:
        full, short = number(I64, f.packed_bytes(tile)), code_bytes(b, f, m)
        before, after = (short, full) if wide else (full, short)
        with loop(b, after) as j:
            b.put(number(I8, trit_tiles.ONES if f.trits else 0), into, j)
        with loop(b, m) as i:
            byte, place = b.zext(b.get(source, I8, b.urem(i, before)), I32), b.urem(i, after)
            one, other = b.udiv(i, before), b.udiv(i, after)
            if f.trits:
                digit = b.urem(b.udiv(byte, trit_tiles.weight(b, one)), number(I32, 3))
                moved = b.mul(b.sub(digit, number(I32, 1)), trit_tiles.weight(b, other))
            else:
                code = b.and_(b.lshr(byte, shift(b, one)), number(I32, (1 << f.bits) - 1))
                moved = b.shl(code, shift(b, other))
            b.put(b.add(b.get(into, I8, place), b.trunc(moved, I8)), into, place)

    return Routine(name, VOID, [PTR, PTR, I64], body)
