"""Functions that generated CPU kernels call for tables: a few numbers of a whole tensor."""

from __future__ import annotations

import numpy as np
from numba import njit

from compll.backends.cpu import memory, ops
from compll.numerics.numbers import MEAN_LANES, MEAN_TILE

#: elements from which on counting beats sorting
MANY = 1 << 16
HALF = 1 << 16


@njit(nogil=True, cache=True)
def quantiles_of(x, parts):  # type: ignore[no-untyped-def]
    """The parts - 1 elements that part the sorted x into equal parts."""
    n = len(x)
    ranks = np.empty(parts - 1, np.int64)
    for j in range(1, parts):
        ranks[j - 1] = j * n // parts
    keys = by_counting(x, ranks) if n >= MANY else by_sorting(x, ranks)
    out = np.empty(parts - 1, np.float32)
    for j in range(parts - 1):
        out[j] = ops.unkey(keys[j])
    return out


@njit(nogil=True, cache=True)
def by_sorting(x, ranks):  # type: ignore[no-untyped-def]
    """The order keys of the elements at these ranks."""
    keys = np.empty(len(x), np.int32)
    for i in range(len(x)):
        keys[i] = ops.key(x[i])
    return ascending(keys)[ranks]


@njit(nogil=True, cache=True)
def ascending(keys):  # type: ignore[no-untyped-def]
    """Sorted int32 keys, by their bytes; keys is overwritten. (numba's own needs its lists.)"""
    other, first = np.empty(len(keys), np.int32), np.empty(257, np.int64)
    for shift in range(0, 32, 8):
        first[:] = 0
        for i in range(len(keys)):
            first[(((np.int64(keys[i]) + (1 << 31)) >> shift) & 255) + 1] += 1
        for byte in range(256):
            first[byte + 1] += first[byte]
        for i in range(len(keys)):
            digit = ((np.int64(keys[i]) + (1 << 31)) >> shift) & 255
            other[first[digit]] = keys[i]
            first[digit] += 1
        keys, other = other, keys
    return keys


@njit(nogil=True, cache=True)
def by_counting(x, ranks):  # type: ignore[no-untyped-def]
    """The same, by counting: the upper halves of all keys, then the next byte and the last one of
    the keys whose upper half is that of a rank, which are few, so that counts stay in the cache."""
    key, row, rest = np.zeros_like(ranks), np.zeros_like(ranks), ranks.copy()
    upper = np.zeros(HALF, np.int64)
    for i in range(len(x)):
        upper[half_of(ops.key(x[i]))] += 1
    halves = parted(upper, HALF, row, rest, key)
    count = 0
    for half in range(HALF):
        count += upper[half] if halves[half] > 0 else 0
    some = np.empty(count + 1, np.int32)  # one more, as each key is written before it is judged
    count = 0
    for i in range(len(x)):
        some[count] = ops.key(x[i])
        count += 1 if halves[half_of(some[count])] > 0 else 0
    middle, lower = np.zeros(256 * len(ranks), np.int64), np.zeros(256 * len(ranks), np.int64)
    for i in range(count):
        middle[256 * (halves[half_of(some[i])] - 1) + ((some[i] >> 8) & 255)] += 1
    bytes_ = parted(middle, 256, row, rest, key)
    for i in range(count):
        at = bytes_[256 * (halves[half_of(some[i])] - 1) + ((some[i] >> 8) & 255)]
        if at > 0:
            lower[256 * (at - 1) + (some[i] & 255)] += 1
    parted(lower, 256, row, rest, key)
    return (key - (1 << 31)).astype(np.int32)


@njit(nogil=True, cache=True)
def half_of(key):  # type: ignore[no-untyped-def]
    """The upper half of an order key, from 0."""
    return (np.int64(key) >> 16) + HALF // 2


@njit(nogil=True, cache=True)
def parted(counts, columns, row, rest, key):  # type: ignore[no-untyped-def]
    """Find ranks among counts: rest[j] is a rank within a row, then one within a cell, whose column
    is the next digit of key[j], and whose number, from 0, is row[j]. Returns numbers from 1, or 0.
    """
    cells, found = np.zeros(len(counts), np.int64), 0
    last, cell, before = -1, 0, 0
    for j in range(len(row)):  # ascending, as ranks are
        if row[j] != last:
            last, cell, before = row[j], row[j] * columns, 0
        while before + counts[cell] <= rest[j]:
            before += counts[cell]
            cell += 1
        if cells[cell] == 0:
            found += 1
            cells[cell] = found
        rest[j] -= before
        key[j] = key[j] * columns + cell - last * columns
        row[j] = cells[cell] - 1
    return cells


@njit(nogil=True, cache=True)
def starts_of(edges, n):  # type: ignore[no-untyped-def]
    """For the upper bits of each key (from 0), how many edges lie below all such, and one more, how
    many there are; and the shift."""
    shift = 16 if n >= MANY else 20
    starts, below = np.empty((1 << (32 - shift)) + 1, np.uint16), 0
    for place in range(len(starts)):
        first = (place << shift) - (1 << 31)
        while below < len(edges) and np.int64(ops.key(edges[below])) < first:
            below += 1
        starts[place] = below
    return starts, shift


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
        for lane in range(lanes):
            for j in range(size):
                sums[lane, j] += sums[lanes + lane, j]
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
        memory.store_float32(out, at + 4 * j, table[j])


@njit(nogil=True, cache=True)
def load_table(data, at, size):  # type: ignore[no-untyped-def]
    """Inverse of store_table."""
    table = np.empty(size, np.float32)
    for j in range(size):
        table[j] = memory.load_float32(data, at + 4 * j)
    return table
