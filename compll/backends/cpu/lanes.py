"""A loop over the lanes of a tile; passes/fuse.py explains its order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llvmlite import ir

from compll.backends.cpu import instructions as ins
from compll.backends.cpu import table_routines
from compll.backends.cpu.builder import at, loop
from compll.backends.cpu.compaction import count_bits, expanded
from compll.backends.cpu.lane_folds import Folds
from compll.backends.cpu.lane_stores import Stores
from compll.backends.cpu.storages import item_bytes, load_as, of_raw, raw
from compll.backends.cpu.types import F32, I8, I32, I64, KINDS, PTR, VOID, const, element, number
from compll.backends.cpu.walk_params import streamed
from compll.ir.storage import Storage
from compll.ir.tile import Array, Compact, Store, Value
from compll.numerics import draws
from compll.passes.fuse import Loop, order_of_lanes

WIDTH = 16
#: passes over places of a tile that are unrolled
UNROLLED = 8
#: bytes between a load and its prefetch
AHEAD = 8192
#: bytes of a cache line
LINE = 64


class Lanes:
    """A loop over lanes. walk: the WalkPrinter of its function. kept: ids of values in the tile's
    memory."""

    def __init__(self, walk: Any, one: Loop, stores: list[Store], kept: Iterable[int]) -> None:
        self.walk, self.b, self.one, self.written = walk, walk.b, one, stores
        self.from_buffers = set(kept)
        self.tile, self.stride = walk.tile, one.stride
        widths = [codes.tile_bytes(self.tile) for codes in self.small_codes()]
        self.width = min([WIDTH, self.stride, *widths])
        if any(s.place for s in stores):
            self.width = 1
        # next to other stores, partial lines that bypass the cache are slower than usual stores
        large = [s for s in stores if s.value.level == "lane" and not s.packed]
        past = [s for s in large if s in streamed(walk.walk)]
        whole = all(self.width * item_bytes(s.array) >= LINE for s in past)
        self.past = walk.past and (whole or len(past) == len(large))
        self.folds = Folds(self, one.folds)
        self.mine: set[Array] = set()

    def small_codes(self) -> list[Storage]:
        """The types of arrays with several codes in a byte."""
        values = order_of_lanes(self.one, self.from_buffers)
        arrays = [s.array for s in self.written] + [v.attr for v in values if v.op == "unpack"]
        return [a.storage for a in arrays if a.storage.parts]

    def emit(self) -> None:
        b, w = self.b, self.width
        self.folds.open()
        passes = self.tile // self.stride
        with loop(b, number(I64, self.stride), w) as place:
            self.place = place
            self.folds.open_place()
            stores = self.stores = Stores(self, self.written)
            if passes <= UNROLLED:
                for number_of in range(passes):
                    self.visit(number(I64, number_of * self.stride), number_of * self.stride)
            else:
                with loop(b, number(I64, self.tile), self.stride) as offset:
                    self.visit(offset, None)
            stores.write_words()
            self.folds.close_place()
        for f in self.one.folds:
            self.folds.finish(f)

    def visit(self, offset: ir.Value, known: int | None) -> None:
        """Handle the lanes from place + offset on. known: the offset if it is a constant."""
        b = self.b
        self.offset, self.index = known, b.add(self.place, offset)
        self.values: dict[int, ir.Value] = {}
        self.asked: set[Array] = set()
        for v in self.one.kept:
            b.put(self.value(v), self.walk.buffers[id(v)], self.index)
        for f in self.one.folds:
            self.folds.fold(f)
        self.selected = {one.selection: self.compact(one) for one in self.one.compacts}
        ready = [(s, self.value(s.value)) for s in self.written]
        for s, value in ready:
            self.stores.store(s, value)

    def compact(self, one: Compact) -> ir.Value:
        """Append the selected lanes; returns a mask of them."""
        always, first = (
            None if v is None else self.masked(self.value(v), 0) for v in (one.always, one.first)
        )
        parts = [self.value(v) for _, v in one.parts]
        return self.walk.compactions[one.selection].lanes(always, first, parts)

    # values

    def op_selected(self, v: Value) -> ir.Value:
        return self.selected[v.attr]

    def op_position(self, v: Value) -> ir.Value:
        b, w = self.b, self.width
        tile = b.add(self.walk.numbers["done"], self.walk.t)
        first = b.trunc(b.add(b.mul(tile, number(I64, self.tile)), self.index), I32)
        return b.add(b.splat(first, w), ir.Constant(ir.VectorType(I32, w), list(range(w))))

    def value(self, v: Value) -> ir.Value:
        """The vector of a value's lanes."""
        if id(v) not in self.values:
            self.values[id(v)] = self.make(v)
        return self.values[id(v)]

    def make(self, v: Value) -> ir.Value:
        b, w = self.b, self.width
        if v.level != "lane":
            return b.splat(self.walk.of_tile(v), w)
        if id(v) in self.from_buffers:
            return b.get(self.walk.buffers[id(v)], KINDS[v.kind], self.index, w)
        special = getattr(self, f"op_{v.op}", None)
        if special is not None:
            return special(v)
        return ins.apply(b, v, [self.value(a) for a in v.args])

    def pointer(self, array: Array) -> ir.Value:
        """Address of the current lanes in an array."""
        b, size = self.b, item_bytes(array)
        base = b.mul(self.walk.t, number(I64, self.tile))
        element = b.add(base, self.index)
        self.ask(array, size)
        return at(b, self.walk.pointers[array], b.mul(element, number(I64, size)))

    def ask(self, array: Array, size: int) -> None:
        """Prefetch the array, once a walk: line after line, with any stride."""
        asked_before = array in self.asked or (array in self.walk.asked and array not in self.mine)
        parts = self.stride == self.tile and self.width * size < LINE  # would be prefetched twice
        if asked_before or self.past or self.width == 1 or parts:
            return
        for each in (self.walk.asked, self.mine, self.asked):
            each.add(array)
        b, turn = self.b, self.width * size  # bytes of a visit
        if self.offset is not None and self.offset // self.stride * turn % LINE:
            return  # a part of a prefetched line
        visit = b.udiv(b.sub(self.index, self.place), number(I64, self.stride))
        before = b.mul(self.place, number(I64, self.tile // self.stride * size))
        tiles = b.mul(self.walk.t, number(I64, self.tile * size))
        offset = b.add(b.add(tiles, before), b.mul(visit, number(I64, turn)))
        known = b.declared("llvm.prefetch.p0", VOID, [PTR, I32, I32, I32])
        ahead = at(b, self.walk.pointers[array], b.add(offset, number(I64, AHEAD)))
        b.call(known, [ahead, number(I32, 0), number(I32, self.walk.level), number(I32, 1)])

    def op_spread(self, v: Value) -> ir.Value:
        """The next elements of an array, in order, in lanes for which a condition holds; zeros in
        others."""
        b, w = self.b, self.width
        inside = self.masked(self.value(v.args[0]), 0)
        taken = self.walk.taken[v.attr]
        place = at(b, self.walk.whole[v.attr], b.mul(taken.get(), number(I64, 4)))
        bits = b.zext(b.bitcast(inside, ir.IntType(w)), I32)
        found = expanded(b, place, inside, bits)
        taken.set(b.add(taken.get(), count_bits(b, bits)))
        return found

    def op_bucket(self, v: Value) -> ir.Value:
        keys, table = v.args
        return table_routines.bucket(self.b, self.walk.of_tile(table), self.value(keys), v.attr)

    def op_lookup(self, v: Value) -> ir.Value:
        table, index = v.args
        own = table_routines.clipped(self.b, self.value(index), v.attr)
        return table_routines.gathered(self.b, self.walk.of_tile(table), own, F32)

    def op_load(self, v: Value) -> ir.Value:
        found = load_as(self.b, self.pointer(v.attr), v.attr.storage.name, self.width)
        return ins.convert(self.b, found, KINDS[v.kind])

    def op_at(self, v: Value) -> ir.Value:
        """Elements of an array at places, one a lane."""
        b, storage = self.b, v.attr.storage.name
        places = self.masked(self.value(v.args[0]), 0)
        found = table_routines.gathered(b, self.walk.whole[v.attr], places, raw(storage))
        return ins.convert(b, of_raw(b, found, storage), KINDS[v.kind])

    def op_draw(self, v: Value) -> ir.Value:
        b, w = self.b, self.width
        counter, second = self.walk.counters[v.attr]
        base = b.splat(ins.traced(draws.counter)(b, b.trunc(self.index, I32), counter), w)
        steps = [lane * draws.WEYL & 0xFFFFFFFF for lane in range(w)]
        own = b.add(base, ir.Constant(ir.VectorType(I32, w), steps))
        return ins.traced(draws.unit)(b, own, b.splat(second, w))

    def op_unpack(self, v: Value) -> ir.Value:
        b, w, codes = self.b, self.width, v.attr.storage
        if codes.trits:
            place = at(b, self.walk.trits.codes[v.attr], self.index)
            return b.zext(b.load(place, typ=ir.VectorType(I8, w), align=1), ir.VectorType(I32, w))
        width = codes.tile_bytes(self.tile)
        byte, plane = self.byte_and_plane(width)
        start = b.mul(self.walk.t, number(I64, width))
        pointer = at(b, self.walk.pointers[v.attr], b.add(start, byte))
        x = b.zext(b.load(pointer, typ=ir.VectorType(I8, w), align=1), ir.VectorType(I32, w))
        if codes.bits == 8:
            return x
        # as words: processors have no shifts of bytes
        shift = b.splat(b.trunc(b.mul(plane, number(I64, codes.bits)), I32), w)
        return b.and_(b.lshr(x, shift), const(I32, x, (1 << codes.bits) - 1))

    def byte_and_plane(self, width: int) -> tuple[ir.Value, ir.Value]:
        """The byte, of `width` bytes, that holds the current codes, and their plane within
        bytes."""
        b = self.b
        if self.offset is not None and width % self.stride == 0:
            byte = b.add(self.place, number(I64, self.offset % width))
            return byte, number(I64, self.offset // width)
        byte = b.and_(self.index, number(I64, width - 1))
        return byte, b.lshr(self.index, number(I64, width.bit_length() - 1))

    def masked(self, x: ir.Value, other: float) -> ir.Value:
        """x, with another number in lanes beyond the tile's end."""
        b, w = self.b, self.width
        lane = ir.Constant(ir.VectorType(I32, w), list(range(w)))
        left = b.trunc(b.sub(self.walk.numbers["m"], self.index), I32)
        inside = b.icmp_signed("<", lane, b.splat(left, w))
        return b.select(inside, x, const(element(x), x, other))
