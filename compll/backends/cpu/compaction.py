"""Compaction within a walk: selected lanes are appended to arrays, in order.

llvm.experimental.vector.compress is one instruction with AVX-512; elsewhere LLVM stores each lane
and advances if it is selected, without a branch. Whole vectors are written, so arrays have SLACK
(interface.py) more elements than they hold.
"""

from __future__ import annotations

from llvmlite import ir

from compll.backends.cpu.builder import Builder, Variable, loop
from compll.backends.cpu.processor import FEATURES
from compll.backends.cpu.types import F32, I1, I32, I64, PTR, c, number

#: true if this processor compresses lanes in one instruction, which is cheaper than a branch
COMPRESSES = bool(FEATURES.get("avx512f"))


def count_bits(b: Builder, x: ir.Value) -> ir.Value:
    """The number of set bits, as int64."""
    return b.zext(b.ctpop(x), I64)


class Compaction:
    """The instructions of one Compact in a walk's function.

    counts: address of the number of elements taken so far, and of the number that `first` may still
    take.
    """

    def __init__(self, b: Builder, counts: ir.Value, arrays: list[ir.Value]) -> None:
        self.b, self.counts, self.arrays = b, counts, arrays
        self.taken, self.left = (Variable(b, b.get(counts, I64, c(i))) for i in range(2))

    def close(self) -> None:
        """Store the counts, after the last tile."""
        for i, now in enumerate((self.taken, self.left)):
            self.b.put(now.get(), self.counts, c(i))

    def lanes(self, always: ir.Value, first: ir.Value, parts: list[ir.Value]) -> ir.Value:
        """Append the selected lanes; returns a mask of them. parts: the values for each array."""
        b = self.b
        like = always if always is not None else first
        found: ir.Value = number(I32, 0)
        if always is not None:
            found = self.bits(always)
        if first is not None:
            found = b.or_(found, self.limited(self.bits(first)))
        hit = b.bitcast(b.trunc(found, ir.IntType(like.type.count)), like.type)
        if COMPRESSES:
            self.append(parts, hit, found)
        else:
            with b.if_then(b.icmp_unsigned("!=", found, number(I32, 0))):
                self.append(parts, hit, found)
        return hit

    def append(self, parts: list[ir.Value], hit: ir.Value, found: ir.Value) -> None:
        """Store the selected lanes, and advance by their number."""
        b, taken = self.b, self.taken.get()
        for array, value in zip(self.arrays, parts, strict=True):
            b.put(self.together(value, hit), array, taken)
        self.taken.set(b.add(taken, count_bits(b, found)))

    def bits(self, mask: ir.Value) -> ir.Value:
        """A vector of truths as the bits of a word."""
        return self.b.zext(self.b.bitcast(mask, ir.IntType(mask.type.count)), I32)

    def limited(self, bits: ir.Value) -> ir.Value:
        """The first set bits, as many as may still be taken."""
        b, word = self.b, Variable(self.b, bits)
        with b.if_then(b.icmp_unsigned("!=", bits, number(I32, 0)), likely=False):
            left = b.sub(self.left.get(), count_bits(b, bits))
            few = b.icmp_signed("<", left, c(0))
            self.left.set(b.select(few, c(0), left))
            with b.if_then(few, likely=False), loop(b, b.neg(left)):
                highest = b.lshr(number(I32, -(2**31)), b.ctlz(word.get(), number(I1, 0)))
                word.set(b.xor(word.get(), highest))
        return word.get()

    def together(self, value: ir.Value, hit: ir.Value) -> ir.Value:
        """The selected lanes, moved to the start of a vector."""
        b, kind = self.b, value.type
        letter = "f32" if kind.element == F32 else "i32"
        full = f"llvm.experimental.vector.compress.v{kind.count}{letter}"
        known = b.declared(full, kind, [kind, hit.type, kind])
        return b.call(known, [value, hit, ir.Constant(kind, ir.Undefined)])


def expanded(b: Builder, place: ir.Value, hit: ir.Value, bits: ir.Value) -> ir.Value:
    """The next float32 values from an address on, in order, in the lanes of `hit`; zeros in the
    others. bits: `hit` as a number."""
    width = hit.type.count
    kind = ir.VectorType(F32, width)
    zeros = ir.Constant(kind, [0.0] * width)
    if COMPRESSES:
        expand = b.declared(f"llvm.masked.expandload.v{width}f32", kind, [PTR, hit.type, kind])
        return b.call(expand, [place, hit, zeros])
    found = Variable(b, zeros)
    with b.if_then(b.icmp_unsigned("!=", bits, number(I32, 0))):
        # without a branch: lanes behind the last value read the last value
        last, taken, lanes = b.sub(b.ctpop(bits), number(I32, 1)), number(I32, 0), zeros
        for lane in range(width):
            own = b.select(b.icmp_unsigned("<", taken, last), taken, last)
            value = b.get(place, F32, b.zext(own, I64))
            lanes = b.insert_element(lanes, value, number(I32, lane))
            taken = b.add(taken, b.and_(b.lshr(bits, number(I32, lane)), number(I32, 1)))
        found.set(b.select(hit, lanes, zeros))
    return found.get()
