"""Positions as LEB128 gaps (see Gaps in ir/storage.py): functions that kernels call.

Positions are int32, with -1 before the first. Sixteen gaps below 128 are as many bytes, which are
one vector; gaps of one or two bytes are written and read without a branch on which it is.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from compll.backends.cpu.builder import I1, I8, I16, I32, I64, PTR, Builder, at, loop, number

CHUNK = 16
BYTES, WORDS = ir.VectorType(I8, CHUNK), ir.VectorType(I32, CHUNK)


def store(helpers: Any) -> Any:
    """store_gaps(positions, count, n, out): the address behind the last gap, as int64."""
    return helpers.get("store_gaps", I64, [PTR, I64, I64, PTR], _store)


def load(helpers: Any) -> Any:
    """load_gaps(data, end, count, n, positions): 1 if they are exactly `count` gaps, else 0.

    positions: where they go; what is read ends at `end`, and what is there is checked.
    """
    return helpers.get("load_gaps", I64, [PTR, PTR, I64, I64, PTR], _load)


def _small(b: Builder, gaps: Any) -> Any:
    """Whether all of some gaps are below 128."""
    found = b.intrinsic("vector.reduce.or", gaps)
    return b.icmp_unsigned("<", found, number(I32, 128))


def _store(b: Builder, positions: Any, count: Any, n: Any, out: Any) -> Any:
    end = b.room(I64)
    b.store(b.ptrtoint(out, I64), end)
    with loop(b, count, CHUNK) as j:
        here = at(b, positions, b.mul(j, number(I64, 4)))
        now = b.load(here, typ=WORDS, align=1)
        before = b.load(at(b, here, number(I64, -4)), typ=WORDS, align=1)
        gaps = b.sub(b.sub(now, before), ir.Constant(WORDS, [1] * CHUNK))
        whole = b.icmp_signed("<=", b.add(j, number(I64, CHUNK)), count)
        with b.if_else(b.and_(whole, _small(b, gaps))) as (then, otherwise):
            with then:
                place = b.load(end, typ=I64)
                b.store(b.trunc(gaps, BYTES), b.inttoptr(place, PTR), align=1)
                b.store(b.add(place, number(I64, CHUNK)), end)
            with otherwise:
                stop = b.add(j, number(I64, CHUNK))
                stop = b.select(whole, stop, count)
                with loop(b, stop, 1, j) as i:
                    _store_one(
                        b, positions, i, end, b.icmp_signed("<", i, b.sub(count, number(I64, 1)))
                    )
    return b.load(end, typ=I64)


def _store_one(b: Builder, positions: Any, i: Any, end: Any, more: Any) -> None:
    """One gap; two bytes are written of a short one, where more follow."""
    here = at(b, positions, b.mul(i, number(I64, 4)))
    before = b.load(at(b, here, number(I64, -4)), typ=I32)
    gap = b.sub(b.sub(b.load(here, typ=I32), before), number(I32, 1))
    place = b.load(end, typ=I64)
    short = b.and_(b.icmp_unsigned("<", gap, number(I32, 1 << 14)), more)
    with b.if_else(short) as (then, otherwise):
        with then:
            high = b.lshr(gap, number(I32, 7))
            two = b.zext(b.icmp_unsigned("!=", high, number(I32, 0)), I32)
            low = b.or_(b.and_(gap, number(I32, 127)), b.shl(two, number(I32, 7)))
            both = b.or_(low, b.shl(high, number(I32, 8)))
            b.store(b.trunc(both, I16), b.inttoptr(place, PTR), align=1)
            b.store(b.add(place, b.add(b.zext(two, I64), number(I64, 1))), end)
        with otherwise:
            left = b.room(I32)
            b.store(gap, left)
            with _while(b) as (go, leave):
                now, to = b.load(left, typ=I32), b.load(end, typ=I64)
                rest = b.lshr(now, number(I32, 7))
                follows = b.icmp_unsigned("!=", rest, number(I32, 0))
                flag = b.select(follows, number(I32, 128), number(I32, 0))
                byte = b.or_(b.and_(now, number(I32, 127)), flag)
                b.store(b.trunc(byte, I8), b.inttoptr(to, PTR))
                b.store(b.add(to, number(I64, 1)), end)
                b.store(rest, left)
                b.cbranch(follows, go, leave)
            b.position_at_end(leave)


class _while:
    """A loop whose body ends with a branch to its beginning or behind it."""

    def __init__(self, b: Builder) -> None:
        self.b = b

    def __enter__(self) -> tuple[Any, Any]:
        go, leave = (self.b.append_basic_block(name) for name in ("again", "done"))
        self.b.branch(go)
        self.b.position_at_end(go)
        return go, leave

    def __exit__(self, *error: object) -> None:
        return None


def _load(b: Builder, data: Any, stop: Any, count: Any, n: Any, positions: Any) -> Any:
    """Gap after gap until the count or the bytes are spent."""
    place, before, good = b.room(I64), b.room(I64), b.room(I1)
    stop = b.ptrtoint(stop, I64)
    b.store(b.ptrtoint(data, I64), place)
    b.store(number(I64, -1), before)
    b.store(number(I1, 1), good)
    with loop(b, count, CHUNK) as j:
        here = at(b, positions, b.mul(j, number(I64, 4)))
        now = b.load(place, typ=I64)
        whole = b.icmp_signed("<=", b.add(j, number(I64, CHUNK)), count)
        inside = b.icmp_unsigned("<=", b.add(now, number(I64, CHUNK)), stop)
        single = b.room(I1)
        b.store(number(I1, 0), single)
        with b.if_then(b.and_(whole, inside)):
            read = b.load(b.inttoptr(now, PTR), typ=BYTES, align=1)
            b.store(_small(b, b.zext(read, WORDS)), single)
        with b.if_else(b.load(single, typ=I1)) as (then, otherwise):
            with then:
                read = b.zext(b.load(b.inttoptr(now, PTR), typ=BYTES, align=1), WORDS)
                sums = _running(b, b.add(read, ir.Constant(WORDS, [1] * CHUNK)))
                last = b.load(before, typ=I64)
                b.store(b.add(sums, b.splat(b.trunc(last, I32), CHUNK)), here, align=1)
                total = b.zext(b.extract_element(sums, number(I32, CHUNK - 1)), I64)
                b.store(b.add(last, total), before)
                b.store(b.add(now, number(I64, CHUNK)), place)
            with otherwise:
                upto = b.select(whole, b.add(j, number(I64, CHUNK)), count)
                with loop(b, upto, 1, j) as i:
                    _load_one(b, place, stop, before, good, n)
                    last = b.trunc(b.load(before, typ=I64), I32)
                    b.store(last, at(b, positions, b.mul(i, number(I64, 4))))
        within = b.icmp_signed("<", b.load(before, typ=I64), n)
        b.store(b.and_(b.load(good, typ=I1), within), good)
    spent = b.icmp_unsigned("==", b.load(place, typ=I64), stop)
    return b.zext(b.and_(b.load(good, typ=I1), spent), I64)


def _running(b: Builder, x: Any) -> Any:
    """Sums of the lanes up to each."""
    zero = ir.Constant(WORDS, [0] * CHUNK)
    for by in (1, 2, 4, 8):
        moved = [CHUNK + lane if lane < by else lane - by for lane in range(CHUNK)]
        x = b.add(x, b.shuffle_vector(x, zero, ir.Constant(WORDS, moved)))
    return x


def _load_one(b: Builder, place: Any, stop: Any, before: Any, good: Any, n: Any) -> None:
    """A gap; `good` becomes false where it is overlong or the bytes end, and nothing is read."""
    now = b.load(place, typ=I64)
    two = b.icmp_unsigned("<=", b.add(now, number(I64, 2)), stop)
    both = b.room(I32)
    b.store(number(I32, 0x8080), both)
    with b.if_then(two, likely=True):
        b.store(b.zext(b.load(b.inttoptr(now, PTR), typ=I16, align=1), I32), both)
    word = b.load(both, typ=I32)
    mask = number(I32, 0x8080)
    with b.if_else(b.icmp_unsigned("==", b.and_(word, mask), mask)) as (long, short):
        with short:
            more = b.and_(b.lshr(word, number(I32, 7)), number(I32, 1))
            high = b.mul(b.lshr(word, number(I32, 8)), more)
            gap = b.or_(b.and_(word, number(I32, 127)), b.shl(high, number(I32, 7)))
            over = b.and_(b.trunc(more, I1), b.icmp_unsigned("==", high, number(I32, 0)))
            _moved(b, place, before, b.add(now, b.zext(b.add(more, number(I32, 1)), I64)), gap)
            b.store(b.and_(b.load(good, typ=I1), b.not_(over)), good)
        with long:
            _load_long(b, place, stop, before, good)


def _moved(b: Builder, place: Any, before: Any, to: Any, gap: Any) -> None:
    wide = gap if gap.type == I64 else b.zext(gap, I64)
    b.store(b.add(b.add(b.load(before, typ=I64), wide), number(I64, 1)), before)
    b.store(to, place)


def _load_long(b: Builder, place: Any, stop: Any, before: Any, good: Any) -> None:
    """Byte after byte, at most six."""
    found, shift, to = b.room(I64), b.room(I64), b.room(I64)
    b.store(number(I64, 0), found)
    b.store(number(I64, 0), shift)
    b.store(b.load(place, typ=I64), to)
    bad, end = b.append_basic_block("bad"), b.append_basic_block("end")
    go, read = b.append_basic_block("go"), b.append_basic_block("read")
    b.branch(go)
    b.position_at_end(go)
    now, by = b.load(to, typ=I64), b.load(shift, typ=I64)
    left = b.icmp_unsigned("<", now, stop)
    b.cbranch(b.and_(left, b.icmp_unsigned("<=", by, number(I64, 35))), read, bad)
    b.position_at_end(read)
    byte = b.zext(b.load(b.inttoptr(now, PTR), typ=I8), I64)
    b.store(b.or_(b.load(found, typ=I64), b.shl(b.and_(byte, number(I64, 127)), by)), found)
    b.store(b.add(by, number(I64, 7)), shift)
    b.store(b.add(now, number(I64, 1)), to)
    last = b.append_basic_block("last")
    b.cbranch(b.icmp_unsigned(">=", byte, number(I64, 128)), go, last)
    b.position_at_end(last)
    empty = b.icmp_unsigned("==", byte, number(I64, 0))
    overlong = b.and_(empty, b.icmp_unsigned(">", by, number(I64, 0)))
    b.store(b.and_(b.load(good, typ=I1), b.not_(overlong)), good)
    _moved(b, place, before, b.load(to, typ=I64), b.load(found, typ=I64))
    b.branch(end)
    b.position_at_end(bad)
    b.store(number(I1, 0), good)
    b.branch(end)
    b.position_at_end(end)
