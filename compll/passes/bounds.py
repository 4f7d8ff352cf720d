"""Bounds of instructions' values, by which other instructions take simpler forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from compll.ir.tile import Value

Pair = tuple[float, float]
ANY: Pair = (-math.inf, math.inf)
WHOLE = (-(2.0**31), 2.0**31 - 1)
#: instructions that keep the order of values
RISING: dict[str, Callable[[float], Any]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "repeat": lambda x: x,
}
BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
KNOWN = {"exponent": (-127.0, 128.0), "draw": (0.0, 1.0), "trit": (0.0, 2.0)}


class Bounds:
    """The smallest and the largest value of instructions of 32 bits. A float may also be NaN."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Value, Pair]] = {}

    def of(self, v: Value) -> Pair:
        """The bounds of a value; infinite ones if nothing is known."""
        stack = [v]
        while stack:
            one = stack[-1]
            missing = [a for a in one.args if id(a) not in self.known]
            if missing:
                stack += missing
                continue
            stack.pop()
            self.known[id(one)] = one, self._fitting(one)
        return self.known[id(v)][1]

    def within(self, v: Value, low: float, high: float) -> bool:
        """True if a value is never outside of these bounds."""
        own = self.of(v)
        return low <= own[0] and own[1] <= high

    def _fitting(self, v: Value) -> Pair:
        """The bounds, unless an integer may wrap around."""
        if v.kind == "bool":
            return 0.0, 1.0
        low, high = _own(v, [self.known[id(a)][1] for a in v.args])
        if v.kind == "f32":
            return (low, high) if low <= high else ANY  # NaN
        return (low, high) if v.kind == "i32" and WHOLE[0] <= low <= high <= WHOLE[1] else ANY


def _own(v: Value, args: list[Pair]) -> Pair:
    """The bounds from those of the arguments; those of integers as if they had no end."""
    if v.op == "const":
        return float(v.attr), float(v.attr)
    if v.op in KNOWN:
        return KNOWN[v.op]
    if v.op == "code":
        return 0.0, float((1 << v.attr) - 1)
    if v.op in ("unpack", "load"):
        return _stored(v)
    if v.op in ("min", "max"):
        return _extreme(v, *args)
    if v.op == "where":
        return min(a[0] for a in args[1:]), max(a[1] for a in args[1:])
    if v.op == "convert":
        whole = v.kind == "f32" and v.args[0].kind in ("i32", "bool")
        return _mapped(np.float32, args[0]) if whole else ANY
    if v.op == "neg":
        return -args[0][1], -args[0][0]
    if v.op == "exp2":
        return 0.0, math.inf
    if v.op in RISING:
        return _mapped(RISING[v.op], args[0])
    if v.op in BINARY:
        kind = np.float32 if v.kind == "f32" else np.float64
        return _corners(lambda a, b: BINARY[v.op](kind(a), kind(b)), *args)
    return _of_bits(v, args)


def _stored(v: Value) -> Pair:
    """The bounds of numbers in a field of whole ones."""
    storage = v.attr.storage
    if storage.packed:
        return 0.0, 2.0 if storage.trits else float((1 << storage.bits) - 1)
    return storage.whole or ANY


def _extreme(v: Value, a: Pair, b: Pair) -> Pair:
    """The bounds of the smaller or larger number. If the first is NaN, it is the second."""
    smaller = v.op == "min"
    low, high = ((min if smaller else max)(x, y) for x, y in zip(a, b, strict=True))
    if v.kind != "f32":
        return low, high
    return (low, b[1]) if smaller else (b[0], high)


def _of_bits(v: Value, args: list[Pair]) -> Pair:
    """The bounds of operators on bits of numbers that are not negative."""
    if v.op == "bitand" and max(a[0] for a in args) >= 0:
        return 0.0, min(a[1] for a in args if a[0] >= 0)
    if v.op == "shr" and args[0][0] >= 0:
        return 0.0, args[0][1]
    if v.op == "abs" and v.kind == "f32":
        return 0.0, max(abs(end) for end in args[0])
    return ANY


def _mapped(function: Callable[[float], Any], ends: Pair) -> Pair:
    return float(function(ends[0])), float(function(ends[1]))


def _corners(function: Callable[[float, float], float], a: Pair, b: Pair) -> Pair:
    """The bounds of a function that has its extremes at ends of both arguments."""
    with np.errstate(all="ignore"):
        found = [float(function(x, y)) for x in a for y in b]
    return ANY if any(math.isnan(x) for x in found) else (min(found), max(found))
