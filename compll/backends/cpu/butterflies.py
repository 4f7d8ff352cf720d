"""Steps of the Walsh-Hadamard transform in vectors: see [Note: hadamard] in numerics/matrices.py."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from compll.backends.cpu.called import called
from compll.backends.cpu.ops import F32

__all__ = ["LANES", "pairs", "quads", "sixteens"]
LANES = 16
VECTOR = ir.VectorType(F32, LANES)
I32, I64 = ir.IntType(32), ir.IntType(64)
ARRAY = types.Array(types.float32, 1, "C")


def _lanes(b: Any, x: Any, y: Any, order: list[int]) -> Any:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, LANES), order))


def _within(b: Any, x: Any) -> Any:
    """Distances 1, 2, 4 and 8."""
    for h in (1, 2, 4, 8):
        other = _lanes(b, x, x, [lane ^ h for lane in range(LANES)])
        total, difference = b.fadd(x, other), b.fsub(other, x)
        order = [lane + LANES * bool(lane & h) for lane in range(LANES)]
        x = _lanes(b, total, difference, order)
    return x


def _at(b: Any, pointer: Any, index: Any) -> Any:
    return b.bitcast(b.gep(pointer, [index]), VECTOR.as_pointer())


def _sixteens(b: Any, source: Any, out: Any, count: Any) -> None:
    """Distances below 16, of so many elements, to out."""
    with cgutils.for_range(b, b.udiv(count, ir.Constant(I64, LANES))) as loop:
        at = b.mul(loop.index, ir.Constant(I64, LANES))
        x = _within(b, b.load(_at(b, source, at), align=4))
        b.store(x, _at(b, out, at), align=4)


def _apart(b: Any, run: Any, h: Any, number: int) -> None:
    """Distance h, of two parts of h elements; and distance 2 h, of four."""
    with cgutils.for_range(b, b.udiv(h, ir.Constant(I64, LANES))) as loop:
        at = b.mul(loop.index, ir.Constant(I64, LANES))
        places = [_at(b, run, b.add(at, b.mul(h, ir.Constant(I64, k)))) for k in range(number)]
        x = [b.load(place, align=4) for place in places]
        x = [_both(b, x[k], x[k + 1]) for k in range(0, number, 2)]
        if number == 4:
            (p, q), (r, s) = x
            x = [*zip(_both(b, p, r), _both(b, q, s), strict=True)]
        for place, value in zip(places, [v for two in x for v in two], strict=True):
            b.store(value, place, align=4)


def _both(b: Any, x: Any, y: Any) -> tuple[Any, Any]:
    return b.fadd(x, y), b.fsub(x, y)


def _data(target: Any, b: Any, array: Any, at: Any) -> Any:
    return b.gep(target.make_array(ARRAY)(target, b, array).data, [at])


@intrinsic
def _first(typing: Any, x: Any, i: Any, out: Any, j: Any, count: Any) -> Any:
    """sixteens(x, i, out, j, count): out[j : j + count] = x[i : i + count], distances below 16."""

    def emit(target: Any, b: Any, signature: Any, v: Any) -> Any:
        given = [_data(target, b, v[0], v[1]), _data(target, b, v[2], v[3]), v[4]]
        called(b, "compll_sixteens", given, _sixteens)
        return target.get_dummy_value()

    return types.void(ARRAY, types.int64, ARRAY, types.int64, types.int64), emit


def _further(number: int) -> Any:
    """pairs(x, i, h): of x[i : i + 2 h] distance h; quads: of 4 h elements also distance 2 h."""

    def declare(typing: Any, x: Any, i: Any, h: Any) -> Any:
        def emit(target: Any, b: Any, signature: Any, v: Any) -> Any:
            def build(inner: Any, run: Any, h: Any) -> None:
                _apart(inner, run, h, number)

            called(b, f"compll_apart{number}", [_data(target, b, v[0], v[1]), v[2]], build)
            return target.get_dummy_value()

        return types.void(ARRAY, types.int64, types.int64), emit

    return intrinsic(declare)


sixteens: Any = _first
pairs, quads = _further(2), _further(4)
