"""Sizes of matrices: functions of n alone, so that payloads have a known bound.

A dimension is an integer expression with the parameters replaced by their values. Expressions are
interned, so two dimensions are equal when they are the same object.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from compll.errors import UsageError
from compll.ir.expr import Expr
from compll.ir.static import evaluate

#: elements that a matrix of a tiny tensor may have; of a large one, ROOM times the tensor's
LEAST, ROOM = 1 << 20, 64
#: elements of any matrix: positions are int32, also those of the lanes of a last tile behind
#: them; a tile has at most 2**14
LARGEST = 2**31 - 2**14
#: the longest inner dimension of products with float32 sums; CUDA computes their elements on reads
SHORT = 8
#: products of at most this many columns read each row of the first matrix once
NARROW = 16


def extents(dims: tuple[Expr, ...], n: int) -> tuple[int, int]:
    """Rows and columns for n elements. Raises UsageError for over max(LEAST, ROOM * n) elements, or
    over LARGEST."""
    rows, cols = (extent(d, n) for d in dims)
    if rows * cols > max(LEAST, ROOM * n):
        raise UsageError(
            f"a matrix of {rows} x {cols} elements for a tensor of {n}: "
            "`when:` in the spec can exclude such tensors"
        )
    if rows * cols > LARGEST:
        raise UsageError(
            f"a matrix of {rows} x {cols} elements for a tensor of {n}: positions are int32, too "
            f"small for more than {LARGEST}; encode the tensor in parts"
        )
    return rows, cols


@lru_cache(maxsize=4096)
def extent(dim: Expr, n: int) -> int:
    """A dimension for n elements, at least 1. Cached, as small tensors ask for it in every step."""
    value = float(evaluate(dim, {"n": n}))
    return int(min(value, 2.0**62)) if value >= 1 else 1


def check_rooms(rooms: Iterable[tuple[str, tuple[Expr, ...]]], n: int) -> None:
    """Raise UsageError if a matrix has fewer elements than the piece of n.

    rooms: kind, rows and columns of each matrix. A matrix of kind "matrix" stores the elements, one
    of kind "flat" replaces them; "" is for other matrices, and only their size is checked.
    """
    for kind, dims in rooms if n else ():
        rows, cols = extents(dims, n)
        if kind and rows * cols < n:
            raise UsageError(
                f"a matrix of {rows} x {cols} has no room for {n} elements"
                if kind == "matrix"
                else f"flat: a matrix of {rows * cols} elements, {n} are needed"
            )


def short(product: Expr) -> bool:
    """True if the inner dimension of a product is a constant of at most SHORT."""
    inner = product.args[0].type.dims[1]
    return inner.op == "const" and int(inner.value) <= SHORT
