"""Rows of matrices: the largest elements, elements at positions."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from compll.backends.cpu.builder import Builder, Variable, loop
from compll.backends.cpu.compaction import Compaction
from compll.backends.cpu.instructions import ROWS
from compll.backends.cpu.nontemporal_stores import zero
from compll.backends.cpu.products import least_of
from compll.backends.cpu.sources import Source
from compll.backends.cpu.types import I32, I64, c, number

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
    found, number_of = Variable(b, number(I32, 0)), Variable(b, count)
    with loop(b, c(32)) as step:
        with b.if_then(b.icmp_signed(">", number_of.get(), k)):
            tried = b.or_(found.get(), b.lshr(lowest, b.trunc(step, I32)))
            more = _count(b, keys, count, ">=", b.xor(tried, lowest))
            with b.if_then(b.icmp_signed(">=", more, k)):
                found.set(tried)
                number_of.set(more)
    return b.xor(found.get(), lowest)


def top_columns(b: Builder, m: Source, k: ir.Value, out: ir.Value, keys: ir.Value) -> None:
    """out [rows, k], int32: columns of the k largest elements of each row, ascending, then -1.

    keys: room for a row, to the next multiple of MANY. A row may write a few elements too many,
    which the next row overwrites.
    """
    few = least_of(b, k, m.cols)
    padded = b.and_(b.add(m.cols, c(MANY - 1)), c(-MANY))
    with loop(b, padded) as j:
        b.put(number(I32, -(2**31)), keys, j)
    counts = b.room(I64, 2)
    b.put(c(0), counts, c(0))
    found = Compaction(b, counts, [out])
    with loop(b, m.rows) as i:
        each_of_row(b, m, i, 16, lambda x, j, lanes: b.put(ROWS["order_key"](b, x), keys, j))
        least = _kth_key(b, keys, padded, few)
        found.taken.set(b.mul(i, k))
        found.left.set(b.sub(few, _count(b, keys, padded, ">", least)))
        with loop(b, padded, 16) as j:
            own, edge = b.get(keys, I32, j, 16), b.splat(least, 16)
            place = b.add(b.splat(b.trunc(j, I32), 16), ir.Constant(own.type, list(range(16))))
            larger, tied = (b.icmp_signed(order, own, edge) for order in (">", "=="))
            found.lanes(larger, tied, [place])
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
