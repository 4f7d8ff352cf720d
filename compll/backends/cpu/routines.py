"""Routines over matrices and whole arrays as LLVM functions: numerics/matrices.py, bit for bit.

Each takes addresses and numbers; matrices.py calls them. Products are in products.py, rows in
rows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from compll.backends.cpu import products, rows
from compll.backends.cpu.builder import (
    F32,
    F64,
    I1,
    I32,
    I64,
    PTR,
    VOID,
    Builder,
    Variable,
    at,
    c,
    loop,
    number,
)
from compll.backends.cpu.helpers import Helpers
from compll.backends.cpu.interface import ROUTINES
from compll.backends.cpu.lane_folds import halved
from compll.backends.cpu.products import WIDE, least_of
from compll.numerics.matrices import TINY
from compll.numerics.numbers import LANES

#: of the letters in interface.ROUTINES
TYPES = {"p": PTR, "i": I64, "f": F32, "d": F64, "b": I1}
#: elements of a transform that the first-level cache holds, as a power of two
CACHED = 12


def _dot(b: Builder, x: Any, y: Any, count: Any) -> Any:
    """In the order of [Note: orthonormal]; count: a multiple of LANES."""

    def products(first: Any) -> list[Any]:
        places = [b.add(first, c(k)) for k in range(0, LANES, WIDE)]
        return [b.fmul(b.get(x, F64, p, WIDE), b.get(y, F64, p, WIDE)) for p in places]

    sums = [Variable(b, value) for value in products(c(0))]
    with loop(b, count, LANES, c(LANES)) as k:
        for held, value in zip(sums, products(k), strict=True):
            held.set(b.fadd(held.get(), value))
    return halved(b, [held.get() for held in sums], WIDE)


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
                part = b.fmul(factor, b.get(other, F64, i, WIDE))
                b.put(b.fsub(b.get(row, F64, i, WIDE), part), row, i)
        after = b.intrinsic("sqrt", b.call(dot, [row, row, size]))
        least = b.fmul(before, number(F64, TINY))
        little = b.fcmp_ordered("<=", after, least)
        finite = b.fcmp_ordered("<", least, number(F64, float("inf")))
        gone = b.and_(little, finite)
        b.put(b.select(gone, c(0), c(1)), found, c(0))
        with b.if_then(b.not_(gone)), loop(b, size, WIDE) as i:
            b.put(b.fdiv(b.get(row, F64, i, WIDE), b.splat(after, WIDE)), row, i)

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
        x = [b.get(run, F32, place, lanes) for place in places]
        distance = 1
        while distance < count:
            for k in (k for k in range(count) if not k & distance):
                one, other = x[k], x[k + distance]
                x[k], x[k + distance] = b.fadd(one, other), b.fsub(one, other)
            distance *= 2
        for place, value in zip(places, x, strict=True):
            b.put(value, run, place)


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
                    b.put(_within(b, b.get(x, F32, place, 16), 16), out, place)
                b.call(walks, [at(b, out, b.mul(first, c(4))), c(4), near])
            b.call(walks, [at(b, out, b.mul(start, c(4))), near, bits])
            with loop(b, b.shl(c(1), bits), 16) as i:
                place = b.add(start, i)
                b.put(b.fmul(b.get(out, F32, place, 16), b.splat(factor, 16)), out, place)

    return body


def sum_by() -> Any:
    """sums [size], int64: the elements' units, added at their indices; see [Note: sums by index]."""

    def body(b: Builder, index: Any, x: Any, count: Any, up: Any, sums: Any, size: Any) -> None:
        most = b.trunc(b.sub(size, c(1)), I32)
        with loop(b, count) as i:
            place = b.get(index, I32, i)
            place = b.select(b.icmp_signed("<", place, number(I32, 0)), number(I32, 0), place)
            place = b.sext(b.select(b.icmp_signed(">", place, most), most, place), I64)
            units = b.intrinsic("rint", b.fmul(b.fpext(b.get(x, F32, i), F64), up))
            b.put(b.add(b.get(sums, I64, place), b.fptosi(units, I64)), sums, place)

    return body


#: by name, what gives a body: what builds the instructions, of the builder and the parameters
MAKERS: dict[str, Callable[..., Any]] = {
    "product": products.product, "across": products.across, "rows": products.rows,
    "direction": direction, "hadamard": hadamard, "sum_by": sum_by, "gather": rows.gather,
    "scatter": rows.scatter, "extreme": rows.extreme, "top_columns": rows.top_columns,
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
