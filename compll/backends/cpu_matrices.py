"""Matrix products and orthonormal bases on the CPU: those of matrix_numbers.py, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from compll.backends import cpu_transforms
from compll.backends.cpu_halves import held_value, kept_value
from compll.backends.matrix_numbers import F32, TINY, Algebra
from compll.backends.numbers import LANES

f32, f64 = np.float32, np.float64
#: columns of a result up to which rows are taken eight at a time
NARROW = 16


@njit(nogil=True, cache=True, error_model="numpy")
def narrow(a, b, out):  # type: ignore[no-untyped-def]
    """a @ b for few columns: eight rows at a time, which stay in cache for all of them."""
    rows, inner = a.shape
    cols = b.shape[1]
    right = np.empty((cols, inner), f64)
    for j in range(inner):
        for c in range(cols):
            right[c, j] = b[j, c]
    full = rows - rows % 8
    for i in range(0, full, 8):
        for c in range(cols):
            s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
            for j in range(inner):
                y = right[c, j]
                s0 += f64(a[i, j]) * y
                s1 += f64(a[i + 1, j]) * y
                s2 += f64(a[i + 2, j]) * y
                s3 += f64(a[i + 3, j]) * y
                s4 += f64(a[i + 4, j]) * y
                s5 += f64(a[i + 5, j]) * y
                s6 += f64(a[i + 6, j]) * y
                s7 += f64(a[i + 7, j]) * y
            for k, s in enumerate((s0, s1, s2, s3, s4, s5, s6, s7)):
                out[i + k, c] = f32(s)
    for i in range(full, rows):
        for c in range(cols):
            s = 0.0
            for j in range(inner):
                s += f64(a[i, j]) * right[c, j]
            out[i, c] = f32(s)


@njit(nogil=True, cache=True, error_model="numpy")
def wide(a, b, out):  # type: ignore[no-untyped-def]
    """a @ b for many columns, row by row."""
    rows, inner = a.shape
    cols = b.shape[1]
    total = np.empty(cols, f64)
    for i in range(rows):
        total[:] = 0.0
        for j in range(inner):
            y = f64(a[i, j])
            for c in range(cols):
                total[c] += y * f64(b[j, c])
        for c in range(cols):
            out[i, c] = f32(total[c])


@njit(nogil=True, cache=True, error_model="numpy")
def across(a, b, out):  # type: ignore[no-untyped-def]
    """transpose(a) @ b, reading a row by row."""
    inner, rows = a.shape
    total = np.zeros((b.shape[1], rows), f64)
    for j in range(inner):
        for c in range(b.shape[1]):
            y = f64(b[j, c])
            for i in range(rows):
                total[c, i] += f64(a[j, i]) * y
    for i in range(rows):
        for c in range(b.shape[1]):
            out[i, c] = f32(total[c, i])


def product(a: F32, b: F32) -> F32:
    """a @ b, whichever way a lies in memory."""
    out = np.empty((a.shape[0], b.shape[1]), np.float32)
    right = np.ascontiguousarray(b)
    if not a.flags.c_contiguous and a.T.flags.c_contiguous and b.shape[1] <= NARROW:
        across(a.T, right, out)
    else:
        (narrow if b.shape[1] <= NARROW else wide)(np.ascontiguousarray(a), right, out)
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def dot(a, b):  # type: ignore[no-untyped-def]
    """Over lanes; a and b are padded to a multiple of LANES."""
    lanes = np.empty(LANES, f64)
    for i in range(LANES):
        lanes[i] = a[i] * b[i]
    for k in range(LANES, len(a), LANES):
        for i in range(LANES):
            lanes[i] += a[k + i] * b[k + i]
    width = LANES // 2
    while width > 0:
        for i in range(width):
            lanes[i] += lanes[i + width]
        width //= 2
    return lanes[0]


@njit(nogil=True, cache=True, error_model="numpy")
def direction(basis, c):  # type: ignore[no-untyped-def]
    """See matrix_numbers._direction."""
    v = basis[c]
    before = np.sqrt(dot(v, v))
    for _ in range(2):
        for other in range(c):
            factor = dot(basis[other], v)
            for i in range(len(v)):
                v[i] -= factor * basis[other, i]
    after = np.sqrt(dot(v, v))
    if after <= TINY * before and TINY * before < np.inf:
        return False
    for i in range(len(v)):
        v[i] /= after
    return True


@njit(nogil=True, cache=True, error_model="numpy")
def columns(a, spare, out):  # type: ignore[no-untyped-def]
    """See matrix_numbers.orthonormal."""
    rows, cols = a.shape
    basis = np.zeros((cols, (rows + LANES - 1) // LANES * LANES), f64)
    for c in range(cols):
        for i in range(rows):
            basis[c, i] = a[i, c]
        if not direction(basis, c):
            basis[c] = 0.0
            for i in range(rows):
                basis[c, i] = spare[i, c]
            if not direction(basis, c):
                basis[c] = 0.0
    for i in range(rows):
        for c in range(cols):
            out[i, c] = f32(basis[c, i])


def orthonormal(a: F32, spare: F32) -> F32:
    """Orthonormal columns that span those of a, or of spare."""
    out = np.empty(a.shape, np.float32)
    columns(np.ascontiguousarray(a), np.ascontiguousarray(spare), out)
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def add_scaled(x, scale, residual, out):  # type: ignore[no-untyped-def]
    """out = x * scale + residual."""
    for i in range(len(x)):
        out[i] = x[i] * scale + held_value(residual[i])


def fed(x: F32, scale: np.float32, residual: NDArray[Any]) -> F32:
    """See matrix_numbers.fed."""
    out = np.empty(len(x), f32)  # by NumPy, which asks for huge pages; numba does not
    add_scaled(x, scale, residual, out)
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def left(held, g, out):  # type: ignore[no-untyped-def]
    """See matrix_numbers.left."""
    for i in range(len(held)):
        y = g[i] - out[i]
        held[i] = kept_value(y, held[i])


NUMBA = Algebra(product, orthonormal, cpu_transforms.hadamard, fed, left)
