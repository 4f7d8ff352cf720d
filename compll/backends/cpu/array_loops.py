"""Loops over matrices and whole arrays, for cpu/matrices.py.

Functions with a signature are what others call, through cpu_load.written, which may do without
numba and so without importing this module.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from compll.backends.cpu.butterflies import LANES as LANES_OF_RUNS
from compll.backends.cpu.butterflies import pairs, quads, sixteens
from compll.backends.cpu.declare import loop
from compll.backends.cpu.halves import held_value, kept_value
from compll.backends.cpu.rows import row_product
from compll.numerics.matrices import TINY
from compll.numerics.numbers import LANES

f32, f64 = np.float32, np.float64
#: elements of a transform that the first-level cache holds
PART = 4096


@loop("float32[:, ::1], float32[:, ::1], float32[::1]")
def short_product(a, b, out):  # type: ignore[no-untyped-def]
    """a @ b with sums in float32, row after row."""
    cols = b.shape[1]
    for i in range(len(a)):
        row_product(a, i, b, 0, out, i * cols, cols, False)


@loop("float32[:, ::1], float32[:, ::1], float32[:, ::1]")
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


@loop("float32[:, ::1], float32[:, ::1], float32[:, ::1]")
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


@loop("float32[:, ::1], float32[:, ::1], float32[:, ::1]")
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


@loop("float32[:, ::1], float32[:, ::1], float32[:, ::1]")
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


@loop("float32[::1], float32, {}[::1], float32[::1]")
def add_scaled(x, scale, residual, out):  # type: ignore[no-untyped-def]
    """out = x * scale + residual."""
    for i in range(len(x)):
        out[i] = x[i] * scale + held_value(residual[i])


@loop("{}[::1], float32[::1], float32[::1]")
def left(held, g, out):  # type: ignore[no-untyped-def]
    """See matrix_numbers.left."""
    for i in range(len(held)):
        y = g[i] - out[i]
        held[i] = kept_value(y, held[i])


@loop("float32[::1], float32[::1], int64, float32")
def blocks(x, out, size, factor):  # type: ignore[no-untyped-def]
    """Every run of `size` elements of x; two distances in each walk over a run.

    A part that the first-level cache holds goes through all of its distances at once.
    """
    part = min(size, PART)
    for start in range(0, len(x), size):
        if size < LANES_OF_RUNS:
            short(x[start : start + size], out[start : start + size])
        else:
            for o in range(start, start + size, part):
                sixteens(x, o, out, o, part)
                walks(out, o, LANES_OF_RUNS, part)
            walks(out, start, part, size)
        run = out[start : start + size]
        for i in range(size):
            run[i] *= factor


@njit(nogil=True, cache=True)
def walks(x, start, h, size):  # type: ignore[no-untyped-def]
    """Distances from h on of x[start : start + size]."""
    while 4 * h <= size:
        for i in range(start, start + size, 4 * h):
            quads(x, i, h)
        h *= 4
    if h < size:
        pairs(x, start, h)


@njit(nogil=True, cache=True)
def short(given, run):  # type: ignore[no-untyped-def]
    """The transform, without the factor, of fewer elements than a vector holds."""
    for i in range(len(run)):
        run[i] = given[i]
    h = 1
    while h < len(run):
        for i in range(0, len(run), 2 * h):
            for j in range(i, i + h):
                run[j], run[j + h] = run[j] + run[j + h], run[j] - run[j + h]
        h *= 2
