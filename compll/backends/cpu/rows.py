"""Parts of rows of products of matrices, in vectors: see [Note: fed products] in cpu/fed.py.

Each element is a sum, in the order of the inner dimension, in the type that both matrices have. Many
stay in registers while it is walked: as loops of numba, which keep the sums in memory, decode took
twice the time.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from compll.backends.cpu.called import called
from compll.backends.cpu.ops import F32

__all__ = ["row_product"]
I32, I64, F64 = ir.IntType(32), ir.IntType(64), ir.DoubleType()
#: columns that a register holds, by type; registers of sums that are filled together
LANES, TOGETHER = {F32: 16, F64: 8}, 4
VECTOR = types.Array(types.float32, 1, "C")


def _every(b: Any, value: Any, count: int) -> Any:
    """A value in all lanes."""
    lanes = ir.VectorType(value.type, count)
    one = b.insert_element(ir.Constant(lanes, ir.Undefined), value, ir.Constant(I32, 0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, count), [0] * count))


class Row:
    """Emits the product of a row of `inner` elements with columns of a matrix."""

    def __init__(self, b: Any, row: Any, inner: Any, right: Any, cols: Any, out: Any) -> None:
        self.b, self.row, self.inner = b, row, inner
        self.right, self.cols, self.out = right, cols, out
        self.number = right.type.pointee
        self.lanes = LANES[self.number]

    def columns(self, j: Any, vectors: int, add: Any) -> None:
        """Columns from j on, in so many vectors; a single one where that is 0."""
        b, lanes = self.b, self.lanes
        kind = ir.VectorType(self.number, lanes) if vectors else self.number
        none = ir.Constant(kind, [0.0] * lanes if vectors else 0.0)
        sums = [cgutils.alloca_once_value(b, none) for _ in range(max(1, vectors))]
        for held in sums:
            b.store(none, held)
        with cgutils.for_range(b, self.inner) as loop:
            y = b.load(b.gep(self.row, [loop.index]))
            y = _every(b, y, lanes) if vectors else y
            start = b.add(b.mul(loop.index, self.cols), j)
            for number, held in enumerate(sums):
                at = b.gep(self.right, [b.add(start, ir.Constant(I64, lanes * number))])
                x = b.load(b.bitcast(at, kind.as_pointer()), align=4)
                b.store(b.fadd(b.load(held), b.fmul(y, x)), held)
        for number, held in enumerate(sums):
            at = b.gep(self.out, [b.add(j, ir.Constant(I64, lanes * number))])
            self.put(b.load(held), at, add, vectors)

    def put(self, value: Any, at: Any, add: Any, vectors: int) -> None:
        b, kind = self.b, ir.VectorType(F32, self.lanes) if vectors else F32
        at = b.bitcast(at, kind.as_pointer())
        value = value if value.type == kind else b.fptrunc(value, kind)
        with b.if_else(add) as (then, otherwise):
            with then:
                b.store(b.fadd(b.load(at, align=4), value), at, align=4)
            with otherwise:
                b.store(value, at, align=4)

    def run(self, count: Any, add: Any) -> None:
        """The first `count` columns."""
        b = self.b
        done = ir.Constant(I64, 0)
        for width in (TOGETHER * self.lanes, self.lanes, 1):
            steps = b.udiv(b.sub(count, done), ir.Constant(I64, width))
            with cgutils.for_range(b, steps) as loop:
                j = b.add(done, b.mul(loop.index, ir.Constant(I64, width)))
                self.columns(j, width // self.lanes, add)
            done = b.add(done, b.mul(steps, ir.Constant(I64, width)))


@intrinsic
def _row_product(
    typing: Any, a: Any, i: Any, right: Any, at: Any, x: Any, first: Any, count: Any, add: Any
) -> Any:
    """x[first : first + count] = (a[i] @ right)[at : at + count], or that added where `add`."""

    def emit(target: Any, b: Any, signature: Any, v: Any) -> Any:
        left, other = (target.make_array(a)(target, b, v[k]) for k in (0, 2))
        out = target.make_array(VECTOR)(target, b, v[4]).data
        inner = cgutils.unpack_tuple(b, left.shape, 2)[1]
        cols = cgutils.unpack_tuple(b, other.shape, 2)[1]
        given = [
            b.gep(left.data, [b.mul(v[1], inner)]), inner, b.gep(other.data, [v[3]]), cols,
            b.gep(out, [v[5]]), v[6], v[7],
        ]  # fmt: skip

        def build(inner: Any, *args: Any) -> None:
            Row(inner, *args[:5]).run(*args[5:])

        called(b, f"compll_row_product_{a.dtype.bitwidth}", given, build)
        return target.get_dummy_value()

    numbers = (types.int64, a, types.int64, VECTOR, types.int64, types.int64, types.boolean)
    return types.void(a, *numbers), emit


row_product: Any = _row_product
