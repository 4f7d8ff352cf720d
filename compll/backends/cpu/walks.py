"""A walk over the tiles of a piece as an LLVM function.

It sees full tiles only: a last, shorter one is a copy, with zeros behind its end. Lanes are vectors
of WIDTH; LLVM splits them if a processor's registers are narrower.
"""

from __future__ import annotations

from llvmlite import ir

from compll.backends.cpu import instructions as ins
from compll.backends.cpu.builder import Builder, Variable, at, loop
from compll.backends.cpu.compaction import Compaction
from compll.backends.cpu.lanes import Lanes
from compll.backends.cpu.storages import item_bytes, load_as, stored_as
from compll.backends.cpu.trit_tiles import Tiles
from compll.backends.cpu.types import F32, I1, I32, I64, KINDS, PTR, VOID, number
from compll.backends.cpu.walk_params import given
from compll.ir.tile import Array, Compact, Value, Walk, order_inside
from compll.numerics import draws
from compll.numerics.numbers import lane_count
from compll.passes.fuse import Loop, loops, order_of_lanes


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
        self.sums = {id(v): next(args) for v in needs.sums}
        self.known: dict[int, ir.Value] = {id(v): next(args) for v in needs.pieces}
        self.numbers = {n: next(args) for n, _ in self.NUMBERS}
        self.b = Builder(self.function.append_basic_block("entry"))
        self.loops = loops(walk, tile)
        self.buffers = {
            id(v): self.b.room(KINDS[v.kind], tile) for one in self.loops for v in one.kept
        }
        sums = [f for one in self.loops for f in one.folds if f.attr == "sum"]
        self.lanes = {id(f): self.b.room(F32, lane_count(tile)) for f in sums}
        self.draws = sorted({v.attr for v in walk.values if v.op == "draw"})
        self.asked: set[Array] = set()
        # tiles of two arrays evict each other from a small first-level cache
        large = [a for a in needs.lanes if a.role in ("gradient", "state")]
        self.level = 3 if len(large) == 1 else 2
        self.written: set[int] = set()

    def emit(self) -> None:
        """Build the function's body."""
        b = self.b
        slots = {d: [Variable(b, number(I32, 0)) for _ in range(2)] for d in self.draws}
        high = Variable(b, number(I64, -1))
        self.compactions = {one.selection: self.open_compaction(one) for one in self.walk.compacts}
        self.taken = {v.attr: self.taken_before(v.attr) for v in self.walk.spreads}
        self.trits = Tiles(b, self.tile, self.walk, self.pointers)
        with loop(b, self.numbers["count"]) as t:
            self.t, self.local = t, dict(self.known)
            self.element = b.add(self.numbers["first"], b.mul(t, number(I64, self.tile)))
            if self.draws:
                self.rekey(slots, high)
            self.counters = {d: self.counter(*slots[d]) for d in self.draws}
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

    def open_compaction(self, one: Compact) -> Compaction:
        """The compaction of a selection's lanes."""
        arrays = [self.whole[array] for array, _ in one.parts]
        return Compaction(self.b, self.counts[one.selection], arrays)

    def taken_before(self, array: Array) -> Variable:
        """The number of elements of an array that earlier tiles have spread."""
        return Variable(self.b, self.b.load(self.counts[array], typ=I64))

    # values of a tile

    def rekey(self, slots: dict[int, ir.Value], high: ir.Value) -> None:
        """Compute the draws' keys again when the upper half of the element's number changes."""
        b = self.b
        upper = b.lshr(self.element, number(I64, 32))
        with b.if_then(b.icmp_unsigned("!=", upper, high.get()), likely=False):
            high.set(upper)
            for draw, (first, second) in slots.items():
                words = [self.numbers[n] for n in ("seed", "step", "tensor")]
                if draw < 0:  # the same on all ranks
                    words[0] = number(I64, 0)
                found = ins.draw_keys(b, *words, number(I64, draw & draws.MASK), upper)
                first.set(b.trunc(b.lshr(found, number(I64, 32)), I32))
                second.set(b.trunc(found, I32))

    def counter(self, first: ir.Value, second: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The keyed counter of the tile's first element, and the second key."""
        b = self.b
        element = b.trunc(self.element, I32)
        return ins.traced(draws.counter)(b, element, first.get()), second.get()

    def of_tile(self, v: Value) -> ir.Value:
        """A value of the tile or piece, built on first use, outside of loops over lanes."""
        if id(v) not in self.local:
            self.local[id(v)] = self.tile_value(v)
        return self.local[id(v)]

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
            ready = all(v.op != "fold" or id(v) in self.local for v in order_inside([s.value]))
            if s.value.level == "lane" or not ready or id(s) in self.written:
                continue
            self.written.add(id(s))
            offset = self.b.mul(self.t, number(I64, item_bytes(s.array)))
            pointer = at(self.b, self.pointers[s.array], offset)
            value = stored_as(self.b, self.of_tile(s.value), s.array.storage.name)
            self.b.store(value, pointer, align=1)

    # loops over lanes

    def all_loops(self) -> None:
        """The loops in order, with the tile's stores in between."""
        for one in self.loops:
            self.one_loop(one)
            self.stores_of_tiles()

    def one_loop(self, one: Loop) -> None:
        """A loop; two versions if it may write the gradient back, one without and one with the
        write-back."""
        given_now = [id(v) for other in self.loops[: self.loops.index(one)] for v in other.kept]
        values = order_of_lanes(one, given_now)
        for v in values:
            for a in v.args:
                if a.level != "lane":
                    self.of_tile(a)
        if not any(s.back for s in one.stores):
            return Lanes(self, one, one.stores, given_now).emit()
        asked = set(self.asked)
        with self.b.if_else(self.numbers["back"]) as (then, otherwise):
            with then:
                Lanes(self, one, one.stores, given_now).emit()
            self.asked = asked
            with otherwise:
                usual = [s for s in one.stores if not s.back]
                Lanes(self, one, usual, given_now).emit()
        return None
