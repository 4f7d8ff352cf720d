"""Matrix products of the gradient plus its residual, which is not written down before.

[Note: fed products] PowerSGD reads one matrix three times a step, and the matrix is g = x * scale +
residual. To make an array of it costs more than the products. So these kernels compute an element of
g where they need it; the numbers are those of numerics/matrices.py, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compll.backends.cpu.load import plain, written
from compll.numerics.types import F32

LOOPS = "fed_loops"


class Factors(NamedTuple):
    """Two matrices in the type of their product's sums, float32 or float64."""

    left: NDArray[Any]
    right: NDArray[Any]


class Fed(NamedTuple):
    """The input of feedback, g = x * scale + residual, element by element, in rows of `cols`.

    The residual is float32, or uint16 with the bits of bfloat16.
    """

    x: F32
    scale: np.float32
    residual: NDArray[Any]
    cols: int

    @property
    def rows(self) -> int:
        """The last one may be incomplete; zeros follow it."""
        return -(-len(self.x) // self.cols)


def product(g: Fed, b: F32) -> F32:
    """The matrix of g times b."""
    width = b.shape[1] + b.shape[1] % 2
    right, out = np.zeros((g.cols, width)), np.empty((g.rows, width))
    right[:, : b.shape[1]] = b
    whole = len(g.x) // g.cols
    given = (g.x, g.scale, g.residual, g.cols, right)
    loops = written(LOOPS, g.residual.dtype)
    for c in range(0, width - width % 4, 4):
        loops.four(*given, c, out)
    if width % 4:
        loops.two(*given, width - 2, out)
    loops.rest(*given, whole - whole % 4, out)
    return np.ascontiguousarray(out[:, : b.shape[1]], np.float32)


def transposed(g: Fed, b: F32) -> F32:
    """The transpose of the matrix of g times b."""
    total = np.zeros((b.shape[1], g.cols))
    given = (g.x, g.scale, g.residual, g.cols)
    written(LOOPS, g.residual.dtype).across(*given, plain(b, np.float64), total)
    return np.ascontiguousarray(total.T, np.float32)


def decoded(x: F32, factors: Factors, *, add: bool) -> None:
    """Write the product of two matrices to x, or add it."""
    written(LOOPS).decode(x, *factors, add)


def settled(given: tuple[F32, np.float32, NDArray[Any]], factors: Factors, *, write: bool) -> None:
    """Keep in the residual what a product leaves of x * scale + residual (given in this order).

    write: x becomes the product.
    """
    written(LOOPS, given[2].dtype).settle(*given, *factors, write)


def sums(x: F32, scale: np.float32, residual: NDArray[Any], tile: int) -> F32:
    """Of each tile of g the sum, as in [Note: order of sums]."""
    out = np.empty(-(-len(x) // tile), np.float32)
    written(LOOPS, residual.dtype).sums(x, scale, residual, tile, out)
    return out


def gathered(
    x: F32, scale: np.float32, residual: NDArray[Any], at: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The elements of g at these positions."""
    out = np.empty(len(at), np.float32)
    written(LOOPS, residual.dtype).gather(x, scale, residual, plain(at, np.int64), out)
    return out


def placed(x: F32, at: NDArray[np.int64], values: F32, *, add: bool) -> None:
    """Write values at their positions to x, and zeros elsewhere; or add them."""
    written(LOOPS).place(x, plain(at, np.int64), plain(values), add)


def left(given: tuple[F32, np.float32, NDArray[Any]], at: NDArray[np.int64], values: F32) -> None:
    """Keep in the residual what values at their positions leave of x * scale + residual."""
    written(LOOPS, given[2].dtype).leave(*given, plain(at, np.int64), plain(values, np.float32))
