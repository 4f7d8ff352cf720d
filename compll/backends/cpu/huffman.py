"""Numbers as Huffman codes: see [Note: huffman] in reference/bitstreams.py.

See store_gaps and load_gaps in streams.py for arguments and results of these functions; here
numbers are bytes, and `n` is their bits. A tile's stream is written and read in memory of its own,
which is as large as the longest one: so words can be longer than what is left, and wrong streams
stay within it.
"""

from __future__ import annotations

from llvmlite import ir

from compll.backends.cpu.builder import (
    I1,
    I8,
    I16,
    I64,
    PTR,
    VOID,
    Builder,
    Cursor,
    Routine,
    Variable,
    at,
    c,
    in_steps,
    loop,
    number,
    repeat_while,
    routine,
)
from compll.ir.storage import HUFFMAN_LONGEST as LONGEST
from compll.ir.storage import HUFFMAN_TILE as TILE

# ---- huffman codes ------------------------------------------------------------------------------
# Lengths and windows of Huffman codes: see [Note: huffman] in reference/bitstreams.py.
# Arrays hold an int64 for each number. A length of -1 is that of a number that does not occur.

NUMBERS, RANKED = 256, 8
#: weight to sort a number by that does not occur: above all others
LAST = 1 << 54


@routine(VOID, PTR, I64, PTR)
def lengths(b: Builder, counts: ir.Value, bits: ir.Value, out: ir.Value) -> None:
    """Fill `out` with the lengths of 2**bits numbers."""
    numbers, weights = b.shl(c(1), bits), b.room(I64, NUMBERS)
    b.copy(weights, counts, b.mul(numbers, c(8)))
    longest = Variable(b, depths(b, weights, numbers, out))
    with repeat_while(b, lambda: b.icmp_signed(">", longest.get(), c(LONGEST))):
        with loop(b, numbers) as i:
            b.put(b.lshr(b.add(b.get(weights, I64, i), c(1)), c(1)), weights, i)
        longest.set(depths(b, weights, numbers, out))
    longer = Variable(b, c(0))
    with loop(b, numbers) as i:
        more = b.sub(b.get(out, I64, i), bits)
        longer.set(b.add(longer.get(), b.mul(b.get(counts, I64, i), more)))
    with b.if_then(b.icmp_signed(">", longer.get(), c(0))), loop(b, numbers) as i:
        b.put(bits, out, i)


@routine(I64, PTR, I64, PTR)
def depths(b: Builder, weights: ir.Value, numbers: ir.Value, out: ir.Value) -> ir.Value:
    """Depths in the tree, as lengths; that of the lightest leaf, the largest. A weight is not 0."""
    order, tree, parents = b.room(I64, NUMBERS), b.room(I64, 2 * NUMBERS), b.room(I64, 2 * NUMBERS)
    leaves = _sort(b, weights, numbers, order, tree)
    last = b.sub(b.add(leaves, leaves), c(2))
    _join(b, leaves, last, tree, parents)
    b.put(c(0), tree, last)
    with loop(b, last) as i:
        node = b.sub(b.sub(last, c(1)), i)
        b.put(b.add(b.get(tree, I64, b.get(parents, I64, node)), c(1)), tree, node)
    with loop(b, numbers) as i:
        b.put(c(-1), out, i)
    with loop(b, leaves) as i:
        b.put(b.get(tree, I64, i), out, b.get(order, I64, i))
    return b.get(tree, I64, c(0))


def _sort(
    b: Builder, weights: ir.Value, numbers: ir.Value, order: ir.Value, tree: ir.Value
) -> ir.Value:
    """Fill `order` with the numbers by ascending weight, and `tree` with their weights; the number
    of weights that are not 0. Those that are come last."""
    keys, leaves = b.room(I64, NUMBERS + RANKED), Variable(b, c(0))
    vector = ir.VectorType(I64, RANKED)
    b.put(ir.Constant(vector, [LAST << 8] * RANKED), keys, numbers)  # behind the last one
    with loop(b, numbers) as i:
        weight = b.get(weights, I64, i)
        some = b.icmp_signed(">", weight, c(0))
        b.put(b.or_(b.shl(b.select(some, weight, c(LAST)), c(8)), i), keys, i)
        leaves.set(b.add(leaves.get(), b.zext(some, I64)))
    with loop(b, numbers) as i:
        key = b.splat(b.get(keys, I64, i), RANKED)
        ranks = Variable(b, ir.Constant(vector, [0] * RANKED))
        with loop(b, numbers, RANKED) as j:
            below = b.icmp_signed("<", b.get(keys, I64, j, RANKED), key)
            ranks.set(b.add(ranks.get(), b.zext(below, vector)))
        rank = b.intrinsic("vector.reduce.add", ranks.get())
        b.put(i, order, rank)
        b.put(b.get(weights, I64, i), tree, rank)
    return leaves.get()


def _join(b: Builder, leaves: ir.Value, last: ir.Value, tree: ir.Value, parents: ir.Value) -> None:
    """Join the two lightest nodes until one is left. Pairs become ever heavier, so the lightest
    node is the next leaf or the next pair."""
    leaf, pair = Variable(b, c(0)), Variable(b, leaves)
    with loop(b, b.add(last, c(1)), 1, leaves) as node:
        total: ir.Value = c(0)
        for _ in range(2):
            i, j = leaf.get(), pair.get()
            first, other = b.get(tree, I64, i), b.get(tree, I64, j)
            lighter = b.or_(b.icmp_signed(">=", j, node), b.icmp_signed("<=", first, other))
            taken = b.and_(b.icmp_signed("<", i, leaves), lighter)
            b.put(node, parents, b.select(taken, i, j))
            total = b.add(total, b.select(taken, first, other))
            leaf.set(b.add(i, b.zext(taken, I64)))
            pair.set(b.add(j, b.zext(b.not_(taken), I64)))
        b.put(total, tree, node)


@routine(I64, PTR, I64, PTR)
def windows(b: Builder, lengths: ir.Value, numbers: ir.Value, out: ir.Value) -> ir.Value:
    """Fill `out` with the first window of each code; the number of windows that all codes
    fill."""
    filled = Variable(b, c(0))
    with loop(b, c(LONGEST + 1)) as length, loop(b, numbers) as i:
        with b.if_then(b.icmp_signed("==", b.get(lengths, I64, i), length)):
            b.put(filled.get(), out, i)
            filled.set(b.add(filled.get(), b.lshr(c(1 << LONGEST), length)))
    return filled.get()


# ---- huffman stream -----------------------------------------------------------------------------

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
    counts, lengths_of, codes = b.room(I64, NUMBERS), b.room(I64, NUMBERS), b.room(I64, NUMBERS)
    numbers = b.shl(c(1), bits)
    _count(b, data, count, numbers, counts)
    lengths(b, counts, bits, lengths_of)
    windows(b, lengths_of, numbers, codes)
    with loop(b, numbers, 2) as i:
        low, high = (b.add(b.get(lengths_of, I64, j), c(1)) for j in (i, b.add(i, c(1))))
        byte = b.trunc(b.or_(low, b.shl(high, c(4))), I8)
        b.store(byte, at(b, out, b.lshr(i, c(1))))
    with loop(b, numbers) as i:  # a code's length, and the code from bit 8 on
        length = b.get(lengths_of, I64, i)
        length = b.select(b.icmp_signed("<", length, c(0)), c(0), length)
        code = b.lshr(b.get(codes, I64, i), b.sub(c(LONGEST), length))
        b.put(b.or_(length, b.shl(code, c(8))), codes, i)
    tiles, sizes, streams = _places(b, out, count, bits)
    end, room = Cursor(b, streams), b.room(I8, ROOM)
    with loop(b, tiles) as t:
        first, count_here = _tile(b, count, t)
        size = _store_tile(b, at(b, data, first), count_here, codes, room)
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
            first, count_here = _tile(b, count, t)
            of = [table, at(b, streams, place.get()), at(b, sizes, b.mul(t, c(2)))]
            taken = _load_tiles(step)(b, *of, count_here, at(b, out, first))
            good.set(b.icmp_signed(">=", taken, c(0)))
            place.set(b.add(place.get(), taken))
    return b.zext(good.get(), I64)


def _fill(b: Builder, data: ir.Value, numbers: ir.Value, table: ir.Value) -> ir.Value:
    """Fill the table with the length of every window's code and, from bit 8 on, its number; true if
    codes fill all windows. Vectors may be longer than a code's windows: those of later codes
    follow."""
    lengths_of, filled = b.room(I64, NUMBERS), Variable(b, c(0))
    good = Variable(b, number(I1, 1))
    with loop(b, numbers) as i:
        byte = b.zext(b.get(data, I8, b.lshr(i, c(1))), I64)
        half = b.and_(b.lshr(byte, b.mul(b.and_(i, c(1)), c(4))), c(15))
        good.set(b.and_(good.get(), b.icmp_signed("<=", half, c(LONGEST + 1))))
        b.put(b.sub(half, c(1)), lengths_of, i)
    with loop(b, c(LONGEST + 1)) as length, loop(b, numbers) as i:
        with b.if_then(b.icmp_signed("==", b.get(lengths_of, I64, i), length)):
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
        lengths = [b.zext(b.get(sizes, I16, c(k)), I64) for k in range(tiles)]
        taken: ir.Value = c(0)
        for room, size in zip(rooms, lengths, strict=True):
            fits = b.icmp_signed("<=", size, c(ROOM))
            b.copy(room, at(b, data, taken), b.select(fits, size, c(ROOM)))
            taken = b.add(taken, size)
        for step, indices in in_steps(b, count, AT_ONCE, 1):
            with indices as i:
                for k, (room, bit) in enumerate(zip(rooms, bits, strict=True)):
                    _load_codes(b, table, room, bit, step, at(b, out, b.add(i, c(k * TILE))))
        for room, bit, size in zip(rooms, bits, lengths, strict=True):
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
