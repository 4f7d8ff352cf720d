"""A walk over the tiles of a piece as an LLVM function.

It sees full tiles alone: a last, shorter one is given as copies, with zeros behind its end. Lanes
are vectors of WIDTH; LLVM parts them where a processor's registers are narrower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from compll.backends.cpu import instructions as ins
from compll.backends.cpu.compaction import Compaction
from compll.backends.cpu.instructions import F32, F64, I8, I16, I32, I64, KINDS, PTR, VOID, Builder
from compll.ir.module import Field
from compll.ir.tile import Compact, Store, Value, Walk, order, order_inside
from compll.numerics.numbers import LANES, lane_count
from compll.passes.fuse import Loop, loops, order_of_lanes

WIDTH = 16
#: passes over places of a tile that are written out, not looped over
UNROLLED = 8
#: bytes ahead of a load that are asked for
AHEAD = 8192
#: bytes that a cache holds together
LINE = 64
#: storages of 16 bits: from their bits as int32, and to them
HALVES: dict[str, tuple[Any, Any]] = {
    "float16": (ins.of_float16, ins.float16_bits),
    "bfloat16": (ins.of_bfloat16, ins.bfloat16_bits),
    "uint16": (lambda b, x: x, lambda b, x: x),
}
LEAST, MOST = -(2**31) + 1, 2**31 - 1


def number(kind: Any, value: float) -> Any:
    """A constant."""
    return ir.Constant(kind, value)


def at(b: Builder, pointer: Any, offset: Any) -> Any:
    """The address so many bytes behind another."""
    return b.gep(pointer, [offset], source_etype=I8)


def item_bytes(f: Field | None) -> int:
    """Bytes of one value in memory; of the gradient where there is no field."""
    return 4 if f is None else f.item_bits // 8


@contextmanager
def loop(b: Builder, count: Any, step: int = 1, start: Any = None) -> Iterator[Any]:
    """What is built within it runs for 0, step, ... below count."""
    before = b.block
    body, after = b.append_basic_block("loop"), b.append_basic_block("after")
    first = number(I64, 0) if start is None else start
    b.cbranch(b.icmp_signed("<", first, count), body, after)
    b.position_at_end(body)
    index = b.phi(I64)
    index.add_incoming(first, before)
    yield index
    following = b.add(index, number(I64, step))
    index.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, count), body, after)
    b.position_at_end(after)


def load_as(b: Builder, pointer: Any, storage: str, count: int) -> Any:
    """Values of a storage as float32 or int32; count 0: one, not a vector."""

    def of(kind: Any) -> Any:
        return b.load(pointer, typ=ir.VectorType(kind, count) if count else kind, align=1)

    if storage in HALVES:
        x = of(I16)
        return HALVES[storage][0](b, b.zext(x, ins.lanes(I32, x)))
    return of(F32 if storage == "float32" else I32)


def stored_as(b: Builder, x: Any, storage: str) -> Any:
    """What is written of a float32 or int32 value."""
    return b.trunc(HALVES[storage][1](b, x), ins.lanes(I16, x)) if storage in HALVES else x


@dataclass
class Arrays:
    """What a walk is given, by name: pointers to its first tile."""

    arrays: list[str]
    pieces: list[Value]
    sums: list[Value]


def given(walk: Walk) -> Arrays:
    """The arrays, values of the piece and accumulators that a walk needs, in its parameters' order."""
    found = walk.values
    names = [array_of(v) for v in found if v.op in ("load", "unpack") and v.level != "piece"]
    names += [store_name(s) for s in walk.stores]
    if walk.compact is not None:
        names += [f"kept {f.name}" for f, _ in walk.compact.parts]
        names.append(f"count {walk.compact.selection}")
    pieces = [v for v in found if v.level == "piece" and v.op != "const"]
    return Arrays(list(dict.fromkeys(names)), pieces, list(dict.fromkeys(walk.folds)))


def array_of(v: Value) -> str:
    """The array that a load reads: the gradient, a state, or an incoming payload's field."""
    if v.attr == "g":
        return "g"
    assert isinstance(v.attr, Field)
    if v.attr.shape == "kept" and v.attr.expr is None:
        return f"kept {v.attr.name}"
    return f"state {v.attr.name}" if v.attr.expr is None else f"in {v.attr.name}"


def store_name(s: Store) -> str:
    """The array that a store writes."""
    return {"state": f"state {s.name}", "payload": f"out {s.name}"}.get(s.target, "g")


def streamed(walk: Walk) -> list[Store]:
    """Stores of floats per lane to arrays that the walk does not read: such may go past the cache."""
    read = {array_of(v) for v in walk.values if v.op == "load" and v.level == "lane"}
    return [
        s
        for s in walk.stores
        if not walk.of and s.target in ("gradient", "payload") and not s.packed
        and s.value.level == "lane" and store_name(s) not in read
    ]  # fmt: skip


class WalkPrinter:
    """Builds the function of one walk.

    Its parameters: pointers, accumulators of totals, values of the piece, then the numbers of
    NUMBERS. count: tiles; m: lanes of each that count; done: tiles before; first: the number of the
    first element in its tensor.
    """

    NUMBERS = (
        ("count", I64), ("m", I64), ("done", I64), ("first", I64), ("back", ins.I1),
        ("seed", I64), ("step", I64), ("tensor", I64),
    )  # fmt: skip

    def __init__(self, module: ir.Module, name: str, walk: Walk, tile: int, past: bool) -> None:
        self.walk, self.tile, self.past = walk, tile, past
        self.needs = given(walk)
        kinds = [PTR] * (len(self.needs.arrays) + len(self.needs.sums))
        kinds += [KINDS[v.kind] for v in self.needs.pieces] + [k for _, k in self.NUMBERS]
        self.function = ir.Function(module, ir.FunctionType(VOID, kinds), name)
        self.function.linkage = "internal"
        for pointer in self.function.args[: len(self.needs.arrays)]:
            pointer.add_attribute("noalias")
        args = iter(self.function.args)
        self.pointers = {n: next(args) for n in self.needs.arrays}
        self.sums = {id(v): next(args) for v in self.needs.sums}
        self.known: dict[int, Any] = {id(v): next(args) for v in self.needs.pieces}
        self.numbers = {n: next(args) for n, _ in self.NUMBERS}
        self.b = Builder(self.function.append_basic_block("entry"))
        self.loops = loops(walk, tile)
        self.buffers = {
            id(v): self.b.room(KINDS[v.kind], tile) for one in self.loops for v in one.kept
        }
        sums = [f for one in self.loops for f in one.folds if f.attr == "sum"]
        self.lanes = {id(f): self.b.room(F32, lane_count(tile)) for f in sums}
        self.draws = sorted({v.attr for v in walk.values if v.op == "draw"})
        self.asked: set[str] = set()
        # two arrays' tiles push each other out of a small first level of the cache
        arrays = [n for n in self.needs.arrays if n == "g" or n.startswith("state")]
        self.level = 3 if len(arrays) == 1 else 2
        self.written: set[int] = set()

    def emit(self, keys: Any) -> None:
        """The function's body. keys: the function that gives the keys of a draw."""
        b = self.b
        slots = {d: (b.room(I32), b.room(I32)) for d in self.draws}
        high = b.room(I64)
        b.store(number(I64, -1), high)
        self.compaction = self.open_compaction()
        with loop(b, self.numbers["count"]) as t:
            self.t, self.local = t, dict(self.known)
            self.element = b.add(self.numbers["first"], b.mul(t, number(I64, self.tile)))
            if self.draws:
                self.rekey(keys, slots, high)
            self.counters = {d: self.counter(*slots[d]) for d in self.draws}
            self.asked.clear()
            self.written.clear()
            self.stores_of_tiles()
            for one in self.loops:
                self.one_loop(one)
                self.stores_of_tiles()
        if self.compaction is not None:
            self.compaction.close()
        b.ret_void()

    def open_compaction(self) -> Compaction | None:
        """What appends the walk's selected lanes."""
        one = self.walk.compact
        if one is None:
            return None
        arrays = [self.pointers[f"kept {f.name}"] for f, _ in one.parts]
        return Compaction(self.b, one, self.pointers[f"count {one.selection}"], arrays)

    # values of a tile

    def rekey(self, keys: Any, slots: dict[int, Any], high: Any) -> None:
        """The draws' keys, made anew where the upper half of the element's number changes."""
        b = self.b
        upper = b.lshr(self.element, number(I64, 32))
        with b.if_then(b.icmp_unsigned("!=", upper, b.load(high, typ=I64)), likely=False):
            b.store(upper, high)
            for draw, (first, second) in slots.items():
                words = [self.numbers[n] for n in ("seed", "step", "tensor")]
                found = b.call(keys, [*words, number(I64, draw), upper])
                b.store(b.trunc(b.lshr(found, number(I64, 32)), I32), first)
                b.store(b.trunc(found, I32), second)

    def counter(self, first: Any, second: Any) -> tuple[Any, Any]:
        """The keyed counter of the tile's first element, and the second key."""
        b = self.b
        spread = b.mul(b.trunc(self.element, I32), number(I32, ins.WEYL))
        return b.add(spread, b.load(first, typ=I32)), b.load(second, typ=I32)

    def of_tile(self, v: Value) -> Any:
        """A value of the tile or piece, built where it is first needed, outside loops over lanes."""
        if id(v) not in self.local:
            self.local[id(v)] = self.tile_value(v)
        return self.local[id(v)]

    def tile_value(self, v: Value) -> Any:
        b = self.b
        if v.op == "const":
            return number(KINDS[v.kind], v.attr)
        if v.op == "count":
            return b.sitofp(self.numbers["m"], F32)
        if v.op == "load":
            offset = b.mul(self.t, number(I64, item_bytes(v.attr)))
            pointer = at(b, self.pointers[array_of(v)], offset)
            return load_as(b, pointer, v.attr.storage, 0)
        args = [self.of_tile(a) for a in v.args]
        return apply(b, v, args)

    def stores_of_tiles(self) -> None:
        """Stores of one value per tile that are known by now."""
        for s in self.walk.stores:
            ready = all(v.op != "fold" or id(v) in self.local for v in order_inside([s.value]))
            if s.value.level == "lane" or not ready or id(s) in self.written:
                continue
            self.written.add(id(s))
            assert s.field is not None
            offset = self.b.mul(self.t, number(I64, item_bytes(s.field)))
            pointer = at(self.b, self.pointers[store_name(s)], offset)
            self.b.store(
                stored_as(self.b, self.of_tile(s.value), s.field.storage), pointer, align=1
            )

    # loops over lanes

    def one_loop(self, one: Loop) -> None:
        """A loop; where it may write the gradient back, one for either case."""
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
                Lanes(self, one, [s for s in one.stores if not s.back], given_now).emit()
        return None


def apply(b: Builder, v: Value, args: list[Any]) -> Any:
    """An instruction without a meaning of its own to loops, by its row."""
    if v.op == "convert":
        return ins.convert(b, args[0], KINDS[v.kind])
    if v.op == "code":
        return ins.code(b, args[0], (1 << v.attr) - 1)
    return ins.ROWS[v.op](b, *args)


class Lanes:
    """One loop over the lanes of a tile; see fuse.py for its order."""

    def __init__(
        self, walk: WalkPrinter, one: Loop, stores: list[Store], known: Iterable[int]
    ) -> None:
        self.walk, self.b, self.one, self.stores = walk, walk.b, one, stores
        self.from_buffers = set(known)
        self.tile, self.stride = walk.tile, one.stride
        widths = [self.tile * f.bits // 8 for f in self.small_codes()]
        self.width = min([WIDTH, self.stride, *widths])
        if any(s.place is not None for s in stores):
            self.width = 1
        self.best: dict[int, Any] = {}
        self.mine: set[str] = set()

    def small_codes(self) -> list[Field]:
        """Fields of which several codes lie in a byte."""
        fields = [s.field for s in self.stores if s.packed and s.field is not None]
        values = order_of_lanes(self.one, self.from_buffers)
        fields += [v.attr for v in values if v.op == "unpack"]
        return [f for f in fields if f.bits < 8]

    def emit(self) -> None:
        b, w = self.b, self.width
        for f in self.one.folds:
            if f.attr != "sum":
                self.best[id(f)] = self.b.room(I32, w)
                start = self.start(f)
                b.store(ir.Constant(ir.VectorType(I32, w), [start] * w), self.best[id(f)])
        passes = self.tile // self.stride
        with loop(b, number(I64, self.stride), w) as place:
            self.place = place
            self.parts: dict[int, Any] = {
                id(f): self.b.room(F32, w) for f in self.one.folds if f.attr == "sum"
            }
            for part in self.parts.values():  # -0.0 + x is x, also where x is -0.0
                b.store(ir.Constant(ir.VectorType(F32, w), [-0.0] * w), part)
            self.words: dict[tuple[int, int], Any] = {}
            if passes <= UNROLLED:
                for number_of in range(passes):
                    self.visit(number(I64, number_of * self.stride), number_of * self.stride)
            else:
                with loop(b, number(I64, self.tile), self.stride) as offset:
                    self.visit(offset, None)
            self.write_words()
            for f in self.one.folds:
                if f.attr == "sum":
                    b.store(
                        b.load(self.parts[id(f)], typ=ir.VectorType(F32, w)),
                        at(b, self.walk.lanes[id(f)], b.mul(place, number(I64, 4))), align=4,
                    )  # fmt: skip
        for f in self.one.folds:
            self.finish(f)

    def visit(self, offset: Any, known: int | None) -> None:
        """The lanes from place + offset on. known: the offset, where it is a constant."""
        b = self.b
        self.offset, self.index = known, b.add(self.place, offset)
        self.values: dict[int, Any] = {}
        self.asked: set[str] = set()
        for v in self.one.kept:
            pointer = at(b, self.walk.buffers[id(v)], b.mul(self.index, number(I64, 4)))
            b.store(self.value(v), pointer, align=4)
        for f in self.one.folds:
            self.fold(f)
        if self.one.compact is not None:
            self.selected = self.compact(self.one.compact)
        ready = [(s, self.value(s.value)) for s in self.stores]
        for s, value in ready:
            self.store(s, value)

    def compact(self, one: Compact) -> Any:
        """Append the selected lanes; which they are."""
        always, first = (
            None if v is None else self.masked(self.value(v), 0) for v in (one.always, one.first)
        )
        assert self.walk.compaction is not None
        parts = [self.value(v) for _, v in one.parts]
        return self.walk.compaction.lanes(always, first, parts)

    # values

    def op_selected(self, v: Value) -> Any:
        return self.selected

    def op_position(self, v: Value) -> Any:
        b, w = self.b, self.width
        tile = b.add(self.walk.numbers["done"], self.walk.t)
        first = b.trunc(b.add(b.mul(tile, number(I64, self.tile)), self.index), I32)
        return b.add(b.splat(first, w), ir.Constant(ir.VectorType(I32, w), list(range(w))))

    def value(self, v: Value) -> Any:
        """A vector of lanes."""
        if id(v) not in self.values:
            self.values[id(v)] = self.make(v)
        return self.values[id(v)]

    def make(self, v: Value) -> Any:
        b, w = self.b, self.width
        if v.level != "lane":
            return b.splat(self.walk.of_tile(v), w)
        if id(v) in self.from_buffers:
            pointer = at(b, self.walk.buffers[id(v)], b.mul(self.index, number(I64, 4)))
            return b.load(pointer, typ=ir.VectorType(KINDS[v.kind], w), align=4)
        special = getattr(self, f"op_{v.op}", None)
        if special is not None:
            return special(v)
        return apply(b, v, [self.value(a) for a in v.args])

    def pointer(self, name: str, size: int) -> Any:
        """Of the lanes in hand, in an array of elements of `size` bytes."""
        b = self.b
        base = b.mul(self.walk.t, number(I64, self.tile))
        element = b.add(base, self.index)
        self.ask(name, size)
        return at(b, self.walk.pointers[name], b.mul(element, number(I64, size)))

    def ask(self, name: str, size: int) -> None:
        """Have what lies ahead brought nearer, once a walk: line after line, whatever the stride."""
        asked_before = name in self.asked or (name in self.walk.asked and name not in self.mine)
        if asked_before or self.walk.past or self.width == 1:
            return
        self.walk.asked.add(name)
        self.mine.add(name)
        self.asked.add(name)
        b, turn = self.b, self.width * size  # bytes a visit
        if self.offset is not None and self.offset // self.stride * turn % LINE:
            return  # a part of a line that was asked for
        visit = b.udiv(b.sub(self.index, self.place), number(I64, self.stride))
        before = b.mul(self.place, number(I64, self.tile // self.stride * size))
        tiles = b.mul(self.walk.t, number(I64, self.tile * size))
        offset = b.add(b.add(tiles, before), b.mul(visit, number(I64, turn)))
        full = "llvm.prefetch.p0"
        known = b.module.globals.get(full) or ir.Function(
            b.module, ir.FunctionType(VOID, [PTR, I32, I32, I32]), full
        )
        ahead = at(b, self.walk.pointers[name], b.add(offset, number(I64, AHEAD)))
        b.call(known, [ahead, number(I32, 0), number(I32, self.walk.level), number(I32, 1)])

    def op_load(self, v: Value) -> Any:
        f = v.attr if isinstance(v.attr, Field) else None
        storage = "float32" if f is None else f.storage
        found = load_as(self.b, self.pointer(array_of(v), item_bytes(f)), storage, self.width)
        return ins.convert(self.b, found, KINDS[v.kind])

    def op_draw(self, v: Value) -> Any:
        b, w = self.b, self.width
        counter, second = self.walk.counters[v.attr]
        spread = b.mul(b.trunc(self.index, I32), number(I32, ins.WEYL))
        base = b.splat(b.add(counter, spread), w)
        steps = [lane * ins.WEYL & 0xFFFFFFFF for lane in range(w)]
        own = b.add(base, ir.Constant(ir.VectorType(I32, w), steps))
        return ins.hashed(b, own, b.splat(second, w))

    def op_unpack(self, v: Value) -> Any:
        b, w, f = self.b, self.width, v.attr
        width = self.tile * f.bits // 8
        byte, plane = self.byte_and_plane(width)
        start = b.mul(self.walk.t, number(I64, width))
        pointer = at(b, self.walk.pointers[array_of(v)], b.add(start, byte))
        x = b.zext(b.load(pointer, typ=ir.VectorType(I8, w), align=1), ir.VectorType(I32, w))
        if f.bits == 8:
            return x
        # as words: processors have no shift of bytes
        shift = b.splat(b.trunc(b.mul(plane, number(I64, f.bits)), I32), w)
        return b.and_(b.lshr(x, shift), ins.const(I32, x, (1 << f.bits) - 1))

    def byte_and_plane(self, width: int) -> tuple[Any, Any]:
        """In which byte of `width` the codes in hand lie, and as which of its codes."""
        b = self.b
        if self.offset is not None and width % self.stride == 0:
            byte = b.add(self.place, number(I64, self.offset % width))
            return byte, number(I64, self.offset // width)
        byte = b.and_(self.index, number(I64, width - 1))
        return byte, b.lshr(self.index, number(I64, width.bit_length() - 1))

    # folds

    @staticmethod
    def start(f: Value) -> int:
        """The key from which on a fold takes larger, or smaller ones."""
        return MOST if f.attr == "min" else LEAST

    def fold(self, f: Value) -> None:
        b, w = self.b, self.width
        x = self.value(f.args[0])
        if f.attr == "sum":
            masked = self.masked(x, 0.0) if not zero_at_zero(f.args[0]) else x
            part = self.parts[id(f)]
            b.store(b.fadd(b.load(part, typ=ir.VectorType(F32, w)), masked), part)
            return
        keys = x if f.kind == "i32" else ins.key(b, x)
        if not (f.attr == "max" and at_least_zero(f.args[0]) and zero_at_zero(f.args[0])):
            keys = self.masked(keys, self.start(f))
        best = self.best[id(f)]
        now = b.load(best, typ=ir.VectorType(I32, w))
        b.store(ins.ROWS[f.attr](b, now, keys), best)

    def masked(self, x: Any, other: float) -> Any:
        """x, and another number in lanes beyond the tile's end."""
        b, w = self.b, self.width
        lane = ir.Constant(ir.VectorType(I32, w), list(range(w)))
        left = b.trunc(b.sub(self.walk.numbers["m"], self.index), I32)
        inside = b.icmp_signed("<", lane, b.splat(left, w))
        return b.select(inside, x, ins.const(ins.element(x), x, other))

    def finish(self, f: Value) -> None:
        """The fold's value, after the loop; and what it adds to its total."""
        b, w = self.b, self.width
        if f.attr == "sum":
            found = self.folded_sum(self.walk.lanes[id(f)])
        else:
            best = b.load(self.best[id(f)], typ=ir.VectorType(I32, w))
            found = b.intrinsic(f"vector.reduce.s{f.attr}", best)
        sums = self.walk.sums.get(id(f))
        if sums is not None and f.attr == "sum":
            tile = b.add(self.walk.numbers["done"], self.walk.t)
            lane = b.and_(tile, number(I64, LANES - 1))
            place = at(b, sums, b.mul(lane, number(I64, 8)))
            b.store(b.fadd(b.load(place, typ=F64), b.fpext(found, F64)), place)
        elif sums is not None:
            b.store(ins.ROWS[f.attr](b, b.load(sums, typ=I32), found), sums)
        if f.attr != "sum" and f.kind == "f32":
            found = ins.unkey(b, found)
        self.walk.local[id(f)] = found

    def folded_sum(self, room: Any) -> Any:
        """The sum of the lanes, by halves."""
        b, lanes = self.b, lane_count(self.tile)
        w = min(WIDTH, lanes)
        parts = [
            b.load(at(b, room, number(I64, 4 * o)), typ=ir.VectorType(F32, w), align=4)
            for o in range(0, lanes, w)
        ]
        return halved(b, parts, w)

    # stores

    def store(self, s: Store, value: Any) -> None:
        b = self.b
        if s.packed:
            return self.pack(s, value)
        if s.place is not None:
            return self.scatter(s, value, self.value(s.place))
        storage = "float32" if s.field is None else s.field.storage
        pointer = self.pointer(store_name(s), item_bytes(s.field))
        if s.target == "state":
            value = self.finite_or_before(s, value)
        made = b.store(stored_as(b, value, storage), pointer, align=1)
        if self.walk.past and s in streamed(self.walk.walk):
            made.align = 16
            one = b.module.add_metadata([number(I32, 1)])
            made.set_metadata("nontemporal", one)
        return None

    def scatter(self, s: Store, value: Any, place: Any) -> None:
        """A lane to its own element, or added to it. Vectors of one: more would only be parted."""
        b, lane = self.b, number(I32, 0)
        with b.if_then(b.icmp_signed("<", self.index, self.walk.numbers["m"])):
            element = b.zext(b.extract_element(place, lane), I64)
            to = at(b, self.walk.pointers["g"], b.mul(element, number(I64, 4)))
            own = b.extract_element(value, lane)
            b.store(b.fadd(b.load(to, typ=F32), own) if s.target == "scatter_add" else own, to)

    def finite_or_before(self, s: Store, value: Any) -> Any:
        """A state's value, or where it is NaN or infinite when stored, the one before."""
        b, f = self.b, s.field
        assert f is not None
        load = Value("load", (), "f32", "lane", f)
        loaded = [v for v in order([s.value]) if v.op == "load" and v.attr is f]
        before = self.value(loaded[0]) if loaded else self.op_load(load)
        too_large = {"bfloat16": 0x7F7F8000, "float16": 0x477FF000}.get(f.storage, ins.INFINITE)
        size = ins.magnitude_bits(b, value)
        fits = b.icmp_signed("<", size, ins.const(I32, value, too_large))
        return b.select(fits, value, before)

    def pack(self, s: Store, value: Any) -> None:
        """Codes that share bytes are put together; complete bytes are written by write_words."""
        b, f = self.b, s.field
        assert f is not None
        codes = b.trunc(value, ir.VectorType(I8, self.width))
        width = self.tile * f.bits // 8
        if f.bits == 8:
            self.write_bytes(s, codes, self.index, width)
            return
        assert self.offset is not None
        first, plane = self.offset % width, self.offset // width
        moved = b.shl(codes, ir.Constant(codes.type, [plane * f.bits] * self.width))
        word = self.words.get((id(s), first))
        self.words[id(s), first] = moved if word is None else b.or_(word, moved)

    def write_words(self) -> None:
        for (key, first), word in self.words.items():
            (s,) = [s for s in self.stores if id(s) == key]
            assert s.field is not None
            byte = self.b.add(self.place, number(I64, first))
            self.write_bytes(s, word, byte, self.tile * s.field.bits // 8)

    def write_bytes(self, s: Store, codes: Any, byte: Any, width: int) -> None:
        b = self.b
        start = b.mul(self.walk.t, number(I64, width))
        b.store(codes, at(b, self.walk.pointers[store_name(s)], b.add(start, byte)), align=1)


def halved(b: Builder, parts: list[Any], count: int) -> Any:
    """The sum of vectors' lanes: the upper half is added to the lower one, and so on."""
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [b.fadd(x, y) for x, y in zip(parts[:half], parts[half:], strict=True)]
    (x,) = parts
    while count > 1:
        count //= 2
        low, high = (
            b.shuffle_vector(
                x, x, ir.Constant(ir.VectorType(I32, count), list(range(o, o + count)))
            )
            for o in (0, count)
        )
        x = b.fadd(low, high)
    return b.extract_element(x, number(I32, 0))


def zero_at_zero(v: Value) -> bool:
    """Whether lanes are zero where the gradient and the states are zero."""
    if v.op in ("load", "unpack"):
        return not (isinstance(v.attr, Field) and v.attr.expr is not None)
    if v.op in ("add", "sub"):
        return all(map(zero_at_zero, v.args))
    if v.op in ("neg", "abs", "floor", "ceil", "round", "sqrt", "float16", "magnitude_bits"):
        return zero_at_zero(v.args[0])
    if v.op == "mul" and v.args[1].op == "scale":
        return zero_at_zero(v.args[0])
    # no other product: zero times an infinite number is NaN; the square of a zero is safe
    return v.op == "mul" and v.args[0] is v.args[1] and zero_at_zero(v.args[0])


def at_least_zero(v: Value) -> bool:
    """Whether no lane is negative."""
    return v.op in ("abs", "magnitude_bits")
