"""Matrix products, orthonormal bases and the Hadamard transform on the CPU: those of numerics/matrices.py, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.backends.cpu.load import plain, written
from compll.numerics.matrices import Algebra, runs
from compll.numerics.numbers import sum_units
from compll.numerics.types import F32, I32

LOOPS, SUMS = "array_loops", "sums"
#: columns of a result up to which rows are taken eight at a time
NARROW = 16


def product(a: F32, b: F32, short: bool) -> F32:
    """a @ b, whichever way a lies in memory."""
    out = np.empty((a.shape[0], b.shape[1]), np.float32)
    right = plain(b)
    loops = written(LOOPS)
    if short:
        loops.short_product(plain(a), right, out.reshape(-1))
    elif not a.flags.c_contiguous and a.T.flags.c_contiguous and b.shape[1] <= NARROW:
        loops.across(plain(a.T), right, out)
    else:
        (loops.narrow if b.shape[1] <= NARROW else loops.wide)(plain(a), right, out)
    return out


def orthonormal(a: F32, spare: F32) -> F32:
    """Orthonormal columns that span those of a, or of spare."""
    out = np.empty(a.shape, np.float32)
    written(LOOPS).columns(plain(a), plain(spare), out)
    return out


def fed(x: F32, scale: np.float32, residual: NDArray[Any]) -> F32:
    """See matrix_numbers.fed."""
    out = np.empty(len(x), np.float32)  # by NumPy, which asks for huge pages; numba does not
    written(LOOPS, residual.dtype).add_scaled(plain(x), scale, residual, out)
    return out


def left(held: NDArray[Any], g: F32, out: F32) -> None:
    """See matrix_numbers.left."""
    written(LOOPS, held.dtype).left(held, plain(g), plain(out))


def hadamard(x: F32, block: int) -> F32:
    """The transform of each run; see [Note: hadamard]."""
    x, blocks = plain(x), written(LOOPS).blocks
    out = np.empty_like(x)
    for start, size in runs(len(x), block):
        end = start + (len(x) - start) // size * size
        blocks(x[start:end], out[start:end], size, np.float32(size**-0.5))
    return out


def sum_by(index: I32, x: F32, size: int) -> F32:
    """See numbers.sum_by."""
    up, down = sum_units(x)
    out = np.full(size, np.nan, np.float32)
    if not math.isnan(up):
        written(SUMS).sums(plain(index, np.int32), plain(x), up, down, out)
    return out


def lookup(table: F32, index: I32) -> F32:
    """See matrix_numbers.lookup."""
    out = np.empty(len(index), np.float32)
    written(SUMS).values(plain(table), plain(index, np.int32), out)
    return out


NUMBA = Algebra(product, orthonormal, hadamard, sum_by, lookup, fed, left)
