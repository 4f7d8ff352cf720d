"""Positions as Golomb-Rice codes: see [Note: bit streams] in reference/bitstreams.py for the codes,
and gap_stream.py for arguments and results of the functions.

A writer collects bits in a word and stores the word with every code. A reader looks at the WORD
bits that eight bytes hold after the first bit, which may be any bit of the first byte. With the
parameter 0, the bits are a bitmap of elements that are not selected.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from compll.backends.cpu.builder import Builder, Cursor, Variable, at, loop, repeat_while, routine
from compll.backends.cpu.types import I1, I8, I32, I64, PTR, c, number

WORD, HALF, AHEAD = 57, 32, 64


def ones_below(b: Builder, count: ir.Value) -> ir.Value:
    """A number whose `count` lowest bits are set."""
    return b.sub(b.shl(c(1), count), c(1))


def log2(b: Builder, x: ir.Value) -> ir.Value:
    """The floor of the base-2 logarithm of a positive number."""
    return b.sub(c(63), b.ctlz(x, number(I1, 1)))


class Writer:
    """Appends bits to bytes. If `ahead` is set, also writes bytes that are incomplete: then AHEAD
    codes of at least a bit follow, and write all these bytes again."""

    def __init__(self, b: Builder, out: ir.Value) -> None:
        self.b, self.ahead = b, False
        self.end = Cursor(b, out)
        self.word, self.fill = Variable(b, c(0)), Variable(b, c(0))

    def put(self, value: ir.Value, count: ir.Value) -> None:
        """Append the lowest `count` bits of a number, at most 56. The bits above are zero."""
        if self.ahead:
            self.append(value, count)
            return self.spill(I64, self.b.and_(self.fill.get(), c(-8)))
        b = self.b
        many = b.icmp_unsigned(">", count, c(HALF))
        self.put_half(b.and_(value, c((1 << HALF) - 1)), b.select(many, c(HALF), count))
        with b.if_then(many, likely=False):
            self.put_half(b.lshr(value, c(HALF)), b.sub(count, c(HALF)))
        return None

    def put_half(self, value: ir.Value, count: ir.Value) -> None:
        """Append at most HALF bits, and make room for as many again."""
        self.append(value, count)
        with self.b.if_then(self.b.icmp_unsigned(">=", self.fill.get(), c(HALF))):
            self.spill(I32, c(HALF))

    def append(self, value: ir.Value, count: ir.Value) -> None:
        b = self.b
        self.word.set(b.or_(self.word.get(), b.shl(value, self.fill.get())))
        self.fill.set(b.add(self.fill.get(), count))

    def spill(self, kind: ir.Type, bits: ir.Value) -> None:
        """Store the lowest bits of the word. `bits`: number of them that are complete bytes."""
        b = self.b
        self.end.store(self.word.get() if kind == I64 else b.trunc(self.word.get(), kind))
        self.end.advance(b.lshr(bits, c(3)))
        self.word.set(b.lshr(self.word.get(), bits))
        self.fill.set(b.sub(self.fill.get(), bits))

    def distances(
        self, positions: ir.Value, count: ir.Value, write: Callable[[ir.Value], None]
    ) -> None:
        """Call write(distance) with each position's distance from the one before."""
        b, before = self.b, Variable(self.b, c(-1))
        some = b.sub(count, c(AHEAD))
        some = b.select(b.icmp_signed(">", some, c(0)), some, c(0))
        for self.ahead, first, stop in ((True, c(0), some), (False, some, count)):
            with loop(b, stop, 1, first) as j:
                here = b.sext(b.get(positions, I32, j), I64)
                write(b.sub(here, before.get()))
                before.set(here)

    def close(self) -> ir.Value:
        """Write the last bytes; the address behind them."""
        with repeat_while(self.b, lambda: self.b.icmp_signed(">", self.fill.get(), c(0))):
            self.spill(I8, c(8))
        return self.end.get()


class Reader:
    """Reads bits of `length` bytes. bit: number of the next bit."""

    def __init__(self, b: Builder, data: ir.Value, length: ir.Value) -> None:
        self.b, self.data, self.length = b, data, length
        self.end = b.mul(length, c(8))
        self.bit = Variable(b, c(0))
        self.good = Variable(b, number(I1, 1))

    def word(self, bit: ir.Value) -> ir.Value:
        """At least WORD bits from bit `bit` on; zeros behind the end."""
        b, found = self.b, Variable(self.b, c(0))
        first = b.lshr(bit, c(3))
        inside = b.icmp_signed("<=", b.add(first, c(8)), self.length)
        with b.if_else(inside, likely=True) as (then, otherwise):
            with then:
                found.set(b.load(at(b, self.data, first), typ=I64, align=1))
            with otherwise:
                found.set(last_word(b, self.data, first, self.length))
        return b.lshr(found.get(), b.and_(bit, c(7)))

    def require(self, condition: ir.Value) -> None:
        """Report the data as wrong unless the condition holds."""
        self.good.set(self.b.and_(self.good.get(), condition))

    def skip(self, count: ir.Value) -> None:
        """Move on by `count` bits."""
        self.bit.set(self.b.add(self.bit.get(), count))
        self.require(self.b.icmp_signed("<=", self.bit.get(), self.end))

    def ended(self) -> ir.Value:
        """1 if nothing was wrong and only zeros of the last byte remain."""
        b = self.b
        left = b.sub(self.end, self.bit.get())
        self.require(b.icmp_unsigned("<", left, c(8)))
        with b.if_then(self.good.get()):
            self.require(b.icmp_unsigned("==", self.word(self.bit.get()), c(0)))
        return b.zext(self.good.get(), I64)


@routine(I64, PTR, I64, I64, inline=True)
def last_word(b: Builder, data: ir.Value, first: ir.Value, length: ir.Value) -> ir.Value:
    """The last bytes, fewer than eight, as a word."""
    found = Variable(b, c(0))
    with loop(b, length, 1, first) as i:
        byte = b.zext(b.load(at(b, data, i), typ=I8), I64)
        found.set(b.or_(found.get(), b.shl(byte, b.mul(b.sub(i, first), c(8)))))
    return found.get()


def _parameter(b: Builder, count: ir.Value, n: ir.Value) -> ir.Value:
    """The Rice parameter: see storage.rice_parameter."""
    some = b.select(b.icmp_signed(">", count, c(1)), count, c(1))
    mean = b.udiv(b.mul(n, c(9624)), b.mul(some, c(10000)))
    return b.select(b.icmp_signed(">", mean, c(1)), log2(b, b.or_(mean, c(1))), c(0))


@routine(I64, PTR, I64, I64, PTR)
def store(b: Builder, positions: ir.Value, count: ir.Value, n: ir.Value, out: ir.Value) -> ir.Value:
    """The address behind the last byte, as int64."""
    rice = _parameter(b, count, n)
    b.store(b.trunc(rice, I8), out)
    writer, codes = Writer(b, at(b, out, c(1))), at(b, out, c(1))

    def one(distance: ir.Value) -> None:
        d = b.sub(distance, c(1))
        ones = Variable(b, b.lshr(d, rice))
        with repeat_while(b, lambda: b.icmp_unsigned(">=", ones.get(), c(16))):
            writer.put(c((1 << 16) - 1), c(16))
            ones.set(b.sub(ones.get(), c(16)))
        few, low = ones.get(), b.and_(d, ones_below(b, rice))
        code = b.or_(ones_below(b, few), b.shl(low, b.add(few, c(1))))
        writer.put(code, b.add(b.add(few, c(1)), rice))

    few = b.or_(b.icmp_signed("!=", rice, c(0)), b.icmp_signed("==", count, c(0)))
    with b.if_else(few) as (then, otherwise):
        with then:
            writer.distances(positions, count, one)
        with otherwise:
            writer.end.advance(_write_bitmap(b, positions, count, codes))
    return writer.close()


def _write_bitmap(b: Builder, positions: ir.Value, count: ir.Value, out: ir.Value) -> ir.Value:
    """Write a bit for each element up to the last position, 0 at positions; returns their bytes."""
    bits, words, last = Variable(b, c(-1)), Variable(b, c(0)), Variable(b, c(0))
    with loop(b, count) as j:
        place = b.sext(b.get(positions, I32, j), I64)
        word, bit = b.lshr(place, c(6)), b.and_(place, c(63))
        with repeat_while(b, lambda: b.icmp_signed("<", words.get(), word)):
            b.put(bits.get(), out, words.get())
            bits.set(c(-1))
            words.set(b.add(words.get(), c(1)))
        bits.set(b.xor(bits.get(), b.shl(c(1), bit)))
        last.set(bit)
    rest = b.and_(bits.get(), b.sub(b.shl(c(2), last.get()), c(1)))
    start, some = b.shl(words.get(), c(3)), b.add(b.lshr(last.get(), c(3)), c(1))
    with loop(b, some) as k:
        b.put(b.trunc(b.lshr(rest, b.shl(k, c(3))), I8), out, b.add(start, k))
    return b.add(start, some)


@routine(I64, PTR, PTR, I64, I64, PTR)
def load(
    b: Builder, data: ir.Value, end: ir.Value, count: ir.Value, n: ir.Value, positions: ir.Value
) -> ir.Value:
    """1 if these bytes are `count` positions, else 0."""
    reader = Reader(b, data, b.sub(b.ptrtoint(end, I64), b.ptrtoint(data, I64)))
    before, rice = Variable(b, c(-1)), _parameter(b, count, n)
    reader.require(b.icmp_signed(">=", reader.length, c(1)))
    with b.if_then(reader.good.get()):
        reader.require(b.icmp_signed("==", b.zext(b.load(reader.data, typ=I8), I64), rice))
    reader.bit.set(c(8))
    bitmap = b.and_(reader.good.get(), b.icmp_signed("==", rice, c(0)))
    with b.if_then(bitmap):
        _read_bitmap(b, reader, count, n, positions)
    with loop(b, b.select(bitmap, c(0), count)) as j, b.if_then(reader.good.get()):
        ones = Variable(b, c(0))
        word = Variable(b, reader.word(reader.bit.get()))
        fits = _next_ones(b, word, ones, rice)
        with b.if_then(b.not_(fits), likely=False):
            _more_ones(b, reader, word, ones)
        bits = b.add(b.add(ones.get(), c(1)), rice)
        rest = b.and_(word.get(), ones_below(b, rice))
        reader.skip(bits)
        whole = b.shl(ones.get(), rice)
        reader.require(b.icmp_signed("<", ones.get(), b.add(b.lshr(n, rice), c(1))))
        before.set(b.add(b.add(before.get(), whole), b.add(rest, c(1))))
        reader.require(b.icmp_signed("<", before.get(), n))
        b.put(b.trunc(before.get(), I32), positions, j)
    return reader.ended()


def _read_bitmap(
    b: Builder, reader: Reader, count: ir.Value, n: ir.Value, positions: ir.Value
) -> None:
    """Read the numbers of `count` zeros."""
    done, last = Variable(b, c(0)), Variable(b, c(-1))
    with repeat_while(b, lambda: b.and_(reader.good.get(), b.icmp_signed("<", done.get(), count))):
        first = reader.bit.get()
        zeros = Variable(b, b.and_(b.not_(reader.word(first)), ones_below(b, c(WORD))))
        left = b.sub(count, done.get())
        some = b.intrinsic("ctpop", zeros.get())
        some = b.select(b.icmp_signed("<", some, left), some, left)
        with loop(b, some) as k:
            place = b.add(b.sub(first, c(8)), b.cttz(zeros.get(), number(I1, 0)))
            b.put(b.trunc(place, I32), positions, b.add(done.get(), k))
            zeros.set(b.and_(zeros.get(), b.sub(zeros.get(), c(1))))
            last.set(place)
        done.set(b.add(done.get(), some))
        behind = b.sub(b.add(last.get(), c(9)), first)
        reader.skip(b.select(b.icmp_signed("==", some, left), behind, c(WORD)))
    reader.require(b.icmp_signed("<", last.get(), n))


def _next_ones(b: Builder, word: Variable, ones: Variable, rice: ir.Value) -> ir.Value:
    """The word's leading ones, put into `ones`; true if the word holds the whole code. Shifts the
    ones out of the word."""
    ones.set(b.cttz(b.not_(word.get()), number(I1, 0)))
    bits = b.add(b.add(ones.get(), c(1)), rice)
    fits = b.icmp_unsigned("<=", bits, c(WORD))
    by = b.select(fits, b.add(ones.get(), c(1)), c(0))
    word.set(b.lshr(word.get(), by))
    return fits


def _more_ones(b: Builder, reader: Reader, word: Variable, ones: Variable) -> None:
    """The same for a code that is longer than a word."""
    bit, alike = Variable(b, reader.bit.get()), Variable(b, c(WORD))
    with repeat_while(b, lambda: b.icmp_unsigned("==", alike.get(), c(WORD))):
        found = b.cttz(b.not_(reader.word(bit.get())), number(I1, 0))
        alike.set(b.select(b.icmp_unsigned("<", found, c(WORD)), found, c(WORD)))
        bit.set(b.add(bit.get(), alike.get()))
        past = b.icmp_signed(">=", bit.get(), reader.end)
        alike.set(b.select(past, c(0), alike.get()))
    ones.set(b.sub(bit.get(), reader.bit.get()))
    reader.require(b.icmp_signed("<", bit.get(), reader.end))
    with b.if_then(reader.good.get()):
        word.set(reader.word(b.add(bit.get(), c(1))))
