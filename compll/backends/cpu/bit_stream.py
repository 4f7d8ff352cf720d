"""Positions as bits: Golomb-Rice and Elias delta codes. See [Note: bit streams] in
reference/bitstreams.py for the codes, and gap_stream.py for arguments and results of the functions.

A writer collects bits in a word and stores the word with every code. A reader looks at the WORD
bits that eight bytes hold after the first bit, which may be any bit of the first byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compll.backends.cpu.builder import (
    I1,
    I8,
    I32,
    I64,
    PTR,
    Builder,
    Variable,
    at,
    c,
    loop,
    number,
    repeat_while,
)

WORD, HALF, MOST_BITS, AHEAD = 57, 32, 40, 64


@dataclass(frozen=True)
class Code:
    """A code of gaps. write, read: bodies of the functions that store and load a field."""

    name: str
    write: Callable[..., Any]
    read: Callable[..., Any]

    def store(self, helpers: Any) -> Any:
        """The function store(positions, count, n, out): the address behind the last byte, as
        int64."""
        return helpers.get(f"store_{self.name}", I64, [PTR, I64, I64, PTR], self.write)

    def load(self, helpers: Any) -> Any:
        """The function load(data, end, count, n, positions): 1 if these bytes are `count`
        positions, else 0."""
        slow = helpers.get("last_word", I64, [PTR, I64, I64], _last_word, inline=True)

        def body(b: Builder, data: Any, end: Any, count: Any, n: Any, positions: Any) -> Any:
            reader = Reader(b, slow, data, b.sub(b.ptrtoint(end, I64), b.ptrtoint(data, I64)))
            self.read(b, reader, count, n, positions)
            return reader.ended()

        return helpers.get(f"load_{self.name}", I64, [PTR, PTR, I64, I64, PTR], body)


def ones_below(b: Builder, count: Any) -> Any:
    """A number whose `count` lowest bits are set."""
    return b.sub(b.shl(c(1), count), c(1))


def log2(b: Builder, x: Any) -> Any:
    """The floor of the base-2 logarithm of a positive number."""
    return b.sub(c(63), b.ctlz(x, number(I1, 1)))


class Writer:
    """Appends bits to bytes. If `ahead` is set, also writes bytes that are incomplete: then AHEAD
    codes of at least a bit follow, and write all these bytes again."""

    def __init__(self, b: Builder, out: Any) -> None:
        self.b, self.ahead = b, False
        self.end = Variable(b, b.ptrtoint(out, I64))
        self.word, self.fill = Variable(b, c(0)), Variable(b, c(0))

    def put(self, value: Any, count: Any) -> None:
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

    def put_half(self, value: Any, count: Any) -> None:
        """Append at most HALF bits, and make room for as many again."""
        self.append(value, count)
        with self.b.if_then(self.b.icmp_unsigned(">=", self.fill.get(), c(HALF))):
            self.spill(I32, c(HALF))

    def append(self, value: Any, count: Any) -> None:
        b = self.b
        self.word.set(b.or_(self.word.get(), b.shl(value, self.fill.get())))
        self.fill.set(b.add(self.fill.get(), count))

    def spill(self, kind: Any, bits: Any) -> None:
        """Store the lowest bits of the word. `bits`: number of them that are complete bytes."""
        b = self.b
        low = self.word.get() if kind == I64 else b.trunc(self.word.get(), kind)
        b.store(low, b.inttoptr(self.end.get(), PTR), align=1)
        self.end.set(b.add(self.end.get(), b.lshr(bits, c(3))))
        self.word.set(b.lshr(self.word.get(), bits))
        self.fill.set(b.sub(self.fill.get(), bits))

    def distances(self, positions: Any, count: Any, write: Callable[[Any], None]) -> None:
        """Call write(distance) with each position's distance from the one before."""
        b, before = self.b, Variable(self.b, c(-1))
        some = b.sub(count, c(AHEAD))
        some = b.select(b.icmp_signed(">", some, c(0)), some, c(0))
        for self.ahead, first, stop in ((True, c(0), some), (False, some, count)):
            with loop(b, stop, 1, first) as j:
                here = b.sext(b.get(positions, I32, j), I64)
                write(b.sub(here, before.get()))
                before.set(here)

    def close(self) -> Any:
        """Write the last bytes; the address behind them."""
        with repeat_while(self.b, lambda: self.b.icmp_signed(">", self.fill.get(), c(0))):
            self.spill(I8, c(8))
        return self.end.get()


class Reader:
    """Reads bits of `length` bytes. bit: number of the next bit."""

    def __init__(self, b: Builder, slow: Any, data: Any, length: Any) -> None:
        self.b, self.slow, self.data, self.length = b, slow, data, length
        self.end = b.mul(length, c(8))
        self.bit = Variable(b, c(0))
        self.good = Variable(b, number(I1, 1))

    def word(self, bit: Any) -> Any:
        """At least WORD bits from bit `bit` on; zeros behind the end."""
        b, found = self.b, Variable(self.b, c(0))
        first = b.lshr(bit, c(3))
        inside = b.icmp_signed("<=", b.add(first, c(8)), self.length)
        with b.if_else(inside, likely=True) as (then, otherwise):
            with then:
                found.set(b.load(at(b, self.data, first), typ=I64, align=1))
            with otherwise:
                found.set(b.call(self.slow, [self.data, first, self.length]))
        return b.lshr(found.get(), b.and_(bit, c(7)))

    def require(self, condition: Any) -> None:
        """Report the data as wrong unless the condition holds."""
        self.good.set(self.b.and_(self.good.get(), condition))

    def skip(self, count: Any) -> None:
        """Move on by `count` bits."""
        self.bit.set(self.b.add(self.bit.get(), count))
        self.require(self.b.icmp_signed("<=", self.bit.get(), self.end))

    def ended(self) -> Any:
        """1 if nothing was wrong and only zeros of the last byte remain."""
        b = self.b
        left = b.sub(self.end, self.bit.get())
        self.require(b.icmp_unsigned("<", left, c(8)))
        with b.if_then(self.good.get()):
            self.require(b.icmp_unsigned("==", self.word(self.bit.get()), c(0)))
        return b.zext(self.good.get(), I64)


def _last_word(b: Builder, data: Any, first: Any, length: Any) -> Any:
    """The last bytes, fewer than eight, as a word."""
    found = Variable(b, c(0))
    with loop(b, length, 1, first) as i:
        byte = b.zext(b.load(at(b, data, i), typ=I8), I64)
        found.set(b.or_(found.get(), b.shl(byte, b.mul(b.sub(i, first), c(8)))))
    return found.get()
