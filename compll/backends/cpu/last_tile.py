"""A last, shorter tile: copied, padded with zeros, and walked over as a full one."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from compll.backends.cpu.builder import I8, I64, at, number
from compll.backends.cpu.storages import item_bytes
from compll.backends.cpu.walk_params import store_name
from compll.ir.module import Field
from compll.ir.tile import SCRATCH, Walk


class LastTile:
    """The last tile of the piece that `printer` (a Printer) is at. full: tiles before it; rest:
    elements."""

    def __init__(self, printer: Any, full: ir.Value, rest: ir.Value) -> None:
        self.printer, self.b, self.full, self.rest = printer, printer.b, full, rest

    def walk(self, one: Any, walk: Walk, pieces: list[ir.Value]) -> None:
        """Walk over a copy of the tile, with zeros behind its end. one: the WalkFunction."""
        b, full, rest = self.b, self.full, self.rest
        pointers, after = {}, []
        made = {f"kept {f.name}" for c in walk.compacts for f, _ in c.parts}
        for name in one.needs.arrays:
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
        self.printer.calls.call(one, pointers, pieces, number(I64, 1), rest, full)
        for name, f, place, room, size in after:
            self.copy_out(name, f, place, room, size)

    def copy_in(
        self, name: str, f: Field | None, place: ir.Value, room: ir.Value, size: int
    ) -> None:
        b, rest = self.b, self.rest
        if name.startswith("out"):
            return
        if f is not None and f.packed:
            b.call(
                self.printer.helpers.codes(f, self.printer.tile, wide=True),
                [place, room, rest],
            )
            return
        b.clear(room, number(I64, self.printer.tile * size))
        b.copy(room, place, self.printer.bytes(rest, size))

    def copy_out(
        self, name: str, f: Field | None, place: ir.Value, room: ir.Value, size: int
    ) -> None:
        b, rest = self.b, self.rest
        if f is not None and f.packed and name.startswith(("out", SCRATCH)):
            b.call(
                self.printer.helpers.codes(f, self.printer.tile, wide=False),
                [room, place, rest],
            )
            return
        b.copy(place, room, self.printer.bytes(rest, size))


def where(printer: Any, name: str, full: ir.Value) -> tuple[ir.Value, int, Field | None]:
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
