"""Products of matrices, in the order of [Note: order of matrix products]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llvmlite import ir

from compll.backends.cpu.builder import (
    F32,
    F64,
    I32,
    I64,
    PTR,
    SIZES,
    VOID,
    Builder,
    Variable,
    at,
    c,
    in_steps,
    loop,
    number,
    routine,
)
from compll.backends.cpu.instructions import ROWS, Compaction, zero
from compll.backends.cpu.printer import Source, every, vector, wide, zeros
from compll.numerics.matrices import CHUNK

#: lanes of a float64 vector, columns of a product that are computed together
WIDE, TOGETHER = 8, 4
#: vectors of columns in a block of `blocked`
VECTORS = 4
#: rows that `by_rows` interleaves, least elements between these rows, and columns in a turn
TURNS, APART, PART = 8, 4096, 256


def transposed(b: Builder, rows: list[ir.Value]) -> list[ir.Value]:
    """The columns of a square of rows: there are as many rows as lanes."""
    count = len(rows)
    h = 1
    while h < count:
        low = [lane if not lane & h else count + lane - h for lane in range(count)]
        high = [lane + h if not lane & h else count + lane for lane in range(count)]
        for k in (k for k in range(count) if not k & h):
            first, other = rows[k], rows[k + h]
            rows[k], rows[k + h] = (
                b.shuffle_vector(first, other, ir.Constant(ir.VectorType(I32, count), order))
                for order in (low, high)
            )
        h *= 2
    return rows


def by_columns(b: Builder, width: ir.Value, body: Callable[[ir.Value, int], None]) -> None:
    """Call body(column, how many) for an even number of columns, four at a time, then two."""
    for count, turns in in_steps(b, width, TOGETHER, 2):
        with turns as column:
            body(column, count)


def factor(b: Builder, source: Source, rows: ir.Value, columns: int, out: ir.Value) -> int:
    """Write float64 [rows, width] to `out`, padded with zeros; returns the width, an even number of
    columns."""
    width = columns + columns % 2
    given = source.cols if source.view.turned else source.rows
    with loop(b, rows) as j:
        for k in range(width):
            value = number(F64, 0.0)
            if k < columns:
                entry = source.inside(source.place(j, c(k)), b.icmp_signed("<", j, given))
                value = wide(b, entry)
            b.put(value, out, b.add(b.mul(j, c(width)), c(k)))
    return width


@contextmanager
def chunks(b: Builder, inner: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
    """A loop over the chunks of the inner dimension, whose body the `with` builds: their begin and
    end."""
    with loop(b, inner, CHUNK) as begin:
        yield begin, least_of(b, b.add(begin, c(CHUNK)), inner)


def narrow(b: Builder, m: Source, right: ir.Value, columns: int, out: ir.Value) -> None:
    """out [rows, columns] = m @ right, as float32 of float64 sums.

    right: float64 [inner, width], with `columns` rounded up to an even width.
    """
    rows, inner, width = m.rows, m.cols, c(columns + columns % 2)

    def add(sums: list[ir.Value], y: ir.Value, j: ir.Value, column: ir.Value) -> None:
        first = b.add(b.mul(j, width), column)
        for k, held in enumerate(sums):
            z = every(b, b.get(right, F64, b.add(first, c(k))), WIDE)
            held.set(b.intrinsic("fmuladd", y, z, held.get()))

    def one_by_one(
        starts: list[ir.Value], j: ir.Value, load: Callable[[ir.Value], ir.Value]
    ) -> ir.Value:
        y = zeros(F32, WIDE)
        for k, start in enumerate(starts):
            y = b.insert_element(y, load(b.add(start, j)), number(I32, k))
        return wide(b, y)

    def leave(sums: list[ir.Value], i: ir.Value, column: ir.Value, some: ir.Value) -> None:
        for k, held in enumerate(sums):
            result = b.fptrunc(held.get(), vector(F32, WIDE))
            with b.if_then(b.icmp_signed("<", b.add(column, c(k)), c(columns))):
                for lane in range(WIDE):
                    row = b.add(i, c(lane))
                    with b.if_then(b.icmp_signed("<", row, some)):
                        place = b.add(b.mul(row, c(columns)), b.add(column, c(k)))
                        b.put(b.extract_element(result, number(I32, lane)), out, place)

    def block(i: ir.Value, column: ir.Value, count: int, full: bool) -> None:
        totals = [Variable(b, zeros(F64, WIDE)) for _ in range(count)]
        starts = [b.mul(b.add(i, c(k)), inner) for k in range(WIDE)]
        with chunks(b, inner) as (begin, end):
            sums = [Variable(b, zeros(F64, WIDE)) for _ in range(count)]
            whole = b.and_(end, c(-WIDE)) if full else begin
            if full:
                with loop(b, whole, WIDE, begin) as j:
                    given = [m.load(b.add(start, j), WIDE) for start in starts]
                    for k, y in enumerate(transposed(b, given)):
                        add(sums, wide(b, y), b.add(j, c(k)), column)
            with loop(b, end, 1, whole) as j:
                load = (lambda index: m.load(index, 0)) if full else m.inside
                add(sums, one_by_one(starts, j, load), j, column)
            for total, held in zip(totals, sums, strict=True):
                total.set(b.fadd(total.get(), held.get()))
        leave(totals, i, column, rows)

    complete = b.and_(b.sdiv(m.valid, inner), c(-WIDE))
    for first, stop, full in ((c(0), complete, True), (complete, rows, False)):
        with loop(b, stop, WIDE, first) as i:
            by_columns(b, width, lambda column, count: block(i, column, count, full))  # noqa: B023


def across(
    b: Builder, m: Source, right: ir.Value, columns: int, total: ir.Value, out: ir.Value
) -> None:
    """out [inner, columns] = transpose(m) @ right, by way of total: float64 [2, width, inner].

    right: float64 [rows, width], with an even width, and rows rounded up to a multiple of four.
    """
    rows, inner, width = m.rows, m.cols, c(columns + columns % 2)
    whole, size = b.and_(inner, c(-WIDE)), b.mul(width, inner)
    part = at(b, total, b.mul(size, c(8)))
    b.clear(total, b.mul(size, c(8)))

    def block(i: ir.Value, column: ir.Value, count: int, full: bool) -> None:
        factors = [
            [b.get(right, F64, b.add(b.mul(b.add(i, c(r)), width), b.add(column, c(k))))
             for r in range(TOGETHER)]
            for k in range(count)
        ]  # fmt: skip
        starts = [b.mul(b.add(i, c(r)), inner) for r in range(TOGETHER)]
        parts = ((c(0), whole, WIDE), (whole, inner, 0)) if full else ((c(0), inner, 0),)
        for first, stop, lanes in parts:
            ys = [[every(b, y, lanes) for y in some] for some in factors]
            with loop(b, stop, max(1, lanes), first) as j:
                places = [b.add(start, j) for start in starts]
                loads = [m.load(p, lanes) if full else m.inside(p) for p in places]
                given = [wide(b, x) for x in loads]
                for k, some in enumerate(ys):
                    place = b.add(b.mul(b.add(column, c(k)), inner), j)
                    sums = b.get(part, F64, place, lanes)
                    for x_of, y in zip(given, some, strict=True):
                        sums = b.intrinsic("fmuladd", x_of, y, sums)
                    b.put(sums, part, place)

    complete = b.and_(b.sdiv(m.valid, inner), c(-TOGETHER))
    with chunks(b, rows) as (begin, end):
        b.clear(part, b.mul(size, c(8)))
        ready = least_of(b, end, b.select(b.icmp_signed(">", complete, begin), complete, begin))
        for first, stop, full in ((begin, ready, True), (ready, end, False)):
            with loop(b, stop, TOGETHER, first) as i:
                by_columns(b, width, lambda column, count: block(i, column, count, full))  # noqa: B023
        with loop(b, size) as j:
            b.put(b.fadd(b.get(total, F64, j), b.get(part, F64, j)), total, j)
    with loop(b, inner) as j:
        for k in range(columns):
            sums = b.get(total, F64, b.add(b.mul(c(k), inner), j))
            b.put(b.fptrunc(sums, F32), out, b.add(b.mul(j, c(columns)), c(k)))


@routine(VOID, PTR, I64, I64, I64, I64, PTR, I64, PTR, PTR)
def blocked(
    b: Builder,
    a: ir.Value,
    down: ir.Value,
    across: ir.Value,
    rows: ir.Value,
    inner: ir.Value,
    right: ir.Value,
    cols: ir.Value,
    total: ir.Value,
    out: ir.Value,
) -> None:
    """out [rows, cols] = a @ right, as float32 of float64 sums, in blocks of rows and columns that
    stay in registers.

    down, across: elements of `a` between its rows and between its columns. total: float64
    [rows, cols], for the sums of earlier chunks.
    """

    def block(
        begin: ir.Value, end: ir.Value, i: ir.Value, some: int, column: ir.Value, vectors: int
    ) -> None:
        """`some` rows by several vectors of columns; by a single column if `vectors` is 0."""
        width, count = (WIDE, vectors) if vectors else (0, 1)
        starts = [b.mul(b.add(i, c(r)), down) for r in range(some)]
        sums = [[Variable(b, zeros(F64, width)) for _ in range(count)] for _ in range(some)]
        with loop(b, end, 1, begin) as j:
            first, step = b.add(b.mul(j, cols), column), b.mul(j, across)
            zs = [
                wide(b, b.get(right, F32, b.add(first, c(width * k)), width)) for k in range(count)
            ]
            for start, part in zip(starts, sums, strict=True):
                y = every(b, wide(b, b.get(a, F32, b.add(start, step))), width)
                for held, z in zip(part, zs, strict=True):
                    held.set(b.intrinsic("fmuladd", y, z, held.get()))
        places = {
            b.add(b.mul(b.add(i, c(r)), cols), b.add(column, c(width * k))): held
            for r, part in enumerate(sums)
            for k, held in enumerate(part)
        }
        with b.if_then(b.icmp_signed(">", begin, c(0))):
            for place, held in places.items():
                held.set(b.fadd(b.get(total, F64, place, width), held.get()))
        with b.if_else(b.icmp_signed("<", end, inner)) as (more, done):
            with more:
                for place, held in places.items():
                    b.put(held.get(), total, place)
            with done:
                for place, held in places.items():
                    b.put(b.fptrunc(held.get(), vector(F32, width)), out, place)

    with chunks(b, inner) as (begin, end):
        for some, turns in in_steps(b, rows, TOGETHER, 1):
            with turns as i:
                for step, strips in in_steps(b, cols, VECTORS * WIDE, WIDE, 1):
                    with strips as column:
                        block(begin, end, i, some, column, step // WIDE)


def by_rows(
    b: Builder, a: ir.Value, count_of_rows: ir.Value, inner: ir.Value, right: ir.Value, cols: ir.Value, count: ir.Value,
    take: Callable[[ir.Value, ir.Value, int], None]
) -> None:  # fmt: skip
    """The elements of a @ right, by rows, with float32 sums. Calls take(float32, place, lanes) for
    each vector. count: number of elements wanted; it may be less than all."""
    lanes = 64 // SIZES[F32]

    def strip(i: ir.Value, column: ir.Value, place: ir.Value, vectors: int) -> None:
        """Several vectors of columns; a single column if `vectors` is 0."""
        some = lanes if vectors else 0
        sums = [Variable(b, zeros(F32, some)) for _ in range(max(1, vectors))]
        start = b.mul(i, inner)
        with loop(b, inner) as j:
            y = every(b, b.get(a, F32, b.add(start, j)), some)
            first = b.add(b.mul(j, cols), column)
            for k, held in enumerate(sums):
                z = b.get(right, F32, b.add(first, c(lanes * k)), some)
                held.set(b.fadd(held.get(), b.fmul(y, z)))
        for k, held in enumerate(sums):
            take(held.get(), b.add(place, c(lanes * k)), some)

    def part(i: ir.Value, column: ir.Value, place: ir.Value, some: ir.Value) -> None:
        for step, strips in in_steps(b, some, TOGETHER * lanes, lanes, 1):
            with strips as j:
                strip(i, b.add(column, j), b.add(place, j), step // lanes)

    # Rows that are far apart in memory take turns with each part of b, which stays in the cache;
    # also, several streams to memory are a third faster than one.
    least = b.udiv(c(APART), cols)
    apart = b.select(b.icmp_signed(">", least, c(1)), least, c(1))
    together = b.mul(apart, c(TURNS))
    groups = b.udiv(b.add(count_of_rows, b.sub(together, c(1))), together)
    with loop(b, groups) as group, loop(b, apart) as near:
        first = b.add(b.mul(group, together), near)
        with loop(b, cols, PART) as column, loop(b, c(TURNS)) as turn:
            i = b.add(first, b.mul(turn, apart))
            place = b.add(b.mul(i, cols), column)
            some = least_of(b, c(PART), b.sub(cols, column), b.sub(count, place))
            with b.if_then(b.icmp_signed(">", some, c(0))):
                part(i, column, place, some)


def least_of(b: Builder, *values: ir.Value) -> ir.Value:
    """The smallest of int64 values."""
    least, *others = values
    for other in others:
        least = b.select(b.icmp_signed("<", other, least), other, least)
    return least


# ---- rows ---------------------------------------------------------------------------------------
# Rows of matrices: the largest elements, elements at positions.

#: elements of a vector; a row's keys are padded to a multiple of this
MANY = 64


def each_of_row(
    b: Builder, m: Source, row: ir.Value, lanes: int, take: Callable[..., None]
) -> None:
    """Call take(elements, column, how many; 0: one) for a row, in the order of memory."""
    start = b.mul(row, m.cols)
    left = b.sub(m.valid, start)
    there = least_of(b, m.cols, b.select(b.icmp_signed(">", left, c(0)), left, c(0)))
    whole = b.and_(there, c(-lanes))
    with loop(b, whole, lanes) as k:
        take(m.load(b.add(start, k), lanes), k, lanes)
    with loop(b, m.cols, 1, whole) as k:
        take(m.inside(b.add(start, k)), k, 0)


def _count(b: Builder, keys: ir.Value, count: ir.Value, order: str, than: ir.Value) -> ir.Value:
    """The number of int32 keys that are > or >= `than`; `count`: a multiple of MANY."""
    kind = ir.VectorType(I32, MANY)
    held = Variable(b, ir.Constant(kind, None))
    with loop(b, count, MANY) as j:
        hit = b.icmp_signed(order, b.get(keys, I32, j, MANY), b.splat(than, MANY))
        held.set(b.sub(held.get(), b.sext(hit, kind)))
    return b.sext(b.intrinsic("vector.reduce.add", held.get()), I64)


def _kth_key(b: Builder, keys: ir.Value, count: ir.Value, k: ir.Value) -> ir.Value:
    """The k-th largest of keys, or another threshold that as many keys reach.

    Found bit by bit, until the count fits: the keys are few, and in the cache.
    """
    lowest = number(I32, -(2**31))
    key, number_of = Variable(b, number(I32, 0)), Variable(b, count)
    with loop(b, c(32)) as step:
        with b.if_then(b.icmp_signed(">", number_of.get(), k)):
            tried = b.or_(key.get(), b.lshr(lowest, b.trunc(step, I32)))
            more = _count(b, keys, count, ">=", b.xor(tried, lowest))
            with b.if_then(b.icmp_signed(">=", more, k)):
                key.set(tried)
                number_of.set(more)
    return b.xor(key.get(), lowest)


def top_columns(b: Builder, m: Source, k: ir.Value, out: ir.Value, keys: ir.Value) -> None:
    """out [rows, k], int32: columns of the k largest elements of each row, ascending, then -1.

    keys: room for a row, to the next multiple of MANY. A row may write a few elements too many,
    which the next row overwrites.
    """
    few = least_of(b, k, m.cols)
    padded = b.and_(b.add(m.cols, c(MANY - 1)), c(-MANY))
    with loop(b, padded) as j:
        b.put(number(I32, -(2**31)), keys, j)
    counts = b.stack(I64, 2)
    b.put(c(0), counts, c(0))
    compaction = Compaction(b, counts, [out])
    with loop(b, m.rows) as i:
        each_of_row(b, m, i, 16, lambda x, j, lanes: b.put(ROWS["order_key"](b, x), keys, j))
        least = _kth_key(b, keys, padded, few)
        compaction.taken.set(b.mul(i, k))
        compaction.left.set(b.sub(few, _count(b, keys, padded, ">", least)))
        with loop(b, padded, 16) as j:
            key, edge = b.get(keys, I32, j, 16), b.splat(least, 16)
            place = b.add(b.splat(b.trunc(j, I32), 16), ir.Constant(key.type, list(range(16))))
            larger, tied = (b.icmp_signed(order, key, edge) for order in (">", "=="))
            compaction.lanes(larger, tied, [place])
        with loop(b, k, 1, few) as j:
            b.put(number(I32, -1), out, b.add(b.mul(i, k), j))


def place_columns(
    b: Builder, at: Source, x: Source, rows: ir.Value, cols: ir.Value, out: ir.Value
) -> None:
    """out [rows, cols]: the elements of x at positions of each row, zero elsewhere."""
    zero(b, out, b.mul(b.mul(rows, cols), c(4)))
    width = x.rows if x.view.turned else x.cols
    with loop(b, rows) as i, loop(b, width) as j:
        place = b.sext(at.inside(at.place(i, j)), I64)
        inside = b.and_(b.icmp_signed(">=", place, c(0)), b.icmp_signed("<", place, cols))
        with b.if_then(inside):
            b.put(x.inside(x.place(i, j)), out, b.add(b.mul(i, cols), place))
