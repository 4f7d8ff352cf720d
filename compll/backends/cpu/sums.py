"""Sums by index on the CPU, those of numbers.py bit for bit, and values at indices."""

from __future__ import annotations

import numpy as np

from compll.backends.cpu.declare import kernel


@kernel("void(int32[::1], float32[::1], float64, float64, float32[::1])")
def sums(index, x, up, down, out):  # type: ignore[no-untyped-def]
    """out: see [Note: sums by index]."""
    whole = np.zeros(len(out), np.int64)
    for i in range(len(x)):
        place = min(max(int(index[i]), 0), len(out) - 1)
        whole[place] += np.int64(np.rint(np.float64(x[i]) * up))
    for j in range(len(out)):
        out[j] = np.float32(np.float64(whole[j]) * down)


@kernel("void(float32[::1], int32[::1], float32[::1])")
def values(table, index, out):  # type: ignore[no-untyped-def]
    """The values of a table at indices, clipped to it."""
    for i in range(len(index)):
        out[i] = table[min(max(int(index[i]), 0), len(table) - 1)]
