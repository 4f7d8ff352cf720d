"""Stores of a loop over lanes: to arrays, to packed bytes, or each lane to its own place."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from compll.backends.cpu.builder import at
from compll.backends.cpu.storages import finite_or, item_bytes, load_as, stored_as
from compll.backends.cpu.types import F32, I8, I32, I64, number
from compll.backends.cpu.walk_params import streamed
from compll.ir.tile import Store, Value, order


class Stores:
    """The stores of one loop. lanes: the Lanes of the loop, which has the current vectors."""

    def __init__(self, lanes: Any, stores: list[Store]) -> None:
        self.lanes, self.b, self.walk, self.stores = lanes, lanes.b, lanes.walk, stores
        self.words: dict[tuple[int, int], ir.Value] = {}

    def store(self, s: Store, value: ir.Value) -> None:
        """Store the current lanes."""
        b = self.b
        if s.packed:
            return self.pack(s, value)
        if s.place is not None:
            return self.scatter(s, value, self.lanes.value(s.place))
        pointer = self.lanes.pointer(s.array)
        if s.array.role == "state":
            value = self.finite_or_before(s, value)
        made = b.store(stored_as(b, value, s.array.storage.name), pointer, align=1)
        if self.lanes.past and s in streamed(self.walk.walk):
            made.align = 16
            one = b.module.add_metadata([number(I32, 1)])
            made.set_metadata("nontemporal", one)
        return None

    def scatter(self, s: Store, value: ir.Value, place: ir.Value) -> None:
        """Store or add one lane at its own element. LLVM would split longer vectors."""
        b, lane, storage = self.b, number(I32, 0), s.array.storage.name
        with b.if_then(b.icmp_signed("<", self.lanes.index, self.walk.numbers["m"])):
            element = b.zext(b.extract_element(place, lane), I64)
            to = at(b, self.walk.whole[s.array], b.mul(element, number(I64, item_bytes(s.array))))
            if s.array.role == "state":
                kept = finite_or(b, value, load_as(b, to, storage, 1), storage)
                b.store(stored_as(b, kept, storage), to, align=1)
                return
            own = b.extract_element(value, lane)
            b.store(b.fadd(b.load(to, typ=F32), own) if s.adds else own, to)

    def finite_or_before(self, s: Store, value: ir.Value) -> ir.Value:
        """A state's value; the old value if the new one is NaN or infinite once stored."""
        load = Value("load", (), "f32", "lane", s.array)
        loaded = [v for v in order([s.value]) if v.op == "load" and v.attr == s.array]
        before = self.lanes.value(loaded[0]) if loaded else self.lanes.op_load(load)
        return finite_or(self.b, value, before, s.array.storage.name)

    def pack(self, s: Store, value: ir.Value) -> None:
        """Collect codes that share bytes; write_words writes the complete bytes."""
        b, bits = self.b, s.array.storage.bits
        codes = b.trunc(value, ir.VectorType(I8, self.lanes.width))
        if s.array.storage.trits:
            b.store(codes, at(b, self.walk.trits.codes[s.array], self.lanes.index), align=1)
            return
        width = s.array.storage.tile_bytes(self.walk.tile)
        if bits == 8:
            self.write_bytes(s, codes, self.lanes.index, width)
            return
        assert self.lanes.offset is not None
        first, plane = self.lanes.offset % width, self.lanes.offset // width
        moved = b.shl(codes, ir.Constant(codes.type, [plane * bits] * self.lanes.width))
        word = self.words.get((id(s), first))
        self.words[id(s), first] = moved if word is None else b.or_(word, moved)

    def write_words(self) -> None:
        """Write the bytes of a place, which are complete."""
        for (key, first), word in self.words.items():
            (s,) = [s for s in self.stores if id(s) == key]
            byte = self.b.add(self.lanes.place, number(I64, first))
            self.write_bytes(s, word, byte, s.array.storage.tile_bytes(self.walk.tile))

    def write_bytes(self, s: Store, codes: ir.Value, byte: ir.Value, width: int) -> None:
        b = self.b
        start = b.mul(self.walk.t, number(I64, width))
        b.store(codes, at(b, self.walk.pointers[s.array], b.add(start, byte)), align=1)
