"""Functions that generated CPU kernels call for tables: a few numbers of a whole tensor."""

from __future__ import annotations

import numpy as np
from numba import njit

from compll.backends import cpu_ops as ops
from compll.backends.numbers import MEAN_LANES, MEAN_TILE


@njit(nogil=True, cache=True)
def quantiles_of(x, parts):  # type: ignore[no-untyped-def]
    """The parts - 1 elements that part the sorted x into equal parts."""
    n = len(x)
    keys = np.empty(n, np.int32)
    for i in range(n):
        keys[i] = ops.key(x[i])
    keys.sort()
    out = np.empty(parts - 1, np.float32)
    for j in range(1, parts):
        out[j - 1] = ops.unkey(keys[j * n // parts])
    return out


@njit(nogil=True, cache=True)
def bucket_of(x, edges):  # type: ignore[no-untyped-def]
    """How many of the ascending edges are not above x, by halving."""
    key, low, high = ops.key(x), 0, len(edges)
    while low < high:
        middle = (low + high) >> 1
        if ops.key(edges[middle]) <= key:
            low = middle + 1
        else:
            high = middle
    return np.int32(low)


@njit(nogil=True, cache=True)
def mean_by(index, x, size):  # type: ignore[no-untyped-def]
    """Mean of the x of each index (clipped to the table), in the order of [Note: order of sums]."""
    lanes = 1
    while lanes < MEAN_LANES and lanes * MEAN_TILE < len(x):
        lanes *= 2
    sums, counts = np.zeros((lanes, size), np.float64), np.zeros(size, np.int64)
    for o in range(0, len(x), MEAN_TILE):
        own = sums[o // MEAN_TILE % lanes]
        for i in range(o, min(o + MEAN_TILE, len(x))):
            place = min(max(np.int64(index[i]), 0), size - 1)
            own[place] += np.float64(x[i])
            counts[place] += 1
    while lanes > 1:
        lanes //= 2
        sums[:lanes] += sums[lanes : 2 * lanes]
    out = np.empty(size, np.float32)
    for j in range(size):
        mean = sums[0, j] / np.float64(max(counts[j], 1))
        out[j] = np.float32(np.nan) if np.isnan(mean) else np.float32(mean)
    return out


@njit(nogil=True, cache=True)
def table_at(table, i):  # type: ignore[no-untyped-def]
    """Value i of a table, clipped to its ends."""
    return table[min(max(np.int64(i), 0), len(table) - 1)]


@njit(nogil=True, cache=True)
def store_table(out, at, table):  # type: ignore[no-untyped-def]
    """A table's float32 values into a payload."""
    for j in range(len(table)):
        ops.store_float32(out, at + 4 * j, table[j])


@njit(nogil=True, cache=True)
def load_table(data, at, size):  # type: ignore[no-untyped-def]
    """Inverse of store_table."""
    table = np.empty(size, np.float32)
    for j in range(size):
        table[j] = ops.load_float32(data, at + 4 * j)
    return table
