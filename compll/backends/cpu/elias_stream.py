"""Positions as Elias delta codes: see [Note: bit streams] in reference/bitstreams.py."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

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
    I32,
    I64,
    Builder,
    Variable,
    c,
    loop,
    number,
    repeat_while,
)

CHUNK = 16
WORDS = ir.VectorType(I32, CHUNK)
#: a table has the codes of integers below SMALL; bits from BITS_AT on hold a code's length
SMALL, BITS_AT = 256, 24


def _elias(v: int) -> int:
    """The code of a positive integer; bits from BITS_AT on hold its length."""
    low = v.bit_length() - 1
    m = (low + 1).bit_length() - 1
    code = 1 << m | (low + 1 - (1 << m)) << (m + 1) | (v - (1 << low)) << (2 * m + 1)
    return code | (2 * m + 1 + low) << BITS_AT


def _small_codes(b: Builder) -> Any:
    """A table of the codes of integers below SMALL."""
    known = b.module.globals.get("elias_codes")
    if known is None:
        kind = ir.ArrayType(I32, SMALL)
        known = ir.GlobalVariable(b.module, kind, "elias_codes")
        known.initializer = ir.Constant(kind, [0, *map(_elias, range(1, SMALL))])
        known.linkage, known.global_constant = "internal", True
    return known


def _write_elias(b: Builder, positions: Any, count: Any, n: Any, out: Any) -> Any:
    writer, codes = Writer(b, out), _small_codes(b)

    def one(distance: Any) -> None:
        with b.if_else(b.icmp_unsigned("<", distance, c(SMALL)), likely=True) as (few, many):
            with few:
                known = b.zext(b.get(codes, I32, distance), I64)
                writer.put(b.and_(known, ones_below(b, c(BITS_AT))), b.lshr(known, c(BITS_AT)))
            with many:
                writer.put(*_code(b, distance))

    writer.distances(positions, count, one)
    return writer.close()


def _code(b: Builder, distance: Any) -> tuple[Any, Any]:
    """The code of a value, and its length."""
    low = log2(b, distance)
    more = b.add(low, c(1))
    m = log2(b, more)
    twice = b.add(b.add(m, m), c(1))
    code = b.or_(b.shl(c(1), m), b.shl(b.sub(more, b.shl(c(1), m)), b.add(m, c(1))))
    rest = b.shl(b.sub(distance, b.shl(c(1), low)), twice)
    return b.or_(code, rest), b.add(twice, low)


def _read_elias(b: Builder, reader: Reader, count: Any, n: Any, positions: Any) -> None:
    """Read all positions. Neighbours take a bit each: a run of them is read at once."""
    before, done = Variable(b, c(-1)), Variable(b, c(0))

    def left() -> Any:
        more = b.icmp_signed("<", done.get(), count)
        return b.and_(reader.good.get(), more)

    with repeat_while(b, left):
        word = reader.word(reader.bit.get())
        alike = b.cttz(b.not_(word), number(I1, 0))
        for most in (c(WORD), b.sub(count, done.get())):
            alike = b.select(b.icmp_signed("<", alike, most), alike, most)
        reader.skip(alike)
        reader.require(b.icmp_signed("<", b.add(before.get(), alike), n))
        with b.if_then(reader.good.get()):
            _neighbours(b, positions, done.get(), before.get(), alike)
        done.set(b.add(done.get(), alike))
        before.set(b.add(before.get(), alike))
        with b.if_then(left()):
            _read_distance(b, reader, b.lshr(word, alike), alike, before, done, n)
            last = b.sub(done.get(), c(1))
            with b.if_then(b.icmp_signed(">=", last, c(0))):
                b.put(b.trunc(before.get(), I32), positions, last)


def _neighbours(b: Builder, positions: Any, done: Any, before: Any, count: Any) -> None:
    """Write positions that follow each other; writes whole vectors."""
    first = b.trunc(b.add(before, c(1)), I32)
    steps = b.add(b.splat(first, CHUNK), ir.Constant(WORDS, list(range(CHUNK))))
    with loop(b, count, CHUNK) as i:
        own = b.add(steps, b.splat(b.trunc(i, I32), CHUNK))
        b.put(own, positions, b.add(done, i))


def _read_distance(
    b: Builder, reader: Reader, word: Any, used: Any, before: Variable, done: Variable, n: Any
) -> None:
    """Read a distance. If the rest of the word may be too short, read nothing, unless the word is
    fresh."""
    m = b.cttz(word, number(I1, 0))
    inside = b.icmp_unsigned("<=", m, c(5))
    m = b.select(inside, m, c(0))
    low = b.and_(b.lshr(word, b.add(m, c(1))), ones_below(b, m))
    low = b.sub(b.add(low, b.shl(c(1), m)), c(1))
    twice = b.add(b.add(m, m), c(1))
    bits = b.add(twice, low)
    fits = b.and_(inside, b.icmp_unsigned("<=", b.add(used, bits), c(WORD)))
    again = b.and_(b.not_(fits), b.icmp_unsigned("!=", used, c(0)))
    with b.if_then(b.not_(again)):
        reader.require(inside)
        reader.require(b.icmp_unsigned("<=", low, c(MOST_BITS)))
        reader.skip(bits)
        rest = b.and_(b.lshr(word, twice), ones_below(b, low))
        before.set(b.add(before.get(), b.add(b.shl(c(1), low), rest)))
        reader.require(b.icmp_signed("<", before.get(), n))
        done.set(b.add(done.get(), c(1)))


CODE = Code("elias", _write_elias, _read_elias)
