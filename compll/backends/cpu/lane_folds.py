"""Folds of a loop over lanes: sums in the order that the language defines, and extremes."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from compll.backends.cpu import instructions as ins
from compll.backends.cpu.builder import Builder, Variable
from compll.backends.cpu.types import F32, F64, I32, I64, number
from compll.ir.tile import Value
from compll.numerics.bits import magnitude_key
from compll.numerics.numbers import LANES, lane_count

MAGNITUDE_KEY = ins.traced(magnitude_key)
LEAST, MOST = -(2**31) + 1, 2**31 - 1


class Folds:
    """The folds of one loop. lanes: the Lanes of the loop, which has the current vectors."""

    def __init__(self, lanes: Any, folds: list[Value]) -> None:
        self.lanes, self.b, self.walk, self.folds = lanes, lanes.b, lanes.walk, folds
        self.width = lanes.width
        self.parts: dict[int, ir.Value] = {}
        self.best: dict[int, ir.Value] = {}

    def open(self) -> None:
        """Start values, before the loop."""
        b, w = self.b, self.width
        for f in self.folds:
            if f.attr != "sum":
                start = ir.Constant(ir.VectorType(I32, w), [self.start(f)] * w)
                self.best[id(f)] = Variable(b, start)

    def open_place(self) -> None:
        """Start the sums of a place."""
        b, w = self.b, self.width
        for f in self.sums():
            # -0.0 + x is x, also for x = -0.0
            start = ir.Constant(ir.VectorType(F32, w), [-0.0] * w)
            self.parts[id(f)] = Variable(b, start)

    def close_place(self) -> None:
        """Keep the sums of a place."""
        for f in self.sums():
            self.b.put(self.parts[id(f)].get(), self.walk.lanes[id(f)], self.lanes.place)

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
            part = self.parts[id(f)]
            part.set(b.fadd(part.get(), masked))
            return
        best = self.best[id(f)]
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
            found = self.folded_sum(self.walk.lanes[id(f)])
            if zero_at_zero(f.args[0]) and not at_least_zero(f.args[0]):
                found = b.fadd(found, self.behind())
        else:
            how = "add" if f.attr == "count" else f"s{f.attr}"
            found = b.intrinsic(f"vector.reduce.{how}", self.best[id(f)].get())
        if id(f) in self.walk.sums:
            self.add_up(f, found, self.walk.sums[id(f)])
        if f.attr in ("min", "max") and f.kind == "f32":
            found = ins.ROWS["from_key"](b, found)
        self.walk.local[id(f)] = found

    def behind(self) -> ir.Value:
        """The sum of lanes behind the tile's end, 0.0: theirs here may be -0.0, of which a sum of
        zeros would be one, too. -0.0, which changes no sum, if there are none."""
        b, m = self.b, self.walk.numbers["m"]
        short = b.icmp_signed("<", m, number(I64, self.walk.tile))
        return b.select(short, number(F32, 0.0), number(F32, -0.0))

    def add_up(self, f: Value, found: ir.Value, total: ir.Value) -> None:
        """Add a tile's value to the total."""
        b = self.b
        if f.attr == "sum":
            tile = b.add(self.walk.numbers["done"], self.walk.t)
            lane = b.and_(tile, number(I64, LANES - 1))
            b.put(b.fadd(b.get(total, F64, lane), b.fpext(found, F64)), total, lane)
        elif f.attr == "count":
            b.store(b.add(b.load(total, typ=I64), b.zext(found, I64)), total)
        else:
            b.store(ins.ROWS[f.attr](b, b.load(total, typ=I32), found), total)

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
