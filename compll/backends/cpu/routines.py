"""Routines over matrices and whole arrays as LLVM functions: numerics/matrices.py, bit for bit.

Each takes addresses and numbers; matrices.py calls them. Products are in products.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from compll.backends.cpu import products
from compll.backends.cpu.builder import (
    F32,
    F64,
    I1,
    I16,
    I32,
    I64,
    PTR,
    VOID,
    Builder,
    at,
    loop,
    number,
)
from compll.backends.cpu.float_bits import key, magnitude_bits
from compll.backends.cpu.helpers import Helpers
from compll.backends.cpu.interface import ROUTINES
from compll.backends.cpu.lane_folds import halved
from compll.backends.cpu.past_cache import zero
from compll.backends.cpu.products import WIDE, Source, c, get, least_of, put
from compll.numerics.matrices import TINY
from compll.numerics.numbers import LANES

#: of the letters in interface.ROUTINES
TYPES = {"p": PTR, "i": I64, "f": F32, "d": F64, "b": I1}
#: elements of a transform that the first-level cache holds, as a power of two
CACHED = 12
#: elements that are looked at together
MANY = 64


def _dot(b: Builder, x: Any, y: Any, count: Any) -> Any:
    """In the order of [Note: orthonormal]; count: a multiple of LANES."""
    rooms = [b.room(F64, WIDE) for _ in range(LANES // WIDE)]
    shape = ir.VectorType(F64, WIDE)

    def products(first: Any) -> list[Any]:
        places = [b.add(first, c(WIDE * k)) for k in range(len(rooms))]
        return [b.fmul(get(b, x, F64, p, WIDE), get(b, y, F64, p, WIDE)) for p in places]

    for room, value in zip(rooms, products(c(0)), strict=True):
        b.store(value, room)
    with loop(b, count, LANES, c(LANES)) as k:
        for room, value in zip(rooms, products(k), strict=True):
            b.store(b.fadd(b.load(room, typ=shape), value), room)
    return halved(b, [b.load(room, typ=shape) for room in rooms], WIDE)


def direction() -> Any:
    """Make row `place` of basis [_, size] orthogonal to those before it, of length one.

    found: int64, becomes 0 where nothing is left; see [Note: orthonormal].
    """

    def body(b: Builder, basis: Any, place: Any, size: Any, found: Any) -> None:
        dot = Helpers(b.module).get("dot", F64, [PTR, PTR, I64], _dot)
        row = at(b, basis, b.mul(b.mul(place, size), c(8)))
        before = b.intrinsic("sqrt", b.call(dot, [row, row, size]))
        with loop(b, c(2)), loop(b, place) as k:
            other = at(b, basis, b.mul(b.mul(k, size), c(8)))
            factor = b.splat(b.call(dot, [other, row, size]), WIDE)
            with loop(b, size, WIDE) as i:
                part = b.fmul(factor, get(b, other, F64, i, WIDE))
                put(b, b.fsub(get(b, row, F64, i, WIDE), part), row, i)
        after = b.intrinsic("sqrt", b.call(dot, [row, row, size]))
        least = b.fmul(before, number(F64, TINY))
        little = b.fcmp_ordered("<=", after, least)
        finite = b.fcmp_ordered("<", least, number(F64, float("inf")))
        gone = b.and_(little, finite)
        put(b, b.select(gone, c(0), c(1)), found, c(0))
        with b.if_then(b.not_(gone)), loop(b, size, WIDE) as i:
            put(b, b.fdiv(get(b, row, F64, i, WIDE), b.splat(after, WIDE)), row, i)

    return body


def _within(b: Builder, x: Any, count: int) -> Any:
    """Distances 1, 2, 4, ... of a vector's lanes."""
    indices = ir.VectorType(I32, count)
    h = 1
    while h < count:
        swapped = ir.Constant(indices, [lane ^ h for lane in range(count)])
        other = b.shuffle_vector(x, x, swapped)
        total, difference = b.fadd(x, other), b.fsub(other, x)
        order = [lane + count * bool(lane & h) for lane in range(count)]
        x = b.shuffle_vector(total, difference, ir.Constant(indices, order))
        h *= 2
    return x


def _apart(b: Builder, run: Any, h: Any, count: int, lanes: int) -> None:
    """Distance h, of two parts of h elements; and distance 2 h, of four."""
    with loop(b, h, lanes) as j:
        places = [b.add(j, b.mul(h, c(k))) for k in range(count)]
        x = [get(b, run, F32, place, lanes) for place in places]
        distance = 1
        while distance < count:
            for k in (k for k in range(count) if not k & distance):
                one, other = x[k], x[k + distance]
                x[k], x[k + distance] = b.fadd(one, other), b.fsub(one, other)
            distance *= 2
        for place, value in zip(places, x, strict=True):
            put(b, value, run, place)


def _walks(b: Builder, run: Any, low: Any, high: Any) -> None:
    """Distances 2**low .. 2**(high - 1) of a run of 2**high elements, two in each walk."""
    size = b.shl(c(1), high)
    twos = b.and_(b.sub(high, low), c(-2))
    with loop(b, twos, 2) as k:
        h = b.shl(c(1), b.add(low, k))
        four = b.shl(h, c(2))
        with loop(b, b.udiv(size, four)) as i:
            _apart(b, at(b, run, b.mul(b.mul(i, four), c(4))), h, 4, 16)
    with b.if_then(b.icmp_signed("!=", twos, b.sub(high, low))):
        _apart(b, run, b.lshr(size, c(1)), 2, 16)


def hadamard() -> Any:
    """out = the transform of each run of 2**bits elements of x, 16 or more, times a factor.

    A part that the first-level cache holds goes through all of its distances at once.
    """

    def body(b: Builder, x: Any, out: Any, count: Any, bits: Any, factor: Any) -> None:
        walks = Helpers(b.module).get("walks", VOID, [PTR, I64, I64], _walks)
        near = least_of(b, c(CACHED), bits)
        with loop(b, b.lshr(count, bits)) as r:
            start = b.shl(r, bits)
            with loop(b, b.shl(c(1), b.sub(bits, near))) as p:
                first = b.add(start, b.shl(p, near))
                with loop(b, b.shl(c(1), near), 16) as i:
                    place = b.add(first, i)
                    put(b, _within(b, get(b, x, F32, place, 16), 16), out, place)
                b.call(walks, [at(b, out, b.mul(first, c(4))), c(4), near])
            b.call(walks, [at(b, out, b.mul(start, c(4))), near, bits])
            with loop(b, b.shl(c(1), bits), 16) as i:
                place = b.add(start, i)
                put(b, b.fmul(get(b, out, F32, place, 16), b.splat(factor, 16)), out, place)

    return body


def sum_by() -> Any:
    """sums [size], int64: the elements' units, added at their indices; see [Note: sums by index]."""

    def body(b: Builder, index: Any, x: Any, count: Any, up: Any, sums: Any, size: Any) -> None:
        most = b.trunc(b.sub(size, c(1)), I32)
        with loop(b, count) as i:
            place = get(b, index, I32, i)
            place = b.select(b.icmp_signed("<", place, number(I32, 0)), number(I32, 0), place)
            place = b.sext(b.select(b.icmp_signed(">", place, most), most, place), I64)
            units = b.intrinsic("rint", b.fmul(b.fpext(get(b, x, F32, i), F64), up))
            put(b, b.add(get(b, sums, I64, place), b.fptosi(units, I64)), sums, place)

    return body


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
            best, parts = b.room(I32), b.room(I32, MANY)
            kind = ir.VectorType(I32, MANY)
            if side == "row":
                first = get(b, out, I32, i)
                b.store(first, best)
                b.store(b.splat(first, MANY), parts)
            for lanes, begin, end in ((MANY, c(0), whole), (0, whole, cols)):
                held = parts if lanes else best
                with loop(b, end, max(1, lanes), begin) as k:
                    keys = key(b, get(b, x, F32, b.add(start, k), lanes))
                    if side == "row":
                        b.store(better(b, keys, b.load(held, typ=keys.type)), held)
                    else:
                        put(b, better(b, keys, get(b, out, I32, k, lanes)), out, k)
            if side == "row":
                found = b.intrinsic(f"vector.reduce.s{what}", b.load(parts, typ=kind))
                put(b, better(b, found, b.load(best, typ=I32)), out, i)

    return body


def _count(b: Builder, keys: Any, count: Any, order: str, than: Any) -> Any:
    """How many int32 keys, a multiple of MANY, are > or >= another."""
    kind = ir.VectorType(I32, MANY)
    held = b.room(I32, MANY)
    b.store(ir.Constant(kind, None), held)
    with loop(b, count, MANY) as j:
        hit = b.icmp_signed(order, get(b, keys, I32, j, MANY), b.splat(than, MANY))
        b.store(b.sub(b.load(held, typ=kind), b.sext(hit, kind)), held)
    return b.sext(b.intrinsic("vector.reduce.add", b.load(held, typ=kind)), I64)


def _kth_key(b: Builder, keys: Any, count: Any, k: Any) -> Any:
    """The k-th largest of keys, or another that as many are at least.

    Bit by bit, until as many are found: they are few, and lie in the cache.
    """
    lowest, found, number_of = number(I32, -(2**31)), b.room(I32), b.room(I64)
    b.store(number(I32, 0), found)
    b.store(count, number_of)
    with loop(b, c(32)) as step:
        with b.if_then(b.icmp_signed(">", b.load(number_of, typ=I64), k)):
            bit = b.lshr(lowest, b.trunc(step, I32))
            tried = b.or_(b.load(found, typ=I32), bit)
            more = _count(b, keys, count, ">=", b.xor(tried, lowest))
            with b.if_then(b.icmp_signed(">=", more, k)):
                b.store(tried, found)
                b.store(more, number_of)
    return b.xor(b.load(found, typ=I32), lowest)


def top_columns(what: str) -> Any:
    """out [rows, k], int32: where the k largest elements of each row of x are, ascending.

    what: "key", or "magnitude" for the largest magnitudes. k: at most cols. keys: room for a row, a
    multiple of MANY, the least int32 behind its end. One element more than k is written of a row.
    """

    def body(b: Builder, x: Any, rows: Any, cols: Any, k: Any, out: Any, keys: Any) -> None:
        number_of, ties = b.room(I64), b.room(I64)
        whole = b.and_(cols, c(-16))
        padded = b.and_(b.add(cols, c(MANY - 1)), c(-MANY))
        with loop(b, rows) as i:
            start = b.mul(i, cols)
            for lanes, begin, end in ((16, c(0), whole), (0, whole, cols)):
                with loop(b, end, max(1, lanes), begin) as j:
                    own = get(b, x, F32, b.add(start, j), lanes)
                    put(b, {"key": key, "magnitude": magnitude_bits}[what](b, own), keys, j)
            least = _kth_key(b, keys, padded, k)
            b.store(b.sub(k, _count(b, keys, padded, ">", least)), ties)
            b.store(b.mul(i, k), number_of)
            with loop(b, cols) as j:
                own, left = get(b, keys, I32, j), b.load(ties, typ=I64)
                equal = b.icmp_signed("==", own, least)
                tied = b.and_(equal, b.icmp_signed(">", left, c(0)))
                hit = b.or_(b.icmp_signed(">", own, least), tied)
                place = b.load(number_of, typ=I64)
                put(b, b.trunc(j, I32), out, place)
                b.store(b.add(place, b.zext(hit, I64)), number_of)
                b.store(b.sub(left, b.zext(tied, I64)), ties)

    return body


def gather(storage: str) -> Any:
    """out = the elements at these positions; where there is a residual, held: its own."""

    def body(
        b: Builder, x: Any, scale: Any, residual: Any, decay: Any, positions: Any, count: Any,
        out: Any, held: Any,
    ) -> None:  # fmt: skip
        source = Source(b, storage, x, scale, residual, decay)
        with loop(b, count) as k:
            place = get(b, positions, I64, k)
            put(b, source.load(place, 0), out, k)
            if storage:
                kind = I16 if storage == "bfloat16" else F32
                put(b, get(b, residual, kind, place), held, k)

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
            place, value = get(b, positions, I64, k), get(b, values, number_kind, k)
            if effect == "add":
                value = b.fadd(get(b, out, number_kind, place), value)
            put(b, value, out, place)

    return body


#: by name, what gives a body: what builds the instructions, of the builder and the parameters
MAKERS: dict[str, Callable[..., Any]] = {
    "product": products.product, "across": products.across, "rows": products.rows,
    "direction": direction, "hadamard": hadamard, "sum_by": sum_by, "gather": gather, "extreme": extreme, "top_columns": top_columns, "scatter": scatter,
}  # fmt: skip


def text(name: str, kinds: tuple[str, ...]) -> str:
    """The LLVM IR of a routine."""
    module = ir.Module(name)
    parameters = [TYPES[letter] for letter in ROUTINES[name]]
    function = ir.Function(module, ir.FunctionType(VOID, parameters), name)
    b = Builder(function.append_basic_block("entry"))
    MAKERS[name](*kinds)(b, *function.args)
    b.ret_void()
    return str(module)
