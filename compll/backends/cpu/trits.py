"""Functions that generated CPU kernels call for trits and their runs (see trits.py)."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def pack_trits(codes, out, at, count):  # type: ignore[no-untyped-def]
    """Five of `count` codes a byte; codes has room for the digits beyond them."""
    width = (count + 4) // 5
    for i in range(count, 5 * width):
        codes[i] = np.uint8(1)
    target = out[at : at + width]
    a, b, c = codes[0:width], codes[width : 2 * width], codes[2 * width : 3 * width]
    d, e = codes[3 * width : 4 * width], codes[4 * width : 5 * width]
    for j in range(width):
        target[j] = np.uint8(81 * a[j] + 27 * b[j] + 9 * c[j] + 3 * d[j] + e[j])


@njit(nogil=True, cache=True)
def unpack_trits(data, at, codes, count):  # type: ignore[no-untyped-def]
    """Inverse of pack_trits."""
    width = (count + 4) // 5
    source = data[at : at + width]
    weight = np.uint32(81)
    for first in range(0, 5 * width, width):
        for j in range(min(width, count - first)):
            codes[first + j] = np.uint8(np.uint32(source[j]) // weight % np.uint32(3))
        weight //= np.uint32(3)


@njit(nogil=True, cache=True)
def shorten_runs(out, at, length, to):  # type: ignore[no-untyped-def]
    """Move `length` bytes of trits to `to` (at most `at`), shortened; where they end."""
    run = 0
    for i in range(at, at + length + 1):
        ones = i < at + length and out[i] == 121
        if run == 14 or (run > 0 and not ones):
            out[to] = np.uint8(121 if run == 1 else 241 + run)
            to += 1
            run = 0
        if ones:
            run += 1
        elif i < at + length:
            out[to] = out[i]
            to += 1
    return to


@njit(nogil=True, cache=True)
def runs_length(data, at, length):  # type: ignore[no-untyped-def]
    """How many bytes of trits `length` shortened bytes stand for."""
    total = np.int64(0)
    for i in range(at, at + length):
        byte = np.int64(data[i])
        total += byte - 241 if byte >= 243 else 1
    return total


@njit(nogil=True, cache=True)
def lengthen_runs(data, at, length, trits):  # type: ignore[no-untyped-def]
    """Inverse of shorten_runs, into an array of just the right size."""
    to = 0
    for i in range(at, at + length):
        byte = np.int64(data[i])
        if byte < 243:
            trits[to] = data[i]
            to += 1
            continue
        for _ in range(byte - 241):
            trits[to] = np.uint8(121)
            to += 1
