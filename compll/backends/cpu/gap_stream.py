"""Positions as LEB128 gaps (see Gaps in ir/storage.py): functions that kernels call.

Positions are int32, with -1 before the first. Sixteen gaps below 128 are sixteen bytes, one vector;
gaps of one or two bytes are written and read without a branch on their length.
"""

from __future__ import annotations

from llvmlite import ir

from compll.backends.cpu.builder import Builder, Cursor, Variable, loop, repeat_while, routine
from compll.backends.cpu.types import I1, I8, I16, I32, I64, PTR, c, number

CHUNK = 16
BYTES, WORDS = ir.VectorType(I8, CHUNK), ir.VectorType(I32, CHUNK)
ONES = ir.Constant(WORDS, [1] * CHUNK)


def _small(b: Builder, gaps: ir.Value) -> ir.Value:
    """True if all gaps are below 128."""
    found = b.intrinsic("vector.reduce.or", gaps)
    return b.icmp_unsigned("<", found, number(I32, 128))


@routine(I64, PTR, I64, I64, PTR)
def store(b: Builder, positions: ir.Value, count: ir.Value, n: ir.Value, out: ir.Value) -> ir.Value:
    """The address behind the last gap, as int64."""
    end = Cursor(b, out)
    with loop(b, count, CHUNK) as j:
        before = b.get(positions, I32, b.sub(j, c(1)), CHUNK)
        gaps = b.sub(b.sub(b.get(positions, I32, j, CHUNK), before), ONES)
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
def load(
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
                sums, last = _running(b, b.add(read, ONES)), before.get()
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
    found, shift = Variable(b, c(0)), Variable(b, c(0))
    to = Cursor(b, b.inttoptr(place.get(), PTR))
    byte = Variable(b, c(128))

    def goes_on() -> ir.Value:
        within = b.and_(
            b.icmp_unsigned("<", to.get(), stop), b.icmp_unsigned("<=", shift.get(), c(35))
        )
        return b.and_(b.icmp_unsigned(">=", byte.get(), c(128)), within)

    with repeat_while(b, goes_on):
        byte.set(b.zext(to.load(I8), I64))
        found.set(b.or_(found.get(), b.shl(b.and_(byte.get(), c(127)), shift.get())))
        shift.set(b.add(shift.get(), c(7)))
        to.advance(c(1))
    ends = b.icmp_unsigned("<", byte.get(), c(128))
    empty = b.and_(b.icmp_unsigned("==", byte.get(), c(0)), b.icmp_unsigned(">", shift.get(), c(7)))
    good.set(b.and_(good.get(), b.and_(ends, b.not_(empty))))
    with b.if_then(ends):
        before.set(b.add(b.add(before.get(), found.get()), c(1)))
        place.set(to.get())
