"""Calls of walks' functions, and totals over all tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from compll.backends.cpu.builder import Builder, Variable, loop, routine
from compll.backends.cpu.last_tile import LastTile
from compll.backends.cpu.nontemporal_stores import gains, large
from compll.backends.cpu.printer import TOTALS, Printer
from compll.backends.cpu.storages import item_bytes
from compll.backends.cpu.types import F64, I8, I64, PTR, VOID, c, number
from compll.backends.cpu.walk_params import Params, given, signature_of, streamed
from compll.backends.cpu.walks import WalkPrinter
from compll.ir.tile import Array, Value, Walk
from compll.numerics.numbers import LANES


@dataclass(frozen=True)
class WalkFunction:
    """A function, which other walks may share, and the arguments of this walk."""

    function: ir.Function
    needs: Params
    matrix: bool


class WalkCalls:
    """Walks of the kernel that the printer builds. known: functions by the walk's id, with the walk
    itself, so that no other has its id."""

    def __init__(self, printer: Printer) -> None:
        self.printer = printer
        self.printed: dict[str, list[WalkPrinter]] = {}
        self.known: dict[int, tuple[Walk, list[WalkFunction]]] = {}

    def functions(self, walk: Walk) -> list[WalkFunction]:
        """The functions of a walk: with usual stores, and with stores that bypass the cache if that
        gains."""
        if id(walk) not in self.known:
            key, matrix = signature_of(walk), walk.domain.kind == "matrix"
            if key not in self.printed:
                kinds = (False, True)[: 1 + bool(gains() and streamed(walk))]
                self.printed[key] = [self.printed_now(walk, past) for past in kinds]
            found = [WalkFunction(one.function, given(walk), matrix) for one in self.printed[key]]
            self.known[id(walk)] = walk, found
        return self.known[id(walk)][1]

    def printed_now(self, walk: Walk, past: bool) -> WalkPrinter:
        p = self.printer
        name = f"{p.kernel.name}_walk{len(self.printed)}{'_past' * past}"
        found = WalkPrinter(p.module, name, walk, p.tile, past)
        found.emit()
        return found

    @property
    def past(self) -> bool:
        """True if a function has stores that bypass the cache."""
        return any(len(found) > 1 for found in self.printed.values())

    def run(self, walk: Walk, n: ir.Value) -> None:
        """Walk over all full tiles of n elements, then over the last one if it is shorter."""
        p, b = self.printer, self.printer.b
        usual, *past = self.functions(walk)
        for f in walk.folds:
            self.open_total(f)
        for v in walk.spreads:
            p.counts[v.attr] = Variable(b, c(0)).place
        pieces = [p.value(v) for v in usual.needs.pieces]
        full, rest = (how(n, c(p.tile)) for how in (b.udiv, b.urem))
        if past:
            arrays = dict.fromkeys(s.array for s in streamed(walk))
            places = [(p.pointers[a], p.bytes(n, item_bytes(a))) for a in arrays]
            with b.if_else(large(b, places)) as (then, otherwise):
                with then:
                    self.call(past[0], p.pointers, pieces, full)
                with otherwise:
                    self.call(usual, p.pointers, pieces, full)
        else:
            self.call(usual, p.pointers, pieces, full)
        with b.if_then(b.icmp_unsigned("!=", rest, c(0))):
            self.last(usual, walk, pieces, full, rest)
        for f in walk.folds:
            if f.attr == "sum":
                _fold(b, p.totals[id(f)])

    def open_counts(self, selection: str, limit: ir.Value) -> None:
        """Reset a selection's counts: nothing is compacted, and `limit` elements may be."""
        b, counts = self.printer.b, self.printer.counts
        counts[selection] = counts.get(selection) or b.room(I64, 2)
        for i, value in enumerate((c(0), limit)):
            b.put(value, counts[selection], c(i))

    def know(self, walk: Walk, but: Sequence[Value]) -> None:
        """Compute the values of the piece that a walk needs, except some that are set for each run:
        within branches and loops they would not dominate later uses."""
        for v in self.functions(walk)[0].needs.pieces:
            if v not in but:
                self.printer.value(v)

    def last(
        self, one: WalkFunction, walk: Walk, pieces: list[ir.Value], full: ir.Value, rest: ir.Value
    ) -> None:
        """Walk over a copy of the last tile, of `rest` elements, as over a full one."""
        tile = LastTile(self.printer, full, rest)
        copies = {array: tile.copied(array) for array in one.needs.lanes}
        self.call(one, copies, pieces, c(1), rest, full)
        for array in dict.fromkeys(s.array for s in walk.stores if s.place is None):
            tile.copy_out(array, copies[array])

    def call(
        self, one: WalkFunction, pointers: dict[Array, ir.Value], pieces: list[ir.Value], count: ir.Value, m: ir.Value = None,
        done: ir.Value | None = None
    ) -> None:  # fmt: skip
        """Call a walk's function for `count` tiles of m elements, after `done` others."""
        p, b = self.printer, self.printer.b
        first = c(0) if one.matrix else p.row["first"]
        done = c(0) if done is None else done
        arrays = [pointers[a] for a in one.needs.lanes]
        arrays += [p.pointers[a] for a in one.needs.whole] + [p.counts[k] for k in one.needs.counts]
        sums = [p.totals[id(v)] for v in one.needs.sums]
        numbers = {
            "count": count, "m": c(p.tile) if m is None else m, "done": done,
            "first": b.add(first, p.bytes(done, p.tile)),
            "back": b.icmp_unsigned("!=", p.given["back"], number(I8, 0)),
            "seed": p.given["seed"], "step": p.given["step"], "tensor": p.row["tensor"],
        }  # fmt: skip
        b.call(one.function, [*arrays, *sums, *pieces, *numbers.values()])

    def open_total(self, f: Value) -> None:
        """Reset the accumulators of a fold."""
        b = self.printer.b
        kind, count, start = TOTALS[f.attr]
        totals = self.printer.totals
        room = totals[id(f)] = totals.get(id(f)) or b.room(kind, count)
        if count > 1:
            b.clear(room, c(8 * count))
        else:
            b.store(number(kind, start), room)

    def clear_total(self, f: Value) -> None:
        """Set a total to 0, for a walk that may be skipped."""
        b = self.printer.b
        kind, count, _ = TOTALS[f.attr]
        room = self.printer.totals[id(f)] = b.room(kind, count)
        b.store(number(kind, 0), room)


@routine(VOID, PTR)
def _fold(b: Builder, room: ir.Value) -> None:
    """Sum the lanes, by halves, into the first."""
    half = LANES // 2
    while half:
        with loop(b, c(half)) as lane:
            low, high = (b.get(room, F64, i) for i in (lane, b.add(lane, c(half))))
            b.put(b.fadd(low, high), room, lane)
        half //= 2
