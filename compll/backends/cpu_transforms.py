"""The Walsh-Hadamard transform on the CPU: that of matrix_numbers.py, bit for bit."""

from __future__ import annotations

import numpy as np
from numba import njit

from compll.backends.matrix_numbers import F32, runs

f32 = np.float32


@njit(nogil=True, cache=True, error_model="numpy")
def blocks(x, out, size, factor):  # type: ignore[no-untyped-def]
    """Every run of `size` elements of x; two distances in each walk over a run."""
    for start in range(0, len(x), size):
        run = out[start : start + size]
        given = x[start : start + size]
        h = 1
        for i in range(size):
            run[i] = given[i]
        while 4 * h <= size:
            for i in range(0, size, 4 * h):
                a, b = run[i : i + h], run[i + h : i + 2 * h]
                c, d = run[i + 2 * h : i + 3 * h], run[i + 3 * h : i + 4 * h]
                for j in range(h):
                    p, q, r, s = a[j] + b[j], a[j] - b[j], c[j] + d[j], c[j] - d[j]
                    a[j], b[j], c[j], d[j] = p + r, q + s, p - r, q - s
            h *= 4
        if h < size:
            a, b = run[:h], run[h:]
            for j in range(h):
                a[j], b[j] = a[j] + b[j], a[j] - b[j]
        for i in range(size):
            run[i] *= factor


def hadamard(x: F32, block: int) -> F32:
    """The transform of each run; see [Note: hadamard]."""
    out = np.empty_like(x)
    for start, size in runs(len(x), block):
        end = start + (len(x) - start) // size * size
        blocks(x[start:end], out[start:end], size, f32(size**-0.5))
    return out
