"""Rows and columns of matrices, and elements at positions, as LLVM functions; see routines.py."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from compll.backends.cpu.builder import (
    F32,
    I16,
    I32,
    I64,
    PTR,
    SIZES,
    VOID,
    Builder,
    Variable,
    at,
    c,
    loop,
    number,
)
from compll.backends.cpu.compaction import Compaction
from compll.backends.cpu.float_bits import key, magnitude_bits
from compll.backends.cpu.past_cache import zero
from compll.backends.cpu.products import Source

#: elements that are looked at together
MANY = 64
#: positions ahead of which the elements are asked for
AHEAD = 32


def extreme(what: str, side: str) -> Any:
    """out, int32: the largest or smallest order key of each row of x, or of each column.

    What is there counts, too.
    """
    order = {"max": ">", "min": "<"}[what]

    def better(b: Builder, keys: Any, best: Any) -> Any:
        return b.select(b.icmp_signed(order, keys, best), keys, best)

    def body(b: Builder, x: Any, rows: Any, cols: Any, out: Any) -> None:
        whole = b.and_(cols, c(-MANY))
        with loop(b, rows) as i:
            start = b.mul(i, cols)
            first = b.get(out, I32, i) if side == "row" else number(I32, 0)
            best, parts = Variable(b, first), Variable(b, b.splat(first, MANY))
            for lanes, begin, end in ((MANY, c(0), whole), (0, whole, cols)):
                held = parts if lanes else best
                with loop(b, end, max(1, lanes), begin) as k:
                    keys = key(b, b.get(x, F32, b.add(start, k), lanes))
                    if side == "row":
                        held.set(better(b, keys, held.get()))
                    else:
                        b.put(better(b, keys, b.get(out, I32, k, lanes)), out, k)
            if side == "row":
                found = b.intrinsic(f"vector.reduce.s{what}", parts.get())
                b.put(better(b, found, best.get()), out, i)

    return body


def _count(b: Builder, keys: Any, count: Any, order: str, than: Any) -> Any:
    """How many int32 keys, a multiple of MANY, are > or >= another."""
    kind = ir.VectorType(I32, MANY)
    held = Variable(b, ir.Constant(kind, None))
    with loop(b, count, MANY) as j:
        hit = b.icmp_signed(order, b.get(keys, I32, j, MANY), b.splat(than, MANY))
        held.set(b.sub(held.get(), b.sext(hit, kind)))
    return b.sext(b.intrinsic("vector.reduce.add", held.get()), I64)


def _kth_key(b: Builder, keys: Any, count: Any, k: Any) -> Any:
    """The k-th largest of keys, or another that as many are at least.

    Bit by bit, until as many are found: they are few, and lie in the cache.
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


def top_columns(what: str) -> Any:
    """out [rows, k], int32: where the k largest elements of each row of x are, ascending.

    what: "key", or "magnitude" for the largest magnitudes. k: at most cols. keys: room for a row, a
    multiple of MANY, the least int32 behind its end. SLACK elements more than k are written of a row.
    """

    def body(b: Builder, x: Any, rows: Any, cols: Any, k: Any, out: Any, keys: Any) -> None:
        counts = b.room(I64, 2)
        b.put(c(0), counts, c(0))
        found = Compaction(b, counts, [out])
        whole = b.and_(cols, c(-16))
        padded = b.and_(b.add(cols, c(MANY - 1)), c(-MANY))
        with loop(b, rows) as i:
            start = b.mul(i, cols)
            for lanes, begin, end in ((16, c(0), whole), (0, whole, cols)):
                with loop(b, end, max(1, lanes), begin) as j:
                    own = b.get(x, F32, b.add(start, j), lanes)
                    b.put({"key": key, "magnitude": magnitude_bits}[what](b, own), keys, j)
            least = _kth_key(b, keys, padded, k)
            found.left.set(b.sub(k, _count(b, keys, padded, ">", least)))
            with loop(b, padded, 16) as j:
                own, edge = b.get(keys, I32, j, 16), b.splat(least, 16)
                place = b.add(b.splat(b.trunc(j, I32), 16), ir.Constant(own.type, list(range(16))))
                larger, tied = (b.icmp_signed(order, own, edge) for order in (">", "=="))
                found.lanes(larger, tied, [place])

    return body


def _ask(b: Builder, positions: Any, k: Any, count: Any, arrays: list[tuple[Any, int]]) -> None:
    """Have the elements at position k brought nearer: arrays, and the bytes of their elements."""
    last = b.sub(count, c(1))
    place = b.get(positions, I64, b.select(b.icmp_signed("<", k, last), k, last))
    prefetch = b.declared("llvm.prefetch.p0", VOID, [PTR, I32, I32, I32])
    for array, size in arrays:
        where = at(b, array, b.mul(place, c(size)))
        b.call(prefetch, [where, number(I32, 0), number(I32, 3), number(I32, 1)])


def gather(storage: str) -> Any:
    """out = the elements at these positions; where there is a residual, held: its own."""

    def body(
        b: Builder, x: Any, scale: Any, residual: Any, decay: Any, positions: Any, count: Any,
        out: Any, held: Any,
    ) -> None:  # fmt: skip
        source = Source(b, storage, x, scale, residual, decay)
        arrays = [(x, 4), *([(residual, 2 if storage == "bfloat16" else 4)] if storage else [])]
        with loop(b, count) as k:
            _ask(b, positions, b.add(k, c(AHEAD)), count, arrays)
            place = b.get(positions, I64, k)
            b.put(source.load(place, 0), out, k)
            if storage:
                kind = I16 if storage == "bfloat16" else F32
                b.put(b.get(residual, kind, place), held, k)

    return body


def scatter(kind: str, effect: str) -> Any:
    """Values go to their positions in out (put), where the others become zero (set), or are added.

    size: the bytes of out.
    """
    number_kind = {"float32": F32, "uint16": I16}[kind]

    def body(b: Builder, out: Any, size: Any, positions: Any, count: Any, values: Any) -> None:
        if effect == "set":
            zero(b, out, size)
        with loop(b, count) as k:
            _ask(b, positions, b.add(k, c(AHEAD)), count, [(out, SIZES[number_kind])])
            place, value = b.get(positions, I64, k), b.get(values, number_kind, k)
            if effect == "add":
                value = b.fadd(b.get(out, number_kind, place), value)
            b.put(value, out, place)

    return body
