"""Calls of walks' functions, and totals over all tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from compll.backends.cpu.builder import (
    F32,
    F64,
    I8,
    I32,
    I64,
    PTR,
    VOID,
    Builder,
    Variable,
    loop,
    number,
)
from compll.backends.cpu.instructions import ROWS
from compll.backends.cpu.lane_folds import LEAST, MOST
from compll.backends.cpu.last_tile import LastTile
from compll.backends.cpu.nontemporal_stores import gains, large
from compll.backends.cpu.storages import item_bytes
from compll.backends.cpu.walk_params import Arrays, given, signature_of, store_name, streamed
from compll.backends.cpu.walks import WalkPrinter
from compll.ir.tile import Value, Walk
from compll.numerics.numbers import LANES

#: totals of folds over the tiles, by fold: type, number of accumulators (lanes, from 0), and start
#: value
TOTALS: dict[str, tuple[ir.Value, int, float]] = {
    "sum": (F64, LANES, 0.0), "count": (I64, 1, 0), "max": (I32, 1, LEAST), "min": (I32, 1, MOST),
}  # fmt: skip


@dataclass(frozen=True)
class WalkFunction:
    """A function, which other walks may share, and the arguments of this walk."""

    function: Any
    needs: Arrays
    matrix: bool


class WalkCalls:
    """The walks of the kernel that `printer` (a Printer) builds."""

    def __init__(self, printer: Any) -> None:
        self.printer = printer
        self.printed: dict[str, list[WalkPrinter]] = {}
        usual = [w for w in printer.kernel.walks if id(w) not in printer.routines.fused]
        self.functions = {id(w): self.printed_as(w) for w in usual}
        self.totals: dict[int, ir.Value] = {}

    def printed_as(self, walk: Walk) -> list[WalkFunction]:
        """The functions of a walk: with usual stores, and with stores that bypass the cache if that
        gains."""
        key = signature_of(walk)
        if key not in self.printed:
            self.printed[key] = [
                self.printed_now(walk, past)
                for past in (False, True)[: 1 + bool(gains() and streamed(walk))]
            ]
        return [
            WalkFunction(one.function, given(walk), walk.matrix is not None)
            for one in self.printed[key]
        ]

    def printed_now(self, walk: Walk, past: bool) -> WalkPrinter:
        p = self.printer
        name = f"{p.kernel.name}_walk{len(self.printed)}{'_past' * past}"
        found = WalkPrinter(p.module, name, walk, p.tile, past)
        found.emit(p.helpers.keys if found.draws else None)
        return found

    @property
    def past(self) -> bool:
        """True if a function has stores that bypass the cache."""
        return any(len(found) > 1 for found in self.functions.values())

    def run(self, walk: Walk, n: ir.Value) -> None:
        """Walk over all full tiles of n elements, then over the last one if it is shorter."""
        p, b = self.printer, self.printer.b
        usual, *past = self.functions[id(walk)]
        for f in walk.folds:
            self.open_total(f)
        for one in (v.attr for v in walk.spreads):
            array = f"{one.shape} {one.name}" if one.expr is None else f"in {one.name}"
            p.pointers[f"spread {one.name}"] = p.pointers[array]
            p.pointers[f"count spread {one.name}"] = Variable(b, number(I64, 0)).place
        pieces = [p.value(v) for v in usual.needs.pieces]
        full, rest = (how(n, number(I64, p.tile)) for how in (b.udiv, b.urem))
        if past:
            arrays = {store_name(s): item_bytes(s.field) for s in streamed(walk)}
            places = [(p.pointers[name], p.bytes(n, size)) for name, size in arrays.items()]
            with b.if_else(large(b, places)) as (then, otherwise):
                with then:
                    self.call(past[0], p.pointers, pieces, full)
                with otherwise:
                    self.call(usual, p.pointers, pieces, full)
        else:
            self.call(usual, p.pointers, pieces, full)
        with b.if_then(b.icmp_unsigned("!=", rest, number(I64, 0))):
            LastTile(p, full, rest).walk(usual, walk, pieces)
        for f in walk.folds:
            if f.attr == "sum":
                b.call(p.helpers.get("folded", VOID, [PTR], _folded), [self.totals[id(f)]])

    def call(
        self, one: WalkFunction, pointers: ir.Value, pieces: list[ir.Value], count: ir.Value, m: ir.Value = None,
        done: ir.Value | None = None,
    ) -> None:  # fmt: skip
        """Call a walk's function for `count` tiles of m elements, after `done` others."""
        p, b = self.printer, self.printer.b
        first = number(I64, 0) if one.matrix else p.row["first"]
        done = number(I64, 0) if done is None else done
        names = one.needs.arrays
        arrays = [pointers.get(n) or pointers[n.removeprefix("at ")] for n in names]
        sums = [self.totals[id(v)] for v in one.needs.sums]
        numbers = {
            "count": count, "m": number(I64, p.tile) if m is None else m, "done": done,
            "first": b.add(first, p.bytes(done, p.tile)),
            "back": b.icmp_unsigned("!=", p.given["back"], number(I8, 0)),
            "seed": p.given["seed"], "step": p.given["step"], "tensor": p.row["tensor"],
        }  # fmt: skip
        b.call(one.function, [*arrays, *sums, *pieces, *numbers.values()])

    def open_total(self, f: Value) -> None:
        """Reset the accumulators of a fold."""
        b = self.printer.b
        kind, count, start = TOTALS[f.attr]
        room = self.totals[id(f)] = self.totals.get(id(f)) or b.room(kind, count)
        if count > 1:
            b.clear(room, number(I64, 8 * count))
        else:
            b.store(number(kind, start), room)

    def clear_total(self, f: Value) -> None:
        """Set a total to 0, for a walk that may be skipped."""
        b = self.printer.b
        kind, count, _ = TOTALS[f.attr]
        room = self.totals[id(f)] = b.room(kind, count)
        b.store(number(kind, 0), room)

    def total(self, v: Value) -> ir.Value:
        """The total of a fold over all tiles."""
        b = self.printer.b
        (f,) = v.args
        found = b.load(self.totals[id(f)], typ=TOTALS[f.attr][0])
        if f.attr == "count":
            return b.sitofp(found, F64)
        if f.attr == "sum" or v.kind == "i32":
            return found
        nothing = b.icmp_signed("==", found, number(I32, TOTALS[f.attr][2]))
        return b.fpext(b.select(nothing, number(F32, 0.0), ROWS["from_key"](b, found)), F64)


def _folded(b: Builder, room: ir.Value) -> None:
    """Sum the lanes, by halves, into the first."""
    half = LANES // 2
    while half:
        with loop(b, number(I64, half)) as lane:
            low, high = (b.get(room, F64, i) for i in (lane, b.add(lane, number(I64, half))))
            b.put(b.fadd(low, high), room, lane)
        half //= 2
