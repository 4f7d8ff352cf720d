"""Golomb and Elias streams of positions for the CPU kernels: [Note: bit streams]."""

from __future__ import annotations

import numpy as np
from numba import njit

MOST_BITS = 40
FAILED = np.int64(-1)


@njit(nogil=True, cache=True)
def rice_parameter(count, n):  # type: ignore[no-untyped-def]
    """See rice_parameter in layout.py."""
    mean = 9624 * n // (10000 * max(count, 1))
    b = 0
    while mean > 1:
        mean >>= 1
        b += 1
    return b


@njit(nogil=True, cache=True, inline="always")
def put(out, bit, value, count):  # type: ignore[no-untyped-def]
    """Write bits from bit number `bit` of `out` on; a byte is cleared when its first bit comes."""
    for i in range(count):
        if bit & 7 == 0:
            out[bit >> 3] = np.uint8(0)
        out[bit >> 3] |= np.uint8(((value >> i) & 1) << (bit & 7))
        bit += 1
    return bit


@njit(nogil=True, cache=True)
def width(value):  # type: ignore[no-untyped-def]
    """Bits of a positive integer."""
    bits = 0
    while value > 0:
        value >>= 1
        bits += 1
    return bits


@njit(nogil=True, cache=True)
def store_golomb(positions, count, out, at, n):  # type: ignore[no-untyped-def]
    """Write `count` ascending positions below n; where they end."""
    b = rice_parameter(count, n)
    out[at] = np.uint8(b)
    bit, before = 8 * (at + 1), np.int64(-1)
    for j in range(count):
        d = positions[j] - before - 1
        before = positions[j]
        for _ in range(d >> b):
            bit = put(out, bit, 1, 1)
        bit = put(out, bit, 0, 1)
        bit = put(out, bit, d & ((np.int64(1) << b) - 1), b)
    return (bit + 7) >> 3


@njit(nogil=True, cache=True)
def store_elias(positions, count, out, at, n):  # type: ignore[no-untyped-def]
    """Write `count` ascending positions; where they end."""
    bit, before = 8 * at, np.int64(-1)
    for j in range(count):
        v = positions[j] - before
        before = positions[j]
        low = width(v) - 1
        m = width(low + 1) - 1
        bit = put(out, bit, np.int64(1) << m, m + 1)
        bit = put(out, bit, low + 1 - (np.int64(1) << m), m)
        bit = put(out, bit, v - (np.int64(1) << low), low)
    return (bit + 7) >> 3


@njit(nogil=True, cache=True, inline="always")
def take(data, bit, end, count):  # type: ignore[no-untyped-def]
    """The next bits, or FAILED beyond bit number `end`."""
    if bit + count > end:
        return FAILED
    value = np.int64(0)
    for i in range(count):
        value |= np.int64((data[(bit + i) >> 3] >> ((bit + i) & 7)) & 1) << i
    return value


@njit(nogil=True, cache=True)
def run(data, bit, end, kind):  # type: ignore[no-untyped-def]
    """How many bits like `kind` come next, or FAILED when none ends them."""
    count = np.int64(0)
    while bit + count < end:
        if (data[(bit + count) >> 3] >> ((bit + count) & 7)) & 1 != kind:
            return count
        count += 1
    return FAILED


@njit(nogil=True, cache=True)
def ended(data, bit, end):  # type: ignore[no-untyped-def]
    """Whether only the last byte's zeros are left."""
    return end - bit < 8 and take(data, bit, end, end - bit) == 0


@njit(nogil=True, cache=True)
def scan_golomb(data, at, length, count, n, positions, keep):  # type: ignore[no-untyped-def]
    """Read `count` positions, all below n; whether the bytes are exactly that."""
    if length < 1 or data[at] > MOST_BITS:
        return False
    b = np.int64(data[at])
    bit, end, before = 8 * (at + 1), 8 * (at + length), np.int64(-1)
    for j in range(count):
        ones = run(data, bit, end, 1)
        if ones == FAILED or (ones << b) >= n:
            return False
        bit += ones + 1
        rest = take(data, bit, end, b)
        if rest == FAILED:
            return False
        bit += b
        before += (ones << b) + rest + 1
        if before >= n:
            return False
        if keep:
            positions[j] = before
    return ended(data, bit, end)


@njit(nogil=True, cache=True)
def scan_elias(data, at, length, count, n, positions, keep):  # type: ignore[no-untyped-def]
    """Read `count` positions, all below n; whether the bytes are exactly that."""
    bit, end, before = 8 * at, 8 * (at + length), np.int64(-1)
    for j in range(count):
        m = run(data, bit, end, 0)
        if m == FAILED or m > 5:
            return False
        bit += m + 1
        low = take(data, bit, end, m)
        if low == FAILED:
            return False
        bit += m
        low += (np.int64(1) << m) - 1
        if low > MOST_BITS:
            return False
        rest = take(data, bit, end, low)
        if rest == FAILED:
            return False
        bit += low
        before += (np.int64(1) << low) + rest
        if before >= n:
            return False
        if keep:
            positions[j] = before
    return ended(data, bit, end)


@njit(nogil=True, cache=True)
def load_golomb(data, at, length, count, n, positions):  # type: ignore[no-untyped-def]
    """The positions of bytes that check_golomb found right."""
    scan_golomb(data, at, length, count, n, positions, True)


@njit(nogil=True, cache=True)
def load_elias(data, at, length, count, n, positions):  # type: ignore[no-untyped-def]
    """The positions of bytes that check_elias found right."""
    scan_elias(data, at, length, count, n, positions, True)


@njit(nogil=True, cache=True)
def check_golomb(data, at, length, count, n):  # type: ignore[no-untyped-def]
    """Whether `length` bytes are exactly `count` positions below n."""
    return scan_golomb(data, at, length, count, n, np.empty(0, np.int64), False)


@njit(nogil=True, cache=True)
def check_elias(data, at, length, count, n):  # type: ignore[no-untyped-def]
    """Whether `length` bytes are exactly `count` positions below n."""
    return scan_elias(data, at, length, count, n, np.empty(0, np.int64), False)


__all__ = [
    "check_elias",
    "check_golomb",
    "load_elias",
    "load_golomb",
    "store_elias",
    "store_golomb",
]
