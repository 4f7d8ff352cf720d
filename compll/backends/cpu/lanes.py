"""A loop over the lanes of a tile; backends/loops.py explains its order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from llvmlite import ir

from compll.backends.cpu import instructions as ins
from compll.backends.cpu.builder import (
    F32,
    F64,
    I8,
    I32,
    I64,
    KINDS,
    PTR,
    VOID,
    Builder,
    Variable,
    at,
    const,
    element,
    loop,
    number,
)
from compll.backends.cpu.instructions import (
    Compaction,
    count_bits,
    expanded,
    finite_or,
    item_bytes,
    load_as,
    of_raw,
    raw,
    stored_as,
)
from compll.backends.loops import Loop, order_of_elements
from compll.ir.storage import Storage
from compll.ir.tile import Array, Compact, Store, Value, Walk, order
from compll.numerics import draws
from compll.numerics.bits import magnitude_key
from compll.numerics.numbers import LANES, lane_count

# ---- walk params --------------------------------------------------------------------------------
# Parameters of a walk's function: arrays, counts, values of the piece and accumulators.


@dataclass
class Params:
    """Parameters of a walk's function, in order.

    lanes: arrays with values of the walk's own items, as pointers to those of the first tile.
    whole: arrays of which any item may be read or stored. counts: selections, of which elements are
    counted, and arrays, of which elements are spread.
    """

    lanes: list[Array]
    whole: list[Array]
    counts: list[str | Array]
    sums: list[Value]
    pieces: list[Value]


def given(walk: Walk) -> Params:
    """The parameters of a walk's function."""
    values = walk.values
    lanes = [v.attr for v in values if v.op in ("load", "unpack") and v.level != "piece"]
    lanes += [s.array for s in walk.stores if s.place is None]
    whole = [v.attr for v in values if v.op in ("at", "spread")]
    whole += [s.array for s in walk.stores if s.place is not None]
    whole += [array for compact in walk.compacts for array, _ in compact.parts]
    counts = [*(v.attr for v in walk.spreads), *(compact.selection for compact in walk.compacts)]
    pieces = [v for v in values if v.level == "piece" and v.op != "const"]
    lanes, whole, counts, sums = (
        list(dict.fromkeys(each)) for each in (lanes, whole, counts, walk.folds)
    )
    return Params(lanes, whole, counts, sums, pieces)


def signature_of(walk: Walk) -> str:
    """A text that is equal for walks that can share a function: only values of the piece differ."""
    names: dict[Value, str] = {}
    lines = [f"of {bool(walk.domain.of)}"]
    for v in walk.values:
        names[v] = f"%{len(names)}"
        made = v.level == "piece" and v.op != "const"
        attr = f"{v.attr.role} {v.attr.name}" if isinstance(v.attr, Array) else repr(v.attr)
        parts = [] if made else [v.op, attr, *(names[a] for a in v.args)]
        lines.append(" ".join([v.kind, v.level, *parts]))
    for s in walk.stores:
        place = "" if s.place is None else names[s.place]
        lines.append(f"{s.array.role} {s.array.name} {s.back} {s.adds} {names[s.value]} {place}")
    for compact in walk.compacts:
        conditions = [str(v and names[v]) for v in (compact.always, compact.first)]
        parts = [f"{array.name} {names[v]}" for array, v in compact.parts]
        lines.append(" ".join([compact.selection, *conditions, *parts]))
    return "\n".join([*lines, *(names[f] for f in walk.folds)])


def streamed(walk: Walk) -> list[Store]:
    """Stores of floats per lane to arrays that the walk does not read: these may bypass the
    cache."""
    read = {v.attr for v in walk.values if v.op == "load" and v.level == "element"}
    return [
        s
        for s in walk.stores
        if not walk.domain.of and s.array.role in ("gradient", "payload") and not s.packed
        and s.value.level == "element" and s.place is None and s.array not in read
    ]  # fmt: skip


class WalkContext(Protocol):
    """The function of a walk, as its loops over lanes see it."""

    b: Builder
    walk: Walk
    tile: int
    #: true if streamed stores bypass the cache
    past: bool
    #: level of the cache that prefetches fill
    level: int
    #: the number of the tile
    t: ir.Value
    numbers: dict[str, ir.Value]
    pointers: dict[Array, ir.Value]
    whole: dict[Array, ir.Value]
    buffers: dict[Value, ir.Value]
    lanes: dict[Value, ir.Value]
    sums: dict[Value, ir.Value]
    local: dict[Value, ir.Value]
    counters: dict[int, tuple[ir.Value, ir.Value]]
    compactions: dict[str, Compaction]
    taken: dict[Array, Variable]
    #: codes of the tile, a byte each, of arrays of trits
    codes: dict[Array, ir.Value]
    asked: set[Array]

    def of_tile(self, v: Value) -> ir.Value: ...


# ---- lane folds ---------------------------------------------------------------------------------
# Folds of a loop over lanes: sums in the order that the language defines, and extremes.

MAGNITUDE_KEY = ins.traced(magnitude_key)
LEAST, MOST = -(2**31) + 1, 2**31 - 1


class Folds:
    """The folds of one loop. lanes: the Lanes of the loop, which has the current vectors."""

    def __init__(self, lanes: Lanes, folds: list[Value]) -> None:
        self.lanes, self.b, self.walk, self.folds = lanes, lanes.b, lanes.walk, folds
        self.width = lanes.width
        self.parts: dict[Value, ir.Value] = {}
        self.best: dict[Value, ir.Value] = {}

    def open(self) -> None:
        """Start values, before the loop."""
        b, w = self.b, self.width
        for f in self.folds:
            if f.attr != "sum":
                start = ir.Constant(ir.VectorType(I32, w), [self.start(f)] * w)
                self.best[f] = Variable(b, start)

    def open_place(self) -> None:
        """Start the sums of a place."""
        b, w = self.b, self.width
        for f in self.sums():
            # -0.0 + x is x, also for x = -0.0
            start = ir.Constant(ir.VectorType(F32, w), [-0.0] * w)
            self.parts[f] = Variable(b, start)

    def close_place(self) -> None:
        """Keep the sums of a place."""
        for f in self.sums():
            self.b.put(self.parts[f].get(), self.walk.lanes[f], self.lanes.place)

    def sums(self) -> list[Value]:
        """The folds that are sums."""
        return [f for f in self.folds if f.attr == "sum"]

    @staticmethod
    def start(f: Value) -> int:
        """The start value: the key that no lane beats, or a count of 0."""
        return {"min": MOST, "max": LEAST, "count": 0}[f.attr]

    def fold(self, f: Value) -> None:
        """Fold the current lanes."""
        b, x = self.b, self.lanes.value(f.args[0])
        if f.attr == "sum":
            masked = self.lanes.masked(x, 0.0) if not zero_at_zero(f.args[0]) else x
            part = self.parts[f]
            part.set(b.fadd(part.get(), masked))
            return
        best = self.best[f]
        now = best.get()
        if f.attr == "count":
            best.set(b.add(now, b.zext(self.lanes.masked(x, 0), now.type)))
            return
        key = MAGNITUDE_KEY if f.args[0].op == "abs" else ins.ROWS["order_key"]
        keys = x if f.kind == "i32" else key(b, x)
        if not (f.attr == "max" and at_least_zero(f.args[0]) and zero_at_zero(f.args[0])):
            keys = self.lanes.masked(keys, self.start(f))
        best.set(ins.ROWS[f.attr](b, now, keys))

    def finish(self, f: Value) -> None:
        """The fold's value, after the loop. Adds it to its total."""
        b = self.b
        if f.attr == "sum":
            result = self.folded_sum(self.walk.lanes[f])
            if zero_at_zero(f.args[0]) and not at_least_zero(f.args[0]):
                result = b.fadd(result, self.behind())
        else:
            how = "add" if f.attr == "count" else f"s{f.attr}"
            result = b.intrinsic(f"vector.reduce.{how}", self.best[f].get())
        if f in self.walk.sums:
            self.add_up(f, result, self.walk.sums[f])
        if f.attr in ("min", "max") and f.kind == "f32":
            result = ins.ROWS["from_key"](b, result)
        self.walk.local[f] = result

    def behind(self) -> ir.Value:
        """The sum of lanes behind the tile's end, 0.0: theirs here may be -0.0, of which a sum of
        zeros would be one, too. -0.0, which changes no sum, if there are none."""
        b, m = self.b, self.walk.numbers["m"]
        short = b.icmp_signed("<", m, number(I64, self.walk.tile))
        return b.select(short, number(F32, 0.0), number(F32, -0.0))

    def add_up(self, f: Value, of_tile: ir.Value, total: ir.Value) -> None:
        """Add a tile's value to the total."""
        b = self.b
        if f.attr == "sum":
            tile = b.add(self.walk.numbers["done"], self.walk.t)
            lane = b.and_(tile, number(I64, LANES - 1))
            b.put(b.fadd(b.get(total, F64, lane), b.fpext(of_tile, F64)), total, lane)
        elif f.attr == "count":
            b.store(b.add(b.load(total, typ=I64), b.zext(of_tile, I64)), total)
        else:
            b.store(ins.ROWS[f.attr](b, b.load(total, typ=I32), of_tile), total)

    def folded_sum(self, room: ir.Value) -> ir.Value:
        """The sum of the lanes, by halves."""
        b, lanes = self.b, lane_count(self.walk.tile)
        w = min(16, lanes)
        return halved(b, [b.get(room, F32, number(I64, o), w) for o in range(0, lanes, w)], w)


def halved(b: Builder, parts: list[ir.Value], count: int) -> ir.Value:
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
    """True if lanes are 0.0 or -0.0 when the gradient and the states are zero; the call's scale is
    finite."""
    if v.op in ("load", "unpack"):
        return not v.attr.received
    if v.op in ("add", "sub"):
        return all(map(zero_at_zero, v.args))
    if v.op in ("neg", "abs", "floor", "ceil", "round", "sqrt", "float16", "magnitude_bits"):
        return zero_at_zero(v.args[0])
    if v.op == "mul" and v.args[1].op == "scale":
        return zero_at_zero(v.args[0])
    # no other product: zero times an infinite number is NaN; the square of a zero is safe
    return v.op == "mul" and v.args[0] is v.args[1] and zero_at_zero(v.args[0])


def at_least_zero(v: Value) -> bool:
    """True if no lane is negative, or -0.0."""
    return v.op in ("abs", "magnitude_bits") or (v.op == "mul" and v.args[0] is v.args[1])


# ---- lane stores --------------------------------------------------------------------------------
# Stores of a loop over lanes: to arrays, to packed bytes, or each lane to its own place.


class Stores:
    """The stores of one loop. lanes: the Lanes of the loop, which has the current vectors."""

    def __init__(self, lanes: Lanes, stores: list[Store]) -> None:
        self.lanes, self.b, self.walk, self.stores = lanes, lanes.b, lanes.walk, stores
        self.words: dict[tuple[Store, int], ir.Value] = {}

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
            flag = b.module.add_metadata([number(I32, 1)])
            made.set_metadata("nontemporal", flag)
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
            single = b.extract_element(value, lane)
            b.store(b.fadd(b.load(to, typ=F32), single) if s.adds else single, to)

    def finite_or_before(self, s: Store, value: ir.Value) -> ir.Value:
        """A state's value; the old value if the new one is NaN or infinite once stored."""
        load = Value("load", (), "f32", "element", s.array)
        loaded = [v for v in order([s.value]) if v.op == "load" and v.attr == s.array]
        before = self.lanes.value(loaded[0]) if loaded else self.lanes.op_load(load)
        return finite_or(self.b, value, before, s.array.storage.name)

    def pack(self, s: Store, value: ir.Value) -> None:
        """Collect codes that share bytes; write_words writes the complete bytes."""
        b, bits = self.b, s.array.storage.bits
        codes = b.trunc(value, ir.VectorType(I8, self.lanes.width))
        if s.array.storage.trits:
            b.store(codes, at(b, self.walk.codes[s.array], self.lanes.index), align=1)
            return
        width = s.array.storage.tile_bytes(self.walk.tile)
        if bits == 8:
            self.write_bytes(s, codes, self.lanes.index, width)
            return
        assert self.lanes.offset is not None
        first, plane = self.lanes.offset % width, self.lanes.offset // width
        moved = b.shl(codes, ir.Constant(codes.type, [plane * bits] * self.lanes.width))
        word = self.words.get((s, first))
        self.words[s, first] = moved if word is None else b.or_(word, moved)

    def write_words(self) -> None:
        """Write the bytes of a place, which are complete."""
        for (s, first), word in self.words.items():
            byte = self.b.add(self.lanes.place, number(I64, first))
            self.write_bytes(s, word, byte, s.array.storage.tile_bytes(self.walk.tile))

    def write_bytes(self, s: Store, codes: ir.Value, byte: ir.Value, width: int) -> None:
        b = self.b
        start = b.mul(self.walk.t, number(I64, width))
        b.store(codes, at(b, self.walk.pointers[s.array], b.add(start, byte)), align=1)


# ---- lanes --------------------------------------------------------------------------------------

WIDTH = 16
#: passes over places of a tile that are unrolled
UNROLLED = 8
#: bytes between a load and its prefetch
AHEAD = 8192
#: bytes of a cache line
LINE = 64


class Lanes:
    """A loop over lanes. kept: values in the tile's
    memory."""

    def __init__(
        self, walk: WalkContext, lane_loop: Loop, stores: list[Store], kept: Iterable[Value]
    ) -> None:
        self.walk, self.b, self.loop, self.written = walk, walk.b, lane_loop, stores
        self.from_buffers = set(kept)
        self.tile, self.stride = walk.tile, lane_loop.stride
        widths = [codes.tile_bytes(self.tile) for codes in self.small_codes()]
        self.width = min([WIDTH, self.stride, *widths])
        if any(s.place for s in stores):
            self.width = 1
        # next to other stores, partial lines that bypass the cache are slower than usual stores
        large = [s for s in stores if s.value.level == "element" and not s.packed]
        past = [s for s in large if s in streamed(walk.walk)]
        whole = all(self.width * item_bytes(s.array) >= LINE for s in past)
        self.past = walk.past and (whole or len(past) == len(large))
        self.folds, self.stores = Folds(self, lane_loop.folds), Stores(self, stores)
        self.mine: set[Array] = set()
        #: the current place, the lanes visited there, and values of these
        self.place, self.index = number(I64, 0), number(I64, 0)
        self.offset: int | None = None
        self.values: dict[Value, ir.Value] = {}
        self.asked: set[Array] = set()
        self.selected: dict[str, ir.Value] = {}

    def small_codes(self) -> list[Storage]:
        """The types of arrays with several codes in a byte."""
        values = order_of_elements(self.loop, self.from_buffers)
        arrays = [s.array for s in self.written] + [v.attr for v in values if v.op == "unpack"]
        return [a.storage for a in arrays if a.storage.parts]

    def emit(self) -> None:
        b, w = self.b, self.width
        self.folds.open()
        passes = self.tile // self.stride
        with loop(b, number(I64, self.stride), w) as place:
            self.place = place
            self.folds.open_place()
            self.stores = Stores(self, self.written)
            if passes <= UNROLLED:
                for number_of in range(passes):
                    self.visit(number(I64, number_of * self.stride), number_of * self.stride)
            else:
                with loop(b, number(I64, self.tile), self.stride) as offset:
                    self.visit(offset, None)
            self.stores.write_words()
            self.folds.close_place()
        for f in self.loop.folds:
            self.folds.finish(f)

    def visit(self, offset: ir.Value, constant: int | None) -> None:
        """Handle the lanes from place + offset on. constant: the offset if it is a constant."""
        b = self.b
        self.offset, self.index = constant, b.add(self.place, offset)
        self.values, self.asked = {}, set()
        for v in self.loop.kept:
            b.put(self.value(v), self.walk.buffers[v], self.index)
        for f in self.loop.folds:
            self.folds.fold(f)
        self.selected = {compact.selection: self.compact(compact) for compact in self.loop.compacts}
        ready = [(s, self.value(s.value)) for s in self.written]
        for s, value in ready:
            self.stores.store(s, value)

    def compact(self, compact: Compact) -> ir.Value:
        """Append the selected lanes; returns a mask of them."""
        always, first = (
            None if v is None else self.masked(self.value(v), 0)
            for v in (compact.always, compact.first)
        )
        parts = [self.value(v) for _, v in compact.parts]
        return self.walk.compactions[compact.selection].lanes(always, first, parts)

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
        if v not in self.values:
            self.values[v] = self.make(v)
        return self.values[v]

    def make(self, v: Value) -> ir.Value:
        b, w = self.b, self.width
        if v.level != "element":
            return b.splat(self.walk.of_tile(v), w)
        if v in self.from_buffers:
            return b.get(self.walk.buffers[v], KINDS[v.kind], self.index, w)
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
        prefetch = b.declared("llvm.prefetch.p0", VOID, [PTR, I32, I32, I32])
        ahead = at(b, self.walk.pointers[array], b.add(offset, number(I64, AHEAD)))
        b.call(prefetch, [ahead, number(I32, 0), number(I32, self.walk.level), number(I32, 1)])

    def op_spread(self, v: Value) -> ir.Value:
        """The next elements of an array, in order, in lanes for which a condition holds; zeros in
        others."""
        b, w = self.b, self.width
        inside = self.masked(self.value(v.args[0]), 0)
        taken = self.walk.taken[v.attr]
        place = at(b, self.walk.whole[v.attr], b.mul(taken.get(), number(I64, 4)))
        bits = b.zext(b.bitcast(inside, ir.IntType(w)), I32)
        result = expanded(b, place, inside, bits)
        taken.set(b.add(taken.get(), count_bits(b, bits)))
        return result

    def op_bucket(self, v: Value) -> ir.Value:
        keys, table = v.args
        return ins.bucket(self.b, self.walk.of_tile(table), self.value(keys), v.attr)

    def op_lookup(self, v: Value) -> ir.Value:
        table, index = v.args
        place = ins.clipped(self.b, self.value(index), v.attr)
        return ins.gathered(self.b, self.walk.of_tile(table), place, F32)

    def op_load(self, v: Value) -> ir.Value:
        result = load_as(self.b, self.pointer(v.attr), v.attr.storage.name, self.width)
        return ins.convert(self.b, result, KINDS[v.kind])

    def op_at(self, v: Value) -> ir.Value:
        """Elements of an array at places, one a lane."""
        b, storage = self.b, v.attr.storage.name
        places = self.masked(self.value(v.args[0]), 0)
        result = ins.gathered(b, self.walk.whole[v.attr], places, raw(storage))
        return ins.convert(b, of_raw(b, result, storage), KINDS[v.kind])

    def op_draw(self, v: Value) -> ir.Value:
        b, w = self.b, self.width
        counter, second = self.walk.counters[v.attr]
        base = b.splat(ins.traced(draws.counter)(b, b.trunc(self.index, I32), counter), w)
        steps = [lane * draws.WEYL & 0xFFFFFFFF for lane in range(w)]
        counters = b.add(base, ir.Constant(ir.VectorType(I32, w), steps))
        return ins.traced(draws.unit)(b, counters, b.splat(second, w))

    def op_unpack(self, v: Value) -> ir.Value:
        b, w, codes = self.b, self.width, v.attr.storage
        if codes.trits:
            place = at(b, self.walk.codes[v.attr], self.index)
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
