"""Stores of a loop over lanes: to arrays, to packed bytes, or each lane to its own place."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from compll.backends.cpu.builder import at
from compll.backends.cpu.storages import finite_or, item_bytes, load_as, stored_as
from compll.backends.cpu.types import F32, I8, I32, I64, number
from compll.backends.cpu.walk_params import store_name, streamed
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
        storage = "float32" if s.field is None else s.field.storage
        pointer = self.lanes.pointer(store_name(s), item_bytes(s.field))
        if s.target == "state":
            value = self.finite_or_before(s, value)
        made = b.store(stored_as(b, value, storage), pointer, align=1)
        if self.lanes.past and s in streamed(self.walk.walk):
            made.align = 16
            one = b.module.add_metadata([number(I32, 1)])
            made.set_metadata("nontemporal", one)
        return None

    def scatter(self, s: Store, value: ir.Value, place: ir.Value) -> None:
        """Store or add one lane at its own element. LLVM would split longer vectors."""
        b, lane, size = self.b, number(I32, 0), item_bytes(s.field)
        with b.if_then(b.icmp_signed("<", self.lanes.index, self.walk.numbers["m"])):
            element = b.zext(b.extract_element(place, lane), I64)
            to = at(b, self.walk.pointers[store_name(s)], b.mul(element, number(I64, size)))
            if s.target == "state" and s.field is not None:
                before = load_as(b, to, s.field.storage, 1)
                kept = stored_as(b, finite_or(b, value, before, s.field.storage), s.field.storage)
                b.store(kept, to, align=1)
                return
            own = b.extract_element(value, lane)
            b.store(b.fadd(b.load(to, typ=F32), own) if s.target == "scatter_add" else own, to)

    def finite_or_before(self, s: Store, value: ir.Value) -> ir.Value:
        """A state's value; the old value if the new one is NaN or infinite once stored."""
        f = s.field
        assert f is not None
        load = Value("load", (), "f32", "lane", f)
        loaded = [v for v in order([s.value]) if v.op == "load" and v.attr is f]
        before = self.lanes.value(loaded[0]) if loaded else self.lanes.op_load(load)
        return finite_or(self.b, value, before, f.storage)

    def pack(self, s: Store, value: ir.Value) -> None:
        """Collect codes that share bytes; write_words writes the complete bytes."""
        b, f = self.b, s.field
        assert f is not None
        codes = b.trunc(value, ir.VectorType(I8, self.lanes.width))
        if f.trits:
            b.store(codes, at(b, self.walk.trits.codes[store_name(s)], self.lanes.index), align=1)
            return
        width = f.packed_bytes(self.walk.tile)
        if f.bits == 8:
            self.write_bytes(s, codes, self.lanes.index, width)
            return
        assert self.lanes.offset is not None
        first, plane = self.lanes.offset % width, self.lanes.offset // width
        moved = b.shl(codes, ir.Constant(codes.type, [plane * f.bits] * self.lanes.width))
        word = self.words.get((id(s), first))
        self.words[id(s), first] = moved if word is None else b.or_(word, moved)

    def write_words(self) -> None:
        """Write the bytes of a place, which are complete."""
        for (key, first), word in self.words.items():
            (s,) = [s for s in self.stores if id(s) == key]
            assert s.field is not None
            byte = self.b.add(self.lanes.place, number(I64, first))
            self.write_bytes(s, word, byte, s.field.packed_bytes(self.walk.tile))

    def write_bytes(self, s: Store, codes: ir.Value, byte: ir.Value, width: int) -> None:
        b = self.b
        start = b.mul(self.walk.t, number(I64, width))
        b.store(codes, at(b, self.walk.pointers[store_name(s)], b.add(start, byte)), align=1)
