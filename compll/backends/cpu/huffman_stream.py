"""Numbers as Huffman codes: see [Note: huffman] in reference/huffman.py.

See gap_stream.py for arguments and results of these functions; here numbers are bytes, and `n` is
their bits. A tile's stream is written and read in memory of its own, which is as large as the
longest one: so words can be longer than what is left, and wrong streams stay within it.
"""

from __future__ import annotations

from llvmlite import ir

from compll.backends.cpu.builder import (
    Builder,
    Cursor,
    Routine,
    Variable,
    at,
    in_steps,
    loop,
    routine,
)
from compll.backends.cpu.huffman_codes import NUMBERS, lengths, windows
from compll.backends.cpu.types import I1, I8, I16, I64, PTR, c, number
from compll.ir.storage import HUFFMAN_LONGEST as LONGEST
from compll.ir.storage import HUFFMAN_TILE as TILE

#: codes that a word holds, and bytes of a stream's memory, with a word behind the longest one
AT_ONCE, ROOM = 4, TILE * LONGEST // 8 + 16
#: tiles that are read side by side, since each code of a tile waits for the one before
BESIDE = 4
#: windows of the table that are filled at once
LANES = 16


def _places(
    b: Builder, data: ir.Value, count: ir.Value, bits: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The number of tiles, and the addresses of their sizes and of their streams."""
    tiles = b.lshr(b.add(count, c(TILE - 1)), c(TILE.bit_length() - 1))
    sizes = at(b, data, b.lshr(b.shl(c(1), bits), c(1)))
    return tiles, sizes, at(b, sizes, b.mul(tiles, c(2)))


def _tile(b: Builder, count: ir.Value, t: ir.Value) -> tuple[ir.Value, ir.Value]:
    """A tile's first number, and how many it has."""
    first = b.mul(t, c(TILE))
    left = b.sub(count, first)
    return first, b.select(b.icmp_signed("<", left, c(TILE)), left, c(TILE))


@routine(I64, PTR, I64, I64, PTR)
def store(b: Builder, data: ir.Value, count: ir.Value, bits: ir.Value, out: ir.Value) -> ir.Value:
    """The address behind the field, as int64."""
    counts, found, codes = b.room(I64, NUMBERS), b.room(I64, NUMBERS), b.room(I64, NUMBERS)
    numbers = b.shl(c(1), bits)
    _count(b, data, count, numbers, counts)
    lengths(b, counts, bits, found)
    windows(b, found, numbers, codes)
    with loop(b, numbers, 2) as i:
        low, high = (b.add(b.get(found, I64, j), c(1)) for j in (i, b.add(i, c(1))))
        byte = b.trunc(b.or_(low, b.shl(high, c(4))), I8)
        b.store(byte, at(b, out, b.lshr(i, c(1))))
    with loop(b, numbers) as i:  # a code's length, and the code from bit 8 on
        length = b.get(found, I64, i)
        length = b.select(b.icmp_signed("<", length, c(0)), c(0), length)
        code = b.lshr(b.get(codes, I64, i), b.sub(c(LONGEST), length))
        b.put(b.or_(length, b.shl(code, c(8))), codes, i)
    tiles, sizes, streams = _places(b, out, count, bits)
    end, room = Cursor(b, streams), b.room(I8, ROOM)
    with loop(b, tiles) as t:
        first, own = _tile(b, count, t)
        size = _store_tile(b, at(b, data, first), own, codes, room)
        b.copy(b.inttoptr(end.get(), PTR), room, size)
        b.put(b.trunc(size, I16), sizes, t)
        end.advance(size)
    return end.get()


def _count(
    b: Builder, data: ir.Value, count: ir.Value, numbers: ir.Value, counts: ir.Value
) -> None:
    """Count each number, in turns, so that equal numbers in a row need not wait for one another."""
    turns = b.room(I64, AT_ONCE * NUMBERS)
    b.clear(turns, b.mul(numbers, c(AT_ONCE * 8)))
    for step, indices in in_steps(b, count, AT_ONCE, 1):
        with indices as i:
            for k in range(step):
                byte = b.zext(b.get(data, I8, b.add(i, c(k))), I64)
                place = b.add(b.mul(byte, c(AT_ONCE)), c(k))
                b.put(b.add(b.get(turns, I64, place), c(1)), turns, place)
    with loop(b, numbers) as i:
        each = b.get(turns, I64, b.mul(i, c(AT_ONCE)), AT_ONCE)
        b.put(b.intrinsic("vector.reduce.add", each), counts, i)


@routine(I64, PTR, I64, PTR, PTR)
def _store_tile(
    b: Builder, data: ir.Value, count: ir.Value, codes: ir.Value, out: ir.Value
) -> ir.Value:
    """Store the stream of `count` numbers; its bytes. The word's highest bits are those that are
    not stored yet."""
    word, fill, end = Variable(b, c(0)), Variable(b, c(0)), Variable(b, c(0))
    for step, indices in in_steps(b, count, AT_ONCE, 1):
        with indices as i:
            code: ir.Value = c(0)
            entries: ir.Value = c(0)
            for k in range(step):
                entry = b.get(codes, I64, b.zext(b.get(data, I8, b.add(i, c(k))), I64))
                code = b.or_(b.shl(code, b.and_(entry, c(63))), b.lshr(entry, c(8)))
                entries = b.add(entries, entry)
            filled = b.add(fill.get(), b.and_(entries, c(255)))
            moved = b.shl(b.shl(code, c(1)), b.sub(c(63), filled))
            full = b.or_(word.get(), moved)
            b.store(b.bswap(full), at(b, out, end.get()), align=1)
            end.set(b.add(end.get(), b.lshr(filled, c(3))))
            word.set(b.shl(full, b.and_(filled, c(-8))))
            fill.set(b.and_(filled, c(7)))
    return b.add(end.get(), b.lshr(b.add(fill.get(), c(7)), c(3)))


@routine(I64, PTR, PTR, I64, I64, PTR)
def load(
    b: Builder, data: ir.Value, end: ir.Value, count: ir.Value, bits: ir.Value, out: ir.Value
) -> ir.Value:
    """1 if these bytes are `count` numbers, else 0. Checks the head, and loads the tiles until one
    is wrong."""
    tiles, sizes, streams = _places(b, data, count, bits)
    room = b.sub(b.ptrtoint(end, I64), b.ptrtoint(streams, I64))
    good = Variable(b, b.icmp_signed(">=", room, c(0)))
    table, place = b.room(I16, (1 << LONGEST) + LANES), Variable(b, c(0))
    with b.if_then(good.get()):
        fits = _fill(b, data, b.shl(c(1), bits), table)
        total = Variable(b, c(0))
        with loop(b, tiles) as t:
            total.set(b.add(total.get(), b.zext(b.get(sizes, I16, t), I64)))
        good.set(b.and_(fits, b.icmp_signed("==", total.get(), room)))
    whole = b.and_(b.lshr(count, c(TILE.bit_length() - 1)), c(-BESIDE))
    for step, start, stop in ((BESIDE, c(0), whole), (1, whole, tiles)):
        with loop(b, stop, step, start) as t, b.if_then(good.get()):
            first, own = _tile(b, count, t)
            of = [table, at(b, streams, place.get()), at(b, sizes, b.mul(t, c(2)))]
            taken = _load_tiles(step)(b, *of, own, at(b, out, first))
            good.set(b.icmp_signed(">=", taken, c(0)))
            place.set(b.add(place.get(), taken))
    return b.zext(good.get(), I64)


def _fill(b: Builder, data: ir.Value, numbers: ir.Value, table: ir.Value) -> ir.Value:
    """Fill the table with the length of every window's code and, from bit 8 on, its number; true if
    codes fill all windows. Vectors may be longer than a code's windows: those of later codes
    follow."""
    found, filled = b.room(I64, NUMBERS), Variable(b, c(0))
    good = Variable(b, number(I1, 1))
    with loop(b, numbers) as i:
        byte = b.zext(b.get(data, I8, b.lshr(i, c(1))), I64)
        half = b.and_(b.lshr(byte, b.mul(b.and_(i, c(1)), c(4))), c(15))
        good.set(b.and_(good.get(), b.icmp_signed("<=", half, c(LONGEST + 1))))
        b.put(b.sub(half, c(1)), found, i)
    with loop(b, c(LONGEST + 1)) as length, loop(b, numbers) as i:
        with b.if_then(b.icmp_signed("==", b.get(found, I64, i), length)):
            entry = b.splat(b.trunc(b.or_(length, b.shl(i, c(8))), I16), LANES)
            start = filled.get()
            filled.set(b.add(start, b.lshr(c(1 << LONGEST), length)))
            fits = b.icmp_signed("<=", filled.get(), c(1 << LONGEST))
            with b.if_then(fits), loop(b, filled.get(), LANES, start) as j:
                b.put(entry, table, j)
    return b.and_(good.get(), b.icmp_signed("==", filled.get(), c(1 << LONGEST)))


def _load_tiles(tiles: int) -> Routine:
    """The routine that loads neighbouring tiles of `count` numbers: the bytes of their streams, or
    -1 if one does not end with its last code."""

    def body(
        b: Builder, table: ir.Value, data: ir.Value, sizes: ir.Value, count: ir.Value, out: ir.Value
    ) -> ir.Value:
        rooms = [b.room(I8, ROOM) for _ in range(tiles)]
        bits = [Variable(b, c(0)) for _ in range(tiles)]
        own = [b.zext(b.get(sizes, I16, c(k)), I64) for k in range(tiles)]
        taken: ir.Value = c(0)
        for room, size in zip(rooms, own, strict=True):
            fits = b.icmp_signed("<=", size, c(ROOM))
            b.copy(room, at(b, data, taken), b.select(fits, size, c(ROOM)))
            taken = b.add(taken, size)
        for step, indices in in_steps(b, count, AT_ONCE, 1):
            with indices as i:
                for k, (room, bit) in enumerate(zip(rooms, bits, strict=True)):
                    _load_codes(b, table, room, bit, step, at(b, out, b.add(i, c(k * TILE))))
        for room, bit, size in zip(rooms, bits, own, strict=True):
            good = _ended(b, room, bit.get(), size)
            taken = b.select(good, taken, c(-1))
        return taken

    return Routine(f"load_huffman_tiles_{tiles}", I64, [PTR, PTR, PTR, I64, PTR], body)


def _word(b: Builder, room: ir.Value, bit: ir.Value) -> ir.Value:
    """At least 57 bits from a bit on, the first one highest."""
    word = b.load(at(b, room, b.lshr(bit, c(3))), typ=I64, align=1)
    return b.shl(b.bswap(word), b.and_(bit, c(7)))


def _load_codes(
    b: Builder, table: ir.Value, room: ir.Value, bit: Variable, count: int, out: ir.Value
) -> None:
    """Load `count` numbers from a bit on."""
    start, entries = bit.get(), c(0)
    word = _word(b, room, start)
    for k in range(count):
        entry = b.zext(b.get(table, I16, b.lshr(word, c(64 - LONGEST))), I64)
        b.put(b.trunc(b.lshr(entry, c(8)), I8), out, c(k))
        word = b.shl(word, b.and_(entry, c(63)))
        entries = b.add(entries, entry)
    bit.set(b.add(start, b.and_(entries, c(255))))


def _ended(b: Builder, room: ir.Value, bit: ir.Value, size: ir.Value) -> ir.Value:
    """True if only zeros of the last byte are left behind a bit."""
    left = b.sub(b.shl(size, c(3)), bit)
    word = b.lshr(_word(b, room, bit), c(57))
    rest = b.lshr(word, b.and_(b.sub(c(7), left), c(7)))
    return b.and_(b.icmp_unsigned("<", left, c(8)), b.icmp_signed("==", rest, c(0)))
