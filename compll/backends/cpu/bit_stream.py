"""Positions as bits: Golomb-Rice and Elias delta codes. See [Note: bit streams] in
reference/bitstreams.py, and gap_stream.py for what these functions are given and give.

Bits are gathered in a word, of which halves are stored when they are full. What is read at once are
the WORD bits that eight bytes hold, wherever in the first of them they begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from compll.backends.cpu.builder import (
    I1,
    I8,
    I32,
    I64,
    PTR,
    Builder,
    Variable,
    at,
    loop,
    number,
    repeat_while,
)

WORD, HALF, MOST_BITS = 57, 32, 40
CHUNK = 16
WORDS = ir.VectorType(I32, CHUNK)


@dataclass(frozen=True)
class Code:
    """How gaps are coded: what the functions of a field's storage are made of."""

    name: str
    write: Callable[..., Any]
    read: Callable[..., Any]

    def store(self, helpers: Any) -> Any:
        """store(positions, count, n, out): the address behind the last byte, as int64."""
        return helpers.get(f"store_{self.name}", I64, [PTR, I64, I64, PTR], self.write)

    def load(self, helpers: Any) -> Any:
        """load(data, end, count, n, positions): 1 if these bytes are `count` positions, else 0."""
        slow = helpers.get("last_word", I64, [PTR, I64, I64], _last_word)

        def body(b: Builder, data: Any, end: Any, count: Any, n: Any, positions: Any) -> Any:
            reader = _Reader(b, slow, data, b.sub(b.ptrtoint(end, I64), b.ptrtoint(data, I64)))
            self.read(b, reader, count, n, positions)
            return reader.ended()

        return helpers.get(f"load_{self.name}", I64, [PTR, PTR, I64, I64, PTR], body)


def _c(value: int) -> Any:
    return number(I64, value)


def _ones(b: Builder, count: Any) -> Any:
    """A number whose lowest bits are set."""
    return b.sub(b.shl(_c(1), count), _c(1))


def _log2(b: Builder, x: Any) -> Any:
    """Floor of the logarithm of a positive number."""
    return b.sub(_c(63), b.ctlz(x, number(I1, 1)))


class _Writer:
    """Appends bits to bytes, of which none is touched before it is complete."""

    def __init__(self, b: Builder, out: Any) -> None:
        self.b = b
        self.end = Variable(b, b.ptrtoint(out, I64))
        self.word, self.fill = Variable(b, _c(0)), Variable(b, _c(0))

    def put(self, value: Any, count: Any) -> None:
        """The lowest bits of a number, HALF at most; those above are zero."""
        b = self.b
        self.word.set(b.or_(self.word.get(), b.shl(value, self.fill.get())))
        self.fill.set(b.add(self.fill.get(), count))
        with b.if_then(b.icmp_unsigned(">=", self.fill.get(), _c(HALF))):
            self.spill(I32)

    def spill(self, kind: Any) -> None:
        """Store the lowest bits of the word."""
        b, bits = self.b, _c(kind.width)
        low = b.trunc(self.word.get(), kind)
        b.store(low, b.inttoptr(self.end.get(), PTR), align=1)
        self.end.set(b.add(self.end.get(), _c(kind.width // 8)))
        self.word.set(b.lshr(self.word.get(), bits))
        self.fill.set(b.sub(self.fill.get(), bits))

    def put_long(self, value: Any, count: Any) -> None:
        """Some more bits than put takes."""
        b = self.b
        many = b.icmp_unsigned(">", count, _c(HALF))
        self.put(b.and_(value, _c((1 << HALF) - 1)), b.select(many, _c(HALF), count))
        with b.if_then(many, likely=False):
            self.put(b.lshr(value, _c(HALF)), b.sub(count, _c(HALF)))

    def close(self) -> Any:
        """The last bytes; the address behind them."""
        with repeat_while(self.b, lambda: self.b.icmp_signed(">", self.fill.get(), _c(0))):
            self.spill(I8)
        return self.end.get()


def _distances(b: Builder, positions: Any, count: Any, body: Callable[[Any], None]) -> None:
    """body(how far each position is from the one before)."""
    before = Variable(b, _c(-1))
    with loop(b, count) as j:
        here = b.sext(b.load(at(b, positions, b.mul(j, _c(4))), typ=I32), I64)
        body(b.sub(here, before.get()))
        before.set(here)


class _Reader:
    """Bits from number `bit` on, of so many bytes."""

    def __init__(self, b: Builder, slow: Any, data: Any, length: Any) -> None:
        self.b, self.slow, self.data, self.length = b, slow, data, length
        self.end = b.mul(length, _c(8))
        self.bit = Variable(b, _c(0))
        self.good = Variable(b, number(I1, 1))

    def word(self, bit: Any) -> Any:
        """WORD bits at least; zeros where there are no more."""
        b, found = self.b, Variable(self.b, _c(0))
        first = b.lshr(bit, _c(3))
        inside = b.icmp_signed("<=", b.add(first, _c(8)), self.length)
        with b.if_else(inside, likely=True) as (then, otherwise):
            with then:
                found.set(b.load(at(b, self.data, first), typ=I64, align=1))
            with otherwise:
                found.set(b.call(self.slow, [self.data, first, self.length]))
        return b.lshr(found.get(), b.and_(bit, _c(7)))

    def require(self, condition: Any) -> None:
        """What is read is wrong unless this holds."""
        self.good.set(self.b.and_(self.good.get(), condition))

    def skip(self, count: Any) -> None:
        """The next bits are done with."""
        self.bit.set(self.b.add(self.bit.get(), count))
        self.require(self.b.icmp_signed("<=", self.bit.get(), self.end))

    def ended(self) -> Any:
        """1 if all is right, and only the last byte's zeros are left."""
        b = self.b
        left = b.sub(self.end, self.bit.get())
        self.require(b.icmp_unsigned("<", left, _c(8)))
        with b.if_then(self.good.get()):
            self.require(b.icmp_unsigned("==", self.word(self.bit.get()), _c(0)))
        return b.zext(self.good.get(), I64)


def _last_word(b: Builder, data: Any, first: Any, length: Any) -> Any:
    """The last bytes, fewer than eight, as a word."""
    found = Variable(b, _c(0))
    with loop(b, length, 1, first) as i:
        byte = b.zext(b.load(at(b, data, i), typ=I8), I64)
        found.set(b.or_(found.get(), b.shl(byte, b.mul(b.sub(i, first), _c(8)))))
    return found.get()


# golomb


def _write_golomb(b: Builder, positions: Any, count: Any, n: Any, out: Any) -> Any:
    some = b.select(b.icmp_signed(">", count, _c(1)), count, _c(1))
    mean = b.udiv(b.mul(n, _c(9624)), b.mul(some, _c(10000)))
    rice = b.select(b.icmp_signed(">", mean, _c(1)), _log2(b, b.or_(mean, _c(1))), _c(0))
    b.store(b.trunc(rice, I8), out)
    writer = _Writer(b, at(b, out, _c(1)))

    def one(distance: Any) -> None:
        d = b.sub(distance, _c(1))
        ones = Variable(b, b.lshr(d, rice))
        with repeat_while(b, lambda: b.icmp_unsigned(">=", ones.get(), _c(HALF))):
            writer.put(_c((1 << HALF) - 1), _c(HALF))
            ones.set(b.sub(ones.get(), _c(HALF)))
        few, low = ones.get(), b.and_(d, _ones(b, rice))
        code = b.or_(_ones(b, few), b.shl(low, b.add(few, _c(1))))
        writer.put_long(code, b.add(b.add(few, _c(1)), rice))

    _distances(b, positions, count, one)
    return writer.close()


def _read_golomb(b: Builder, reader: _Reader, count: Any, n: Any, positions: Any) -> None:
    before, rice = Variable(b, _c(-1)), Variable(b, _c(0))
    reader.require(b.icmp_signed(">=", reader.length, _c(1)))
    with b.if_then(reader.good.get()):
        rice.set(b.zext(b.load(reader.data, typ=I8), I64))
    reader.require(b.icmp_signed("<=", rice.get(), _c(MOST_BITS)))
    reader.bit.set(_c(8))
    with loop(b, count) as j, b.if_then(reader.good.get()):
        ones = Variable(b, _c(0))
        word = Variable(b, reader.word(reader.bit.get()))
        fits = _next_ones(b, word, ones, rice)
        with b.if_then(b.not_(fits), likely=False):
            _more_ones(b, reader, word, ones)
        bits = b.add(b.add(ones.get(), _c(1)), rice.get())
        rest = b.and_(word.get(), _ones(b, rice.get()))
        reader.skip(bits)
        whole = b.shl(ones.get(), rice.get())
        reader.require(b.icmp_signed("<", ones.get(), b.add(b.lshr(n, rice.get()), _c(1))))
        before.set(b.add(b.add(before.get(), whole), b.add(rest, _c(1))))
        reader.require(b.icmp_signed("<", before.get(), n))
        b.store(b.trunc(before.get(), I32), at(b, positions, b.mul(j, _c(4))))


def _next_ones(b: Builder, word: Variable, ones: Variable, rice: Variable) -> Any:
    """How many ones the word begins with; whether all of the code is in it, behind which it is cut."""
    ones.set(b.cttz(b.not_(word.get()), number(I1, 0)))
    bits = b.add(b.add(ones.get(), _c(1)), rice.get())
    fits = b.icmp_unsigned("<=", bits, _c(WORD))
    by = b.select(fits, b.add(ones.get(), _c(1)), _c(0))
    word.set(b.lshr(word.get(), by))
    return fits


def _more_ones(b: Builder, reader: _Reader, word: Variable, ones: Variable) -> None:
    """The same of a code that is longer than a word."""
    bit, alike = Variable(b, reader.bit.get()), Variable(b, _c(WORD))
    with repeat_while(b, lambda: b.icmp_unsigned("==", alike.get(), _c(WORD))):
        found = b.cttz(b.not_(reader.word(bit.get())), number(I1, 0))
        alike.set(b.select(b.icmp_unsigned("<", found, _c(WORD)), found, _c(WORD)))
        bit.set(b.add(bit.get(), alike.get()))
        past = b.icmp_signed(">=", bit.get(), reader.end)
        alike.set(b.select(past, _c(0), alike.get()))
    ones.set(b.sub(bit.get(), reader.bit.get()))
    reader.require(b.icmp_signed("<", bit.get(), reader.end))
    with b.if_then(reader.good.get()):
        word.set(reader.word(b.add(bit.get(), _c(1))))


# elias


def _write_elias(b: Builder, positions: Any, count: Any, n: Any, out: Any) -> Any:
    writer = _Writer(b, out)

    def one(distance: Any) -> None:
        low = _log2(b, distance)
        more = b.add(low, _c(1))
        m = _log2(b, more)
        twice = b.add(b.add(m, m), _c(1))
        code = b.or_(b.shl(_c(1), m), b.shl(b.sub(more, b.shl(_c(1), m)), b.add(m, _c(1))))
        code = b.or_(code, b.shl(b.sub(distance, b.shl(_c(1), low)), twice))
        writer.put_long(code, b.add(twice, low))

    _distances(b, positions, count, one)
    return writer.close()


def _read_elias(b: Builder, reader: _Reader, count: Any, n: Any, positions: Any) -> None:
    """Neighbours take a bit each: their runs are read as one."""
    before, done = Variable(b, _c(-1)), Variable(b, _c(0))

    def left() -> Any:
        more = b.icmp_signed("<", done.get(), count)
        return b.and_(reader.good.get(), more)

    with repeat_while(b, left):
        word = reader.word(reader.bit.get())
        alike = b.cttz(b.not_(word), number(I1, 0))
        for most in (_c(WORD), b.sub(count, done.get())):
            alike = b.select(b.icmp_signed("<", alike, most), alike, most)
        reader.skip(alike)
        reader.require(b.icmp_signed("<", b.add(before.get(), alike), n))
        with b.if_then(reader.good.get()):
            _neighbours(b, positions, done.get(), before.get(), alike)
        done.set(b.add(done.get(), alike))
        before.set(b.add(before.get(), alike))
        with b.if_then(left()):
            _read_distance(b, reader, b.lshr(word, alike), alike, before, done, n)
            last = b.sub(done.get(), _c(1))
            with b.if_then(b.icmp_signed(">=", last, _c(0))):
                b.store(b.trunc(before.get(), I32), at(b, positions, b.mul(last, _c(4))))


def _neighbours(b: Builder, positions: Any, done: Any, before: Any, count: Any) -> None:
    """Positions that follow each other; whole vectors are written."""
    first = b.trunc(b.add(before, _c(1)), I32)
    steps = b.add(b.splat(first, CHUNK), ir.Constant(WORDS, list(range(CHUNK))))
    with loop(b, count, CHUNK) as i:
        own = b.add(steps, b.splat(b.trunc(i, I32), CHUNK))
        b.store(own, at(b, positions, b.mul(b.add(done, i), _c(4))), align=4)


def _read_distance(
    b: Builder, reader: _Reader, word: Any, used: Any, before: Variable, done: Variable, n: Any
) -> None:
    """A distance, unless what is left of the word may be too short: then nothing, once."""
    m = b.cttz(word, number(I1, 0))
    inside = b.icmp_unsigned("<=", m, _c(5))
    m = b.select(inside, m, _c(0))
    low = b.and_(b.lshr(word, b.add(m, _c(1))), _ones(b, m))
    low = b.sub(b.add(low, b.shl(_c(1), m)), _c(1))
    twice = b.add(b.add(m, m), _c(1))
    bits = b.add(twice, low)
    fits = b.and_(inside, b.icmp_unsigned("<=", b.add(used, bits), _c(WORD)))
    again = b.and_(b.not_(fits), b.icmp_unsigned("!=", used, _c(0)))
    with b.if_then(b.not_(again)):
        reader.require(inside)
        reader.require(b.icmp_unsigned("<=", low, _c(MOST_BITS)))
        reader.skip(bits)
        rest = b.and_(b.lshr(word, twice), _ones(b, low))
        before.set(b.add(before.get(), b.add(b.shl(_c(1), low), rest)))
        reader.require(b.icmp_signed("<", before.get(), n))
        done.set(b.add(done.get(), _c(1)))


GOLOMB = Code("golomb", _write_golomb, _read_golomb)
ELIAS = Code("elias", _write_elias, _read_elias)
