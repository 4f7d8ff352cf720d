"""Routines of payload fields: those of varying length are stored and loaded, positions checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from compll.backends.cpu import huffman
from compll.backends.cpu.builder import (
    I1,
    I8,
    I16,
    I32,
    I64,
    PTR,
    Builder,
    Cursor,
    Variable,
    at,
    c,
    loop,
    number,
    repeat_while,
    routine,
)
from compll.backends.cpu.printer import Printer
from compll.ir.tile import Array, Call

# ---- gap stream ---------------------------------------------------------------------------------
# Positions as LEB128 gaps (see Gaps in ir/storage.py): functions that kernels call.
# Positions are int32, with -1 before the first. Sixteen gaps below 128 are sixteen bytes, one
# vector; gaps of one or two bytes are written and read without a branch on their length.

CHUNK = 16
BYTES, WORDS = ir.VectorType(I8, CHUNK), ir.VectorType(I32, CHUNK)
ONE_EACH = ir.Constant(WORDS, [1] * CHUNK)


def _small(b: Builder, gaps: ir.Value) -> ir.Value:
    """True if all gaps are below 128."""
    result = b.intrinsic("vector.reduce.or", gaps)
    return b.icmp_unsigned("<", result, number(I32, 128))


@routine(I64, PTR, I64, I64, PTR)
def store_gaps(
    b: Builder, positions: ir.Value, count: ir.Value, n: ir.Value, out: ir.Value
) -> ir.Value:
    """The address behind the last gap, as int64."""
    end = Cursor(b, out)
    with loop(b, count, CHUNK) as j:
        before = b.get(positions, I32, b.sub(j, c(1)), CHUNK)
        gaps = b.sub(b.sub(b.get(positions, I32, j, CHUNK), before), ONE_EACH)
        whole = b.icmp_signed("<=", b.add(j, c(CHUNK)), count)
        with b.if_else(b.and_(whole, _small(b, gaps))) as (then, otherwise):
            with then:
                end.store(b.trunc(gaps, BYTES))
                end.advance(c(CHUNK))
            with otherwise:
                stop = b.select(whole, b.add(j, c(CHUNK)), count)
                with loop(b, stop, 1, j) as i:
                    _store_one(b, positions, i, end, b.icmp_signed("<", i, b.sub(count, c(1))))
    return end.get()


def _store_one(b: Builder, positions: ir.Value, i: ir.Value, end: Cursor, more: ir.Value) -> None:
    """Store a gap. If more follow, a short gap is written as two bytes, the second of which may be
    overwritten."""
    before = b.get(positions, I32, b.sub(i, c(1)))
    gap = b.sub(b.sub(b.get(positions, I32, i), before), number(I32, 1))
    short = b.and_(b.icmp_unsigned("<", gap, number(I32, 1 << 14)), more)
    with b.if_else(short) as (then, otherwise):
        with then:
            high = b.lshr(gap, number(I32, 7))
            two = b.zext(b.icmp_unsigned("!=", high, number(I32, 0)), I32)
            low = b.or_(b.and_(gap, number(I32, 127)), b.shl(two, number(I32, 7)))
            both = b.or_(low, b.shl(high, number(I32, 8)))
            end.store(b.trunc(both, I16))
            end.advance(b.add(b.zext(two, I64), c(1)))
        with otherwise:
            left = Variable(b, gap)
            with repeat_while(b, lambda: b.icmp_unsigned(">=", left.get(), number(I32, 128))):
                end.store(b.trunc(b.or_(left.get(), number(I32, 128)), I8))
                end.advance(c(1))
                left.set(b.lshr(left.get(), number(I32, 7)))
            end.store(b.trunc(left.get(), I8))
            end.advance(c(1))


@routine(I64, PTR, PTR, I64, I64, PTR)
def load_gaps(
    b: Builder, data: ir.Value, stop: ir.Value, count: ir.Value, n: ir.Value, positions: ir.Value
) -> ir.Value:
    """1 if the bytes up to `stop` are exactly `count` gaps, else 0. Fills positions, and checks all
    that it reads."""
    stop = b.ptrtoint(stop, I64)
    place, before = Cursor(b, data), Variable(b, c(-1))
    good, single = Variable(b, number(I1, 1)), Variable(b, number(I1, 0))
    with loop(b, count, CHUNK) as j:
        now = place.get()
        whole = b.icmp_signed("<=", b.add(j, c(CHUNK)), count)
        inside = b.icmp_unsigned("<=", b.add(now, c(CHUNK)), stop)
        single.set(number(I1, 0))
        with b.if_then(b.and_(whole, inside)):
            read = place.load(BYTES)
            single.set(_small(b, b.zext(read, WORDS)))
        with b.if_else(single.get()) as (then, otherwise):
            with then:
                read = b.zext(place.load(BYTES), WORDS)
                sums, last = _running(b, b.add(read, ONE_EACH)), before.get()
                b.put(b.add(sums, b.splat(b.trunc(last, I32), CHUNK)), positions, j)
                total = b.zext(b.extract_element(sums, number(I32, CHUNK - 1)), I64)
                before.set(b.add(last, total))
                place.advance(c(CHUNK))
            with otherwise:
                upto = b.select(whole, b.add(j, c(CHUNK)), count)
                with loop(b, upto, 1, j) as i:
                    _load_one(b, place, stop, before, good)
                    b.put(b.trunc(before.get(), I32), positions, i)
        good.set(b.and_(good.get(), b.icmp_signed("<", before.get(), n)))
    spent = b.icmp_unsigned("==", place.get(), stop)
    return b.zext(b.and_(good.get(), spent), I64)


def _running(b: Builder, x: ir.Value) -> ir.Value:
    """Running sums of the lanes."""
    zero = ir.Constant(WORDS, [0] * CHUNK)
    for by in (1, 2, 4, 8):
        moved = [CHUNK + lane if lane < by else lane - by for lane in range(CHUNK)]
        x = b.add(x, b.shuffle_vector(x, zero, ir.Constant(WORDS, moved)))
    return x


def _load_one(b: Builder, place: Cursor, stop: ir.Value, before: Variable, good: Variable) -> None:
    """Load a gap. If it is overlong or the bytes end, `good` becomes false and nothing is
    loaded."""
    now, both = place.get(), Variable(b, number(I32, 0x8080))
    with b.if_then(b.icmp_unsigned("<=", b.add(now, c(2)), stop), likely=True):
        both.set(b.zext(place.load(I16), I32))
    word, mask = both.get(), number(I32, 0x8080)
    with b.if_else(b.icmp_unsigned("==", b.and_(word, mask), mask)) as (long, short):
        with short:
            more = b.and_(b.lshr(word, number(I32, 7)), number(I32, 1))
            high = b.mul(b.lshr(word, number(I32, 8)), more)
            gap = b.or_(b.and_(word, number(I32, 127)), b.shl(high, number(I32, 7)))
            over = b.and_(b.trunc(more, I1), b.icmp_unsigned("==", high, number(I32, 0)))
            before.set(b.add(b.add(before.get(), b.zext(gap, I64)), c(1)))
            place.advance(b.zext(b.add(more, number(I32, 1)), I64))
            good.set(b.and_(good.get(), b.not_(over)))
        with long:
            _load_long(b, place, stop, before, good)


def _load_long(b: Builder, place: Cursor, stop: ir.Value, before: Variable, good: Variable) -> None:
    """Load a gap byte after byte, at most six."""
    result, shift = Variable(b, c(0)), Variable(b, c(0))
    to = Cursor(b, b.inttoptr(place.get(), PTR))
    byte = Variable(b, c(128))

    def goes_on() -> ir.Value:
        within = b.and_(
            b.icmp_unsigned("<", to.get(), stop), b.icmp_unsigned("<=", shift.get(), c(35))
        )
        return b.and_(b.icmp_unsigned(">=", byte.get(), c(128)), within)

    with repeat_while(b, goes_on):
        byte.set(b.zext(to.load(I8), I64))
        result.set(b.or_(result.get(), b.shl(b.and_(byte.get(), c(127)), shift.get())))
        shift.set(b.add(shift.get(), c(7)))
        to.advance(c(1))
    ends = b.icmp_unsigned("<", byte.get(), c(128))
    empty = b.and_(b.icmp_unsigned("==", byte.get(), c(0)), b.icmp_unsigned(">", shift.get(), c(7)))
    good.set(b.and_(good.get(), b.and_(ends, b.not_(empty))))
    with b.if_then(ends):
        before.set(b.add(b.add(before.get(), result.get()), c(1)))
        place.set(to.get())


# ---- golomb stream ------------------------------------------------------------------------------
# Positions as Golomb-Rice codes: see [Note: bit streams] in reference/bitstreams.py for the
# codes, and store_gaps and load_gaps for arguments and results.
# A writer collects bits in a word and stores the word with every code. A reader looks at the
# WORD bits that eight bytes hold after the first bit, which may be any bit of the first byte.
# With the parameter 0, the bits are a bitmap of elements that are not selected.

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
        b, result = self.b, Variable(self.b, c(0))
        first = b.lshr(bit, c(3))
        inside = b.icmp_signed("<=", b.add(first, c(8)), self.length)
        with b.if_else(inside, likely=True) as (then, otherwise):
            with then:
                result.set(b.load(at(b, self.data, first), typ=I64, align=1))
            with otherwise:
                result.set(last_word(b, self.data, first, self.length))
        return b.lshr(result.get(), b.and_(bit, c(7)))

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
    result = Variable(b, c(0))
    with loop(b, length, 1, first) as i:
        byte = b.zext(b.load(at(b, data, i), typ=I8), I64)
        result.set(b.or_(result.get(), b.shl(byte, b.mul(b.sub(i, first), c(8)))))
    return result.get()


def _parameter(b: Builder, count: ir.Value, n: ir.Value) -> ir.Value:
    """The Rice parameter: see storage.rice_parameter."""
    some = b.select(b.icmp_signed(">", count, c(1)), count, c(1))
    mean = b.udiv(b.mul(n, c(9624)), b.mul(some, c(10000)))
    return b.select(b.icmp_signed(">", mean, c(1)), log2(b, b.or_(mean, c(1))), c(0))


@routine(I64, PTR, I64, I64, PTR)
def store_golomb(
    b: Builder, positions: ir.Value, count: ir.Value, n: ir.Value, out: ir.Value
) -> ir.Value:
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
def load_golomb(
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
        result = b.cttz(b.not_(reader.word(bit.get())), number(I1, 0))
        alike.set(b.select(b.icmp_unsigned("<", result, c(WORD)), result, c(WORD)))
        bit.set(b.add(bit.get(), alike.get()))
        past = b.icmp_signed(">=", bit.get(), reader.end)
        alike.set(b.select(past, c(0), alike.get()))
    ones.set(b.sub(bit.get(), reader.bit.get()))
    reader.require(b.icmp_signed("<", bit.get(), reader.end))
    with b.if_then(reader.good.get()):
        word.set(reader.word(b.add(bit.get(), c(1))))


# ---- run stream ---------------------------------------------------------------------------------
# Runs of bytes of ones, shortened: [Note: trits] in reference/bitstreams.py.
# Arguments and results are those of store_gaps and load_gaps; here `count` counts bytes.

BYTE_OF_ONES, FIRST, LONGEST = 121, 243, 14


@routine(I64, PTR, I64, I64, PTR)
def store_runs(b: Builder, data: ir.Value, count: ir.Value, n: ir.Value, out: ir.Value) -> ir.Value:
    """Shorten `count` bytes of trits; the address behind them."""
    end, run = Cursor(b, out), Variable(b, c(0))
    few = b.and_(b.sub(count, c(2 * CHUNK)), c(-CHUNK))  # only the last is written past its end
    few = b.select(b.icmp_signed(">", few, c(0)), few, c(0))
    with loop(b, few, CHUNK) as i:
        _store_chunk(b, at(b, data, i), end, run)
    with loop(b, count, 1, few) as i:
        _store_byte(b, b.load(at(b, data, i), typ=I8), end, run)
    some = b.zext(b.icmp_unsigned("!=", run.get(), c(0)), I64)
    return b.add(end.get(), some)


def _code(b: Builder, run: ir.Value) -> ir.Value:
    """The byte that stands for a run of `run` bytes of ones."""
    longer = b.add(b.trunc(run, I8), number(I8, FIRST - 2))
    return b.select(b.icmp_unsigned("==", run, c(1)), number(I8, BYTE_OF_ONES), longer)


def _store_byte(b: Builder, byte: ir.Value, end: Cursor, run: Variable) -> None:
    """Store a byte without a branch: the byte for the run so far is written, and overwritten as the
    run grows."""
    is_one = b.icmp_unsigned("==", byte, number(I8, BYTE_OF_ONES))
    before, longer = run.get(), b.add(run.get(), c(1))
    some = b.zext(b.icmp_unsigned("!=", before, c(0)), I64)
    end.advance(b.select(is_one, c(0), some))
    end.store(b.select(is_one, _code(b, longer), byte))
    full = b.icmp_unsigned("==", longer, c(LONGEST))
    done = b.or_(b.not_(is_one), full)
    end.advance(b.zext(done, I64))
    run.set(b.select(done, c(0), longer))


def _store_chunk(b: Builder, place: ir.Value, end: Cursor, run: Variable) -> None:
    """Store CHUNK bytes. Only those that are not ones are handled one by one."""
    bytes_ = b.load(place, typ=ir.VectorType(I8, CHUNK), align=1)
    others = b.icmp_unsigned("!=", bytes_, ir.Constant(bytes_.type, [BYTE_OF_ONES] * CHUNK))
    left = Variable(b, b.zext(b.bitcast(others, ir.IntType(CHUNK)), I64))
    first = Variable(b, c(0))
    with repeat_while(b, lambda: b.icmp_unsigned("!=", left.get(), c(0))):
        here = b.cttz(left.get(), number(I1, 1))
        left.set(b.and_(left.get(), b.sub(left.get(), c(1))))
        run.set(b.add(run.get(), b.sub(here, first.get())))
        _end_runs(b, end, run)
        rest = run.get()
        end.store(_code(b, rest))
        end.advance(b.zext(b.icmp_unsigned("!=", rest, c(0)), I64))
        end.store(b.load(at(b, place, here), typ=I8))
        end.advance(c(1))
        run.set(c(0))
        first.set(b.add(here, c(1)))
    run.set(b.add(run.get(), b.sub(c(CHUNK), first.get())))
    _end_runs(b, end, run)
    end.store(_code(b, run.get()))


def _end_runs(b: Builder, end: Cursor, run: Variable) -> None:
    """Write the bytes for complete runs of the longest length, at most two."""
    end.store(number(I16, 0xFFFF))
    full = b.zext(b.icmp_unsigned(">=", run.get(), c(LONGEST)), I64)
    full = b.add(full, b.zext(b.icmp_unsigned(">=", run.get(), c(2 * LONGEST)), I64))
    end.advance(full)
    run.set(b.sub(run.get(), b.mul(full, c(LONGEST))))


@routine(I64, PTR, PTR, I64, I64, PTR)
def load_runs(
    b: Builder, data: ir.Value, stop: ir.Value, count: ir.Value, n: ir.Value, out: ir.Value
) -> ir.Value:
    """1 if the data up to `stop` stand for `count` bytes of trits, else 0."""
    length = b.sub(b.ptrtoint(stop, I64), b.ptrtoint(data, I64))
    done = Variable(b, c(0))
    too_many = b.add(count, c(1))
    with loop(b, length) as i:
        byte, to = b.load(at(b, data, i), typ=I8), done.get()
        is_run = b.icmp_unsigned(">=", byte, number(I8, FIRST))
        run = b.sub(b.zext(byte, I64), c(FIRST - 2))
        # a byte is written as a whole vector; the next one overwrites the surplus
        b.store(
            b.splat(b.select(is_run, number(I8, BYTE_OF_ONES), byte), CHUNK),
            at(b, out, to),
            align=1,
        )
        to = b.add(to, b.select(is_run, run, c(1)))
        done.set(b.select(b.icmp_unsigned("<", to, too_many), to, too_many))
    return b.zext(b.icmp_unsigned("==", done.get(), count), I64)


# ---- streams ------------------------------------------------------------------------------------


class Coder(NamedTuple):
    """Functions that store values of varying length, and load them."""

    store: Callable[..., ir.Value]
    load: Callable[..., ir.Value]


#: routines that store and load fields of varying length
STREAMS = {
    "gaps": Coder(store_gaps, load_gaps),
    "golomb": Coder(store_golomb, load_golomb),
    "runs": Coder(store_runs, load_runs),
    "huffman": Coder(huffman.store, huffman.load),
}


def stream(printer: Printer, call: Call) -> ir.Value | None:
    """Store values of varying length in the payload, or load them from it. In a check: true if they
    are as they should be; None in other kernels."""
    b, f, coder = printer.b, call.attr, STREAMS[call.routine]
    values = call.made[0] if printer.kernel.decodes else call.views[0].value.attr
    array, count = printer.pointers[values], printer.items(values.domain)
    if f.layout.recoded:  # counted in bytes, not in positions
        count = printer.value(printer.kernel.sizes[values])
    among = c(f.bits) if f.storage == "huffman" else printer.among(f.of)
    b.store(number(I32, -1), at(b, array, c(-4)))
    if not printer.kernel.decodes:
        out = printer.pointers[call.made[0]]
        end = coder.store(b, array, count, among, out)
        printer.sizes["length", f.name] = b.sub(end, b.ptrtoint(out, I64))
        printer.fields()
        return None
    data = printer.pointers[Array.of(f, "incoming")]
    length = printer.value(printer.kernel.sizes[Array.of(f, "incoming")])
    given = [data, at(b, data, length), count, among, array]
    if printer.kernel.kind == "check":
        return b.icmp_signed("!=", coder.load(b, *given), c(0))
    with b.if_then(b.icmp_signed("!=", printer.given["rows"], c(1))):
        coder.load(b, *given)  # check loaded them for a single piece
    return None


def ascending(printer: Printer, call: Call) -> ir.Value:
    """True if positions ascend within the tensor."""
    f = call.attr
    place = printer.pointers[Array.of(f, "incoming")]
    result = _ascending(printer.b, place, printer.kept(f.of), printer.among(f.of))
    return printer.b.icmp_signed("!=", result, c(0))


@routine(I64, PTR, I64, I64)
def _ascending(b: Builder, positions: ir.Value, count: ir.Value, n: ir.Value) -> ir.Value:
    """1 if each position is above the one before and below n, else 0."""
    before, good = Variable(b, c(-1)), Variable(b, c(1))
    with loop(b, count) as i:
        place = at(b, positions, b.mul(i, c(4)))
        position = b.zext(b.load(place, typ=I32, align=1), I64)
        above = b.icmp_signed(">", position, before.get())
        good.set(b.and_(good.get(), b.zext(above, I64)))
        before.set(position)
    return b.and_(good.get(), b.zext(b.icmp_signed("<", before.get(), n), I64))


ROUTINES: dict[str, Callable[[Printer, Call], ir.Value | None]] = {
    **dict.fromkeys(STREAMS, stream), "ascending": ascending,
}  # fmt: skip
