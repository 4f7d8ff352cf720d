"""Tables, a few numbers of a piece: quantiles, means by index, and search of an element's bucket.

Quantiles are found in order keys (see order_key in bits.py): counts of their upper halves show
which halves hold the wanted keys, and only keys with these halves are sorted.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from compll.backends.cpu.builder import (
    F32,
    I1,
    I8,
    I32,
    I64,
    PTR,
    VOID,
    Builder,
    Routine,
    Variable,
    at,
    c,
    loop,
    number,
    repeat_while,
    routine,
)
from compll.backends.cpu.instructions import ROWS

#: elements from which counting pays
MANY = 1 << 16
#: upper bits of a key that tell where to look for its bucket, and number of their values
SHIFT, SLOTS = 20, 1 << 12
LOWEST = -(2**31)


def count_one(b: Builder, counts: ir.Value, index: ir.Value) -> None:
    """Add one to the count of an index."""
    b.put(b.add(b.get(counts, I32, index), number(I32, 1)), counts, index)


# quantiles


def quantiles(parts: int) -> Routine:
    """The routine that fills table with parts - 1 numbers, from int32 keys of n elements.

    some, other: int32 arrays of the same length as the keys.
    """

    def body(
        b: Builder, keys: ir.Value, n: ir.Value, some: ir.Value, other: ir.Value, table: ir.Value
    ) -> None:
        places, count = b.room(I64, parts), Variable(b, n)
        with loop(b, c(parts - 1)) as j:
            b.put(b.udiv(b.mul(b.add(j, c(1)), n), c(parts)), places, j)
        array = Variable(b, keys)
        with b.if_then(b.icmp_signed(">=", n, c(MANY))):
            count.set(_near(b, keys, n, some, other, places, parts))
            array.set(some)
        sort(b, array.get(), other, count.get())
        with loop(b, c(parts - 1)) as j:
            result = b.get(array.get(), I32, b.get(places, I64, j))
            b.put(ROWS["from_key"](b, result), table, j)

    return Routine(f"quantiles{parts}", VOID, [PTR, I64, PTR, PTR, PTR], body)


def _half(b: Builder, key: ir.Value) -> ir.Value:
    """The upper half of a key, from 0."""
    return b.zext(b.lshr(b.xor(key, number(I32, LOWEST)), number(I32, 16)), I64)


def _near(
    b: Builder,
    keys: ir.Value,
    n: ir.Value,
    some: ir.Value,
    counts: ir.Value,
    places: ir.Value,
    parts: int,
) -> ir.Value:
    """Copy the keys whose upper half is that of a wanted one to `some`; returns their number, and
    changes `places` to places among them."""
    halves = 1 << 16
    marks = b.room(I8, halves)
    b.clear(counts, c(4 * halves))
    with loop(b, n) as i:
        count_one(b, counts, _half(b, b.get(keys, I32, i)))
    below, kept, j = (Variable(b, c(0)) for _ in range(3))
    with loop(b, c(halves)) as half:
        here = b.zext(b.get(counts, I32, half), I64)
        end, first = b.add(below.get(), here), j.get()

        def inside(end: ir.Value = end) -> ir.Value:
            place = b.icmp_signed("<", b.get(places, I64, j.get()), end)
            return b.and_(place, b.icmp_signed("<", j.get(), c(parts - 1)))

        with repeat_while(b, inside):  # places ascend
            by = b.sub(kept.get(), below.get())
            b.put(b.add(b.get(places, I64, j.get()), by), places, j.get())
            j.set(b.add(j.get(), c(1)))
        some_here = b.icmp_signed("!=", j.get(), first)
        b.put(b.zext(some_here, I8), marks, half)
        kept.set(b.add(kept.get(), b.select(some_here, here, c(0))))
        below.set(end)
    count = Variable(b, c(0))
    with loop(b, n) as i:
        key = b.get(keys, I32, i)
        b.put(key, some, count.get())
        mark = b.get(marks, I8, _half(b, key))
        count.set(b.add(count.get(), b.zext(mark, I64)))
    return count.get()


@routine(VOID, PTR, PTR, I64)
def sort(b: Builder, keys: ir.Value, other: ir.Value, count: ir.Value) -> None:
    """Sort int32 keys, by their bytes."""
    starts = b.room(I32, 256)
    source, target = keys, other
    for shift in (0, 8, 16, 24):

        def digit(key: ir.Value, shift: int = shift) -> ir.Value:
            plain = b.xor(key, number(I32, LOWEST))
            return b.zext(b.and_(b.lshr(plain, number(I32, shift)), number(I32, 255)), I64)

        b.clear(starts, c(4 * 256))
        with loop(b, count) as i:
            count_one(b, starts, digit(b.get(source, I32, i)))
        total = Variable(b, number(I32, 0))
        with loop(b, c(256)) as value:
            here = b.get(starts, I32, value)
            b.put(total.get(), starts, value)
            total.set(b.add(total.get(), here))
        with loop(b, count) as i:
            key = b.get(source, I32, i)
            place = digit(key)
            b.put(key, target, b.zext(b.get(starts, I32, place), I64))
            count_one(b, starts, place)
        source, target = target, source


# buckets


def bucket_bytes(edges: int) -> int:
    """Bytes that `buckets` writes for this number of edges."""
    return 8 + 4 * (SLOTS + 1) + 4 * _padded(edges)


def _padded(edges: int) -> int:
    return 2 * (1 << edges.bit_length())


def buckets(edges: int) -> Routine:
    """The routine buckets(table, out): writes the steps of a search; a start for each value of a
    key's upper bits; the edges' keys."""
    return Routine(f"buckets{edges}", VOID, [PTR, PTR], partial(_prepare, edges=edges))


def _prepare(b: Builder, table: ir.Value, out: ir.Value, edges: int) -> None:
    starts, keys = at(b, out, c(8)), at(b, out, c(8 + 4 * (SLOTS + 1)))
    with loop(b, c(_padded(edges))) as j:
        b.put(number(I32, 2**31 - 1), keys, j)
    with loop(b, c(edges)) as j:
        b.put(ROWS["order_key"](b, b.get(table, F32, j)), keys, j)
    below, most = Variable(b, c(0)), Variable(b, c(0))
    with loop(b, c(SLOTS + 1)) as slot:
        first = b.add(b.shl(slot, c(SHIFT)), c(LOWEST))
        before = below.get()

        def less(first: ir.Value = first) -> ir.Value:
            lower = b.icmp_signed("<", b.sext(b.get(keys, I32, below.get()), I64), first)
            return b.and_(lower, b.icmp_signed("<", below.get(), c(edges)))

        with repeat_while(b, less):
            below.set(b.add(below.get(), c(1)))
        b.put(b.trunc(below.get(), I32), starts, slot)
        here = b.sub(below.get(), before)
        most.set(b.select(b.icmp_signed(">", here, most.get()), here, most.get()))
    steps = b.sub(c(64), b.ctlz(most.get(), number(I1, 0)))
    b.store(steps, out)


def bucket(b: Builder, table: ir.Value, keys: ir.Value, edges: int) -> ir.Value:
    """The number of edges that are not above each order key. table: from `buckets`."""
    count = keys.type.count
    kind = ir.VectorType(I32, count)

    def of(value: int) -> ir.Value:
        return ir.Constant(kind, [value] * count)

    starts, sorted_ = at(b, table, c(8)), at(b, table, c(8 + 4 * (SLOTS + 1)))
    slots = b.lshr(b.xor(keys, of(LOWEST)), of(SHIFT))
    result = Variable(b, gathered(b, starts, slots, I32))
    steps = b.load(table, typ=I64)
    with loop(b, steps) as turn:
        by = b.shl(number(I32, 1), b.trunc(b.sub(b.sub(steps, turn), c(1)), I32))
        ahead = b.add(result.get(), b.splat(by, count))
        edge = gathered(b, sorted_, b.sub(ahead, of(1)), I32)
        result.set(b.select(b.icmp_signed("<=", edge, keys), ahead, result.get()))
    most = of(edges)  # a NaN may reach the padding of the keys, too
    return b.select(b.icmp_signed("<", result.get(), most), result.get(), most)


def gathered(b: Builder, array: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """Elements at the index of each lane."""
    result: ir.Value = ir.Constant(ir.VectorType(kind, index.type.count), ir.Undefined)
    for lane in range(index.type.count):
        place = b.zext(b.extract_element(index, number(I32, lane)), I64)
        result = b.insert_element(result, b.get(array, kind, place), number(I32, lane))
    return result


def clipped(b: Builder, index: ir.Value, size: int) -> ir.Value:
    """An index of a table, or one per lane: 0 if it is below, the last beyond the end."""
    kind = index.type
    low, high = (
        ir.Constant(kind, [v] * kind.count if isinstance(kind, ir.VectorType) else v)
        for v in (0, size - 1)
    )
    index = b.select(b.icmp_signed("<", index, low), low, index)
    return b.select(b.icmp_signed(">", index, high), high, index)
