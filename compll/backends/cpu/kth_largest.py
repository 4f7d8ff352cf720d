"""The k-th largest of a piece's order keys, without an array of all of them.

A sample brackets the answer from below, one walk compacts the keys above the bracket, and of those
alone the answer is found, by their digits; a bracket that is too high is dropped.
"""

from __future__ import annotations

from typing import Any

from compll.backends.cpu.builder import F64, I8, I16, I32, I64, PTR, Builder, at, loop, number
from compll.backends.cpu.instructions import WEYL
from compll.backends.cpu.last_tile import where
from compll.backends.cpu.storages import item_bytes
from compll.ir.tile import KthLargest

#: elements of the sample; bits of a digit
SAMPLE, DIGIT = 4096, 8
LOWEST = -(2**31)


def by_digits(helpers: Any) -> Any:
    """kth(keys, count, k): the k-th largest of int32 keys, and above it how many are larger."""
    return helpers.get("kth", I64, [PTR, I64, I64], _by_digits)


def _by_digits(b: Builder, keys: Any, count: Any, k: Any) -> Any:
    """Digit after digit from the highest: how often each occurs below the known ones."""
    bins = 1 << DIGIT
    histogram = b.room(I64, bins)
    prefix: Any = number(I32, 0)
    known, larger = 0, number(I64, 0)
    for shift in range(32 - DIGIT, -1, -DIGIT):
        with loop(b, number(I64, bins)) as i:
            b.store(number(I64, 0), at(b, histogram, b.mul(i, number(I64, 8))))
        with loop(b, count) as i:
            key = b.load(at(b, keys, b.mul(i, number(I64, 4))), typ=I32)
            key = b.xor(key, number(I32, LOWEST))
            digit = b.and_(b.lshr(key, number(I32, shift)), number(I32, bins - 1))
            place = at(b, histogram, b.mul(b.zext(digit, I64), number(I64, 8)))
            alike = b.icmp_unsigned("==", b.and_(key, number(I32, known)), prefix)
            b.store(b.add(b.load(place, typ=I64), b.zext(alike, I64)), place)
        digit, larger = _found(b, histogram, bins, k, larger)
        prefix = b.or_(prefix, b.shl(b.trunc(digit, I32), number(I32, shift)))
        known |= (bins - 1) << shift
    key = b.zext(b.xor(prefix, number(I32, LOWEST)), I64)
    return b.or_(b.shl(larger, number(I64, 32)), key)


def _found(b: Builder, histogram: Any, bins: int, k: Any, larger: Any) -> tuple[Any, Any]:
    """The digit that the k-th has, and how many are larger than all with it."""
    digit, above, total = b.room(I64), b.room(I64), b.room(I64)
    b.store(number(I64, 0), digit)
    b.store(larger, above)
    b.store(larger, total)
    with loop(b, number(I64, bins)) as i:
        this = b.sub(number(I64, bins - 1), i)
        before = b.load(total, typ=I64)
        after = b.add(before, b.load(at(b, histogram, b.mul(this, number(I64, 8))), typ=I64))
        b.store(after, total)
        here = b.and_(b.icmp_signed("<", before, k), b.icmp_signed(">=", after, k))
        b.store(b.select(here, this, b.load(digit, typ=I64)), digit)
        b.store(b.select(here, before, b.load(above, typ=I64)), above)
    return b.load(digit, typ=I64), b.load(above, typ=I64)


class Search:
    """Emits a KthLargest within a kernel's loop over pieces, which `printer` (a Printer) builds."""

    def __init__(self, printer: Any, step: KthLargest) -> None:
        self.printer, self.b, self.step = printer, printer.b, step
        assert step.walk.compact is not None
        (field, _), *_ = step.walk.compact.parts
        self.keys = printer.pointers[f"kept {field.name}"]
        self.name = step.walk.compact.selection
        self.select = by_digits(printer.helpers)

    def emit(self) -> None:
        """The step's two values."""
        b, p, n = self.b, self.printer, self.printer.row["n"]
        k = p.value(self.step.k)
        k = b.select(b.icmp_signed("<", k, number(I64, 1)), number(I64, 1), k)
        usual = p.walks[id(self.step.walk)][0]
        p.local[id(self.step.least)] = number(I32, LOWEST)
        for v in usual.needs.pieces:
            p.value(v)  # before branches, which would not dominate later uses
        least = b.room(I32)
        b.store(number(I32, LOWEST), least)
        wanted = self.generous(k, 16)
        few = b.icmp_signed("<=", n, number(I64, 4 * SAMPLE))
        most = b.icmp_signed(">=", b.mul(wanted, number(I64, 2)), n)
        with b.if_then(b.not_(b.or_(few, most))):
            b.store(self.bracket(wanted), least)
        self.collect(b.load(least, typ=I32))
        with b.if_then(b.icmp_signed("<", self.count(), k), likely=False):
            self.collect(number(I32, LOWEST))
        both = b.call(self.select, [self.keys, self.count(), k])
        p.local[id(self.step.found)] = b.trunc(both, I32)
        p.local[id(self.step.larger)] = b.lshr(both, number(I64, 32))

    def generous(self, k: Any, more: int) -> Any:
        """k and four times its standard deviation."""
        b = self.b
        root = b.fptosi(b.intrinsic("sqrt", b.sitofp(k, F64)), I64)
        return b.add(b.add(k, b.mul(root, number(I64, 4))), number(I64, more))

    def count(self) -> Any:
        """How many keys the walk has compacted."""
        return self.b.load(self.printer.counts[self.name], typ=I64)

    def collect(self, least: Any) -> None:
        """The keys that are at least `least`."""
        p = self.printer
        p.open_counts(self.name, number(I64, 0))
        p.local[id(self.step.least)] = least
        p.run(self.step.walk)

    def bracket(self, wanted: Any) -> Any:
        """A key below the k-th largest, most likely: of a sample, by which that is walked over."""
        b, p, n = self.b, self.printer, self.printer.row["n"]
        usual = p.walks[id(self.step.walk)][0]
        stretch = b.udiv(n, number(I64, SAMPLE))
        pointers = dict(p.pointers)
        inputs = [x for x in usual.needs.arrays if x == "g" or x.startswith("state")]
        for name in inputs:
            _, size, _ = where(p, name, number(I64, 0))
            pointers[name] = b.room(I8, SAMPLE * size)
        with loop(b, number(I64, SAMPLE)) as j:
            hashed = b.lshr(b.mul(b.trunc(j, I32), number(I32, WEYL)), number(I32, 8))
            start = b.udiv(b.mul(j, n), number(I64, SAMPLE))
            i = b.add(start, b.urem(b.zext(hashed, I64), stretch))
            for name in inputs:
                place, size, f = where(p, name, number(I64, 0))
                kind = {2: I16, 4: I32}[item_bytes(f)]
                found = b.load(at(b, place, b.mul(i, number(I64, size))), typ=kind, align=1)
                b.store(found, at(b, pointers[name], b.mul(j, number(I64, size))), align=1)
        p.open_counts(self.name, number(I64, 0))
        pieces = [p.value(v) for v in usual.needs.pieces]
        tiles = number(I64, SAMPLE // p.tile)
        p.call(usual, pointers, pieces, tiles, number(I64, p.tile), number(I64, 0))
        rank = b.udiv(b.mul(wanted, number(I64, SAMPLE)), n)
        rank = self.generous(rank, 4)
        rank = b.select(b.icmp_signed("<", rank, number(I64, SAMPLE)), rank, number(I64, SAMPLE))
        return b.trunc(b.call(self.select, [self.keys, number(I64, SAMPLE), rank]), I32)
