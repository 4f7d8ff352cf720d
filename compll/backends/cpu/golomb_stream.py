"""Positions as Golomb-Rice codes: see [Note: bit streams] in reference/bitstreams.py."""

from __future__ import annotations

from typing import Any

from compll.backends.cpu.bit_stream import (
    MOST_BITS,
    WORD,
    Code,
    Reader,
    Writer,
    log2,
    ones_below,
)
from compll.backends.cpu.builder import (
    I1,
    I8,
    I32,
    I64,
    Builder,
    Variable,
    at,
    c,
    loop,
    number,
    repeat_while,
)


def _write_golomb(b: Builder, positions: Any, count: Any, n: Any, out: Any) -> Any:
    some = b.select(b.icmp_signed(">", count, c(1)), count, c(1))
    mean = b.udiv(b.mul(n, c(9624)), b.mul(some, c(10000)))
    rice = b.select(b.icmp_signed(">", mean, c(1)), log2(b, b.or_(mean, c(1))), c(0))
    b.store(b.trunc(rice, I8), out)
    writer = Writer(b, at(b, out, c(1)))

    def one(distance: Any) -> None:
        d = b.sub(distance, c(1))
        ones = Variable(b, b.lshr(d, rice))
        with repeat_while(b, lambda: b.icmp_unsigned(">=", ones.get(), c(16))):
            writer.put(c((1 << 16) - 1), c(16))
            ones.set(b.sub(ones.get(), c(16)))
        few, low = ones.get(), b.and_(d, ones_below(b, rice))
        code = b.or_(ones_below(b, few), b.shl(low, b.add(few, c(1))))
        writer.put(code, b.add(b.add(few, c(1)), rice))

    writer.distances(positions, count, one)
    return writer.close()


def _read_golomb(b: Builder, reader: Reader, count: Any, n: Any, positions: Any) -> None:
    before, rice = Variable(b, c(-1)), Variable(b, c(0))
    reader.require(b.icmp_signed(">=", reader.length, c(1)))
    with b.if_then(reader.good.get()):
        rice.set(b.zext(b.load(reader.data, typ=I8), I64))
    reader.require(b.icmp_signed("<=", rice.get(), c(MOST_BITS)))
    reader.bit.set(c(8))
    with loop(b, count) as j, b.if_then(reader.good.get()):
        ones = Variable(b, c(0))
        word = Variable(b, reader.word(reader.bit.get()))
        fits = _nextones_below(b, word, ones, rice)
        with b.if_then(b.not_(fits), likely=False):
            _moreones_below(b, reader, word, ones)
        bits = b.add(b.add(ones.get(), c(1)), rice.get())
        rest = b.and_(word.get(), ones_below(b, rice.get()))
        reader.skip(bits)
        whole = b.shl(ones.get(), rice.get())
        reader.require(b.icmp_signed("<", ones.get(), b.add(b.lshr(n, rice.get()), c(1))))
        before.set(b.add(b.add(before.get(), whole), b.add(rest, c(1))))
        reader.require(b.icmp_signed("<", before.get(), n))
        b.put(b.trunc(before.get(), I32), positions, j)


def _nextones_below(b: Builder, word: Variable, ones: Variable, rice: Variable) -> Any:
    """The word's leading ones, put into `ones`; true if the word holds the whole code. Shifts the
    ones out of the word."""
    ones.set(b.cttz(b.not_(word.get()), number(I1, 0)))
    bits = b.add(b.add(ones.get(), c(1)), rice.get())
    fits = b.icmp_unsigned("<=", bits, c(WORD))
    by = b.select(fits, b.add(ones.get(), c(1)), c(0))
    word.set(b.lshr(word.get(), by))
    return fits


def _moreones_below(b: Builder, reader: Reader, word: Variable, ones: Variable) -> None:
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


CODE = Code("golomb", _write_golomb, _read_golomb)
