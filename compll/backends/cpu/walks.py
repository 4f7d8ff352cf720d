"""A walk over the tiles of a piece as an LLVM function.

It sees full tiles only: a last, shorter one is a copy, with zeros behind its end. Lanes are vectors
of WIDTH; LLVM splits them if a processor's registers are narrower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from llvmlite import ir

from compll.backends.cpu import instructions as ins
from compll.backends.cpu.builder import (
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    KINDS,
    PTR,
    VOID,
    Builder,
    Routine,
    Variable,
    at,
    c,
    loop,
    number,
    routine,
)
from compll.backends.cpu.instructions import (
    Compaction,
    gains,
    item_bytes,
    large,
    load_as,
    stored_as,
    traced,
)
from compll.backends.cpu.lanes import Lanes, Params, given, signature_of, streamed
from compll.backends.cpu.printer import TOTALS, Printer
from compll.backends.loops import Loop, loops, order_of_elements
from compll.ir.storage import Storage
from compll.ir.tile import Array, Compact, Store, Value, Walk, order_inside
from compll.numerics import draws
from compll.numerics.numbers import LANES, lane_count

# ---- trit tiles ---------------------------------------------------------------------------------
# Trits of a tile, five in a byte: [Note: trits] in reference/fields.py.
# Within a walk each code of a tile takes a byte; the codes are packed once all are known.

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
        self.codes = {a: b.stack(I8, DIGITS * self.width) for a in (*self.read, *self.written)}
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
        result: ir.Value = ir.Constant(kind, [0] * size)
        for digit in range(DIGITS):
            place = at(b, codes, b.add(start, number(I64, digit * width)))
            tripled = b.add(b.add(result, result), result)
            result = b.add(tripled, b.load(place, typ=kind, align=1))
        b.store(result, at(b, out, start), align=1)


def unpack(b: Builder, data: ir.Value, codes: ir.Value, width: int) -> None:
    """Inverse of pack."""
    with _vectors(b, width) as (size, start):
        kind, wide = ir.VectorType(I8, size), ir.VectorType(I16, size)
        three, by, down = (ir.Constant(wide, [c] * size) for c in (3, 171, 9))
        left: ir.Value = b.zext(b.load(at(b, data, start), typ=kind, align=1), wide)
        digits = []
        for _ in range(DIGITS - 1):
            rest = b.lshr(b.mul(left, by), down)  # a third, exact below 256
            digits.append(b.trunc(b.sub(left, b.mul(rest, three)), kind))
            left = rest
        digits.append(b.trunc(b.urem(left, three), kind))  # 3 in bytes that no pack makes
        # in order, once all are known: LLVM's scalar replacement breaks stores in other orders
        for digit, code in enumerate(reversed(digits)):
            place = at(b, codes, b.add(start, number(I64, digit * width)))
            b.store(code, place, align=1)


def weight(b: Builder, plane: ir.Value) -> ir.Value:
    """3**(4 - plane)."""
    result: ir.Value = number(I32, 81)
    for i, weight in enumerate((27, 9, 3, 1), 1):
        here = b.icmp_unsigned(">=", plane, number(I64, i))
        result = b.select(here, number(I32, weight), result)
    return result


# ---- walks --------------------------------------------------------------------------------------


class WalkPrinter:
    """Builds the function of one walk.

    Its parameters: pointers, accumulators of totals, values of the piece, then the numbers of
    NUMBERS. count: tiles; m: lanes of each tile that count; done: tiles before; first: the number
    of the first element in its tensor.
    """

    NUMBERS = (
        ("count", I64), ("m", I64), ("done", I64), ("first", I64), ("back", I1),
        ("seed", I64), ("step", I64), ("tensor", I64),
    )  # fmt: skip

    def __init__(self, module: ir.Module, name: str, walk: Walk, tile: int, past: bool) -> None:
        self.walk, self.tile, self.past = walk, tile, past
        self.needs = given(walk)
        needs = self.needs
        arrays = len(needs.lanes) + len(needs.whole) + len(needs.counts)
        kinds = [PTR] * (arrays + len(needs.sums))
        kinds += [KINDS[v.kind] for v in self.needs.pieces] + [k for _, k in self.NUMBERS]
        self.function = ir.Function(module, ir.FunctionType(VOID, kinds), name)
        self.function.linkage = "internal"
        for pointer in self.function.args[:arrays]:
            pointer.add_attribute("noalias")
        args = iter(self.function.args)
        self.pointers = {a: next(args) for a in needs.lanes}
        self.whole = {a: next(args) for a in needs.whole}
        self.counts = {key: next(args) for key in needs.counts}
        self.sums = {v: next(args) for v in needs.sums}
        self.passed: dict[Value, ir.Value] = {v: next(args) for v in needs.pieces}
        self.numbers = {n: next(args) for n, _ in self.NUMBERS}
        self.b = Builder(self.function.append_basic_block("entry"))
        self.loops = loops(walk, tile)
        self.buffers = {
            v: self.b.stack(KINDS[v.kind], tile) for each in self.loops for v in each.kept
        }
        sums = [f for each in self.loops for f in each.folds if f.attr == "sum"]
        self.lanes = {f: self.b.stack(F32, lane_count(tile)) for f in sums}
        self.draws = sorted({v.attr for v in walk.values if v.op == "draw"})
        self.asked: set[Array] = set()
        # tiles of two arrays evict each other from a small first-level cache
        large = [a for a in needs.lanes if a.role in ("gradient", "state")]
        self.level = 3 if len(large) == 1 else 2
        self.written: set[Store] = set()
        #: keys of the draws, and the upper half of the element's number that they are of
        self.slots = {d: [Variable(self.b, number(I32, 0)) for _ in range(2)] for d in self.draws}
        self.high = Variable(self.b, number(I64, -1))
        self.compactions = {each.selection: self.open_compaction(each) for each in walk.compacts}
        self.taken = {v.attr: self.taken_before(v.attr) for v in walk.spreads}
        self.trits = Tiles(self.b, tile, walk, self.pointers)
        self.codes = self.trits.codes
        #: the current tile, its first element, values of it, and counters of its draws
        self.t, self.element = number(I64, 0), number(I64, 0)
        self.local: dict[Value, ir.Value] = {}
        self.counters: dict[int, tuple[ir.Value, ir.Value]] = {}

    def emit(self) -> None:
        """Build the function's body."""
        b = self.b
        with loop(b, self.numbers["count"]) as t:
            self.t, self.local = t, dict(self.passed)
            self.element = b.add(self.numbers["first"], b.mul(t, number(I64, self.tile)))
            if self.draws:
                self.rekey()
            self.counters = {d: self.counter(*self.slots[d]) for d in self.draws}
            self.asked.clear()
            self.written.clear()
            self.stores_of_tiles()
            self.trits.unpack(t)
            self.all_loops()
            self.trits.pack(t)
        for compaction in self.compactions.values():
            compaction.close()
        for array, taken in self.taken.items():
            b.store(taken.get(), self.counts[array])
        b.ret_void()

    def open_compaction(self, compact: Compact) -> Compaction:
        """The compaction of a selection's lanes."""
        arrays = [self.whole[array] for array, _ in compact.parts]
        return Compaction(self.b, self.counts[compact.selection], arrays)

    def taken_before(self, array: Array) -> Variable:
        """The number of elements of an array that earlier tiles have spread."""
        return Variable(self.b, self.b.load(self.counts[array], typ=I64))

    # values of a tile

    def rekey(self) -> None:
        """Compute the draws' keys again when the upper half of the element's number changes."""
        b = self.b
        upper = b.lshr(self.element, number(I64, 32))
        with b.if_then(b.icmp_unsigned("!=", upper, self.high.get()), likely=False):
            self.high.set(upper)
            for draw, (first, second) in self.slots.items():
                words = [self.numbers[n] for n in ("seed", "step", "tensor")]
                if draw < 0:  # the same on all ranks
                    words[0] = number(I64, 0)
                keys = ins.draw_keys(b, *words, number(I64, draw & draws.MASK), upper)
                first.set(b.trunc(b.lshr(keys, number(I64, 32)), I32))
                second.set(b.trunc(keys, I32))

    def counter(self, first: ir.Value, second: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The keyed counter of the tile's first element, and the second key."""
        b = self.b
        element = b.trunc(self.element, I32)
        return ins.traced(draws.counter)(b, element, first.get()), second.get()

    def of_tile(self, v: Value) -> ir.Value:
        """A value of the tile or piece, built on first use, outside of loops over lanes."""
        if v not in self.local:
            self.local[v] = self.tile_value(v)
        return self.local[v]

    def tile_value(self, v: Value) -> ir.Value:
        b = self.b
        if v.op == "const":
            return number(KINDS[v.kind], v.attr)
        if v.op == "count":
            return b.sitofp(self.numbers["m"], F32)
        if v.op == "load":
            offset = b.mul(self.t, number(I64, item_bytes(v.attr)))
            return load_as(b, at(b, self.pointers[v.attr], offset), v.attr.storage.name, 0)
        args = [self.of_tile(a) for a in v.args]
        return ins.apply(b, v, args)

    def stores_of_tiles(self) -> None:
        """Store values of the tile that are known by now."""
        for s in self.walk.stores:
            ready = all(v.op != "fold" or v in self.local for v in order_inside([s.value]))
            if s.value.level == "element" or not ready or s in self.written:
                continue
            self.written.add(s)
            offset = self.b.mul(self.t, number(I64, item_bytes(s.array)))
            pointer = at(self.b, self.pointers[s.array], offset)
            value = stored_as(self.b, self.of_tile(s.value), s.array.storage.name)
            self.b.store(value, pointer, align=1)

    # loops over lanes

    def all_loops(self) -> None:
        """The loops in order, with the tile's stores in between."""
        for lane_loop in self.loops:
            self.one_loop(lane_loop)
            self.stores_of_tiles()

    def one_loop(self, lane_loop: Loop) -> None:
        """A loop; two versions if it may write the gradient back, one without and one with the
        write-back."""
        given_now = [v for other in self.loops[: self.loops.index(lane_loop)] for v in other.kept]
        values = order_of_elements(lane_loop, given_now)
        for v in values:
            for a in v.args:
                if a.level != "element":
                    self.of_tile(a)
        if not any(s.back for s in lane_loop.stores):
            return Lanes(self, lane_loop, lane_loop.stores, given_now).emit()
        asked = set(self.asked)
        with self.b.if_else(self.numbers["back"]) as (then, otherwise):
            with then:
                Lanes(self, lane_loop, lane_loop.stores, given_now).emit()
            self.asked = asked
            with otherwise:
                usual = [s for s in lane_loop.stores if not s.back]
                Lanes(self, lane_loop, usual, given_now).emit()
        return None


# ---- last tile ----------------------------------------------------------------------------------
# A last, shorter tile: copied, padded with zeros, and walked over as a full one.


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
        room = b.stack(I8, tile * 4)
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
            b.put(number(I8, ONES if storage.trits else 0), into, j)
        with loop(b, m) as i:
            byte, place = b.zext(b.get(source, I8, b.urem(i, before)), I32), b.urem(i, after)
            first, other = b.udiv(i, before), b.udiv(i, after)
            if storage.trits:
                digit = b.urem(b.udiv(byte, weight(b, first)), number(I32, 3))
                moved = b.mul(b.sub(digit, number(I32, 1)), weight(b, other))
            else:
                code = b.and_(b.lshr(byte, shift(b, first)), number(I32, (1 << storage.bits) - 1))
                moved = b.shl(code, shift(b, other))
            b.put(b.add(b.get(into, I8, place), b.trunc(moved, I8)), into, place)

    return Routine(name, VOID, [PTR, PTR, I64], body)


# ---- walk calls ---------------------------------------------------------------------------------
# Calls of walks' functions, and totals over all tiles.


@dataclass(frozen=True)
class WalkFunction:
    """A function, which other walks may share, and the arguments of this walk."""

    function: ir.Function
    needs: Params
    matrix: bool


class WalkCalls:
    """Walks of the kernel that the printer builds, and the functions of each."""

    def __init__(self, printer: Printer) -> None:
        self.printer = printer
        self.printed: dict[str, list[WalkPrinter]] = {}
        self.by_walk: dict[Walk, list[WalkFunction]] = {}

    def functions(self, walk: Walk) -> list[WalkFunction]:
        """The functions of a walk: with usual stores, and with stores that bypass the cache if that
        gains."""
        if walk not in self.by_walk:
            key, matrix = signature_of(walk), walk.domain.kind == "matrix"
            if key not in self.printed:
                kinds = (False, True)[: 1 + bool(gains() and streamed(walk))]
                self.printed[key] = [self.printed_now(walk, past) for past in kinds]
            functions = [
                WalkFunction(printer.function, given(walk), matrix) for printer in self.printed[key]
            ]
            self.by_walk[walk] = functions
        return self.by_walk[walk]

    def printed_now(self, walk: Walk, past: bool) -> WalkPrinter:
        p = self.printer
        name = f"{p.kernel.name}_walk{len(self.printed)}{'_past' * past}"
        printer = WalkPrinter(p.module, name, walk, p.tile, past)
        printer.emit()
        return printer

    @property
    def past(self) -> bool:
        """True if a function has stores that bypass the cache."""
        return any(len(printers) > 1 for printers in self.printed.values())

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
                _fold(b, p.totals[f])

    def open_counts(self, selection: str, limit: ir.Value) -> None:
        """Reset a selection's counts: nothing is compacted, and `limit` elements may be."""
        b, counts = self.printer.b, self.printer.counts
        counts[selection] = counts.get(selection) or b.stack(I64, 2)
        for i, value in enumerate((c(0), limit)):
            b.put(value, counts[selection], c(i))

    def know(self, walk: Walk, but: Sequence[Value]) -> None:
        """Compute the values of the piece that a walk needs, except some that are set for each run:
        within branches and loops they would not dominate later uses."""
        for v in self.functions(walk)[0].needs.pieces:
            if v not in but:
                self.printer.value(v)

    def last(
        self,
        function: WalkFunction,
        walk: Walk,
        pieces: list[ir.Value],
        full: ir.Value,
        rest: ir.Value,
    ) -> None:
        """Walk over a copy of the last tile, of `rest` elements, as over a full one."""
        tile = LastTile(self.printer, full, rest)
        copies = {array: tile.copied(array) for array in function.needs.lanes}
        self.call(function, copies, pieces, c(1), rest, full)
        for array in dict.fromkeys(s.array for s in walk.stores if s.place is None):
            tile.copy_out(array, copies[array])

    def call(
        self, function: WalkFunction, pointers: dict[Array, ir.Value], pieces: list[ir.Value], count: ir.Value, m: ir.Value = None,
        done: ir.Value | None = None
    ) -> None:  # fmt: skip
        """Call a walk's function for `count` tiles of m elements, after `done` others."""
        p, b = self.printer, self.printer.b
        first = c(0) if function.matrix else p.row["first"]
        done = c(0) if done is None else done
        arrays = [pointers[a] for a in function.needs.lanes]
        arrays += [p.pointers[a] for a in function.needs.whole] + [
            p.counts[k] for k in function.needs.counts
        ]
        sums = [p.totals[v] for v in function.needs.sums]
        numbers = {
            "count": count, "m": c(p.tile) if m is None else m, "done": done,
            "first": b.add(first, p.bytes(done, p.tile)),
            "back": b.icmp_unsigned("!=", p.given["back"], number(I8, 0)),
            "seed": p.given["seed"], "step": p.given["step"], "tensor": p.row["tensor"],
        }  # fmt: skip
        b.call(function.function, [*arrays, *sums, *pieces, *numbers.values()])

    def open_total(self, f: Value) -> None:
        """Reset the accumulators of a fold."""
        b = self.printer.b
        kind, count, start = TOTALS[f.attr]
        totals = self.printer.totals
        room = totals[f] = totals.get(f) or b.stack(kind, count)
        if count > 1:
            b.clear(room, c(8 * count))
        else:
            b.store(number(kind, start), room)

    def clear_total(self, f: Value) -> None:
        """Set a total to 0, for a walk that may be skipped."""
        b = self.printer.b
        kind, count, _ = TOTALS[f.attr]
        room = self.printer.totals[f] = b.stack(kind, count)
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
