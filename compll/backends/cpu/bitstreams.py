"""Golomb and Elias streams of positions for the CPU kernels: [Note: bit streams]."""

from __future__ import annotations

import numpy as np
from numba import njit

from compll.backends.cpu import memory, ops

u64 = np.uint64
MOST_BITS = 40
#: bits that are read at once, wherever they begin
WORD = 57
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


@njit(nogil=True, cache=True)
def put(out, bit, value, count):  # type: ignore[no-untyped-def]
    """Write bits, 40 at most, from bit number `bit` of `out` on; the rest of their last byte is 0.

    No byte behind that is touched.
    """
    if count == 0:
        return bit
    first, shift = bit >> 3, bit & 7
    word = np.int64(value) << shift
    if shift:
        word |= np.int64(out[first])
    for i in range(first, (bit + count + 7) >> 3):
        out[i] = np.uint8(word & 255)
        word >>= 8
    return bit + count


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


def joined(v: int, low: int, m: int) -> int:
    """The code of a positive integer, first bit lowest; see [Note: bit streams]."""
    return 1 << m | (low + 1 - (1 << m)) << (m + 1) | (v - (1 << low)) << (2 * m + 1)


def small(v: int) -> tuple[int, int]:
    """The code of a positive integer and how many bits it has, for the table."""
    low = v.bit_length() - 1
    m = (low + 1).bit_length() - 1
    return joined(v, low, m), 2 * m + 1 + low


compiled = njit(nogil=True)(joined)
#: the codes of small integers, and their bits
CODES, CODE_BITS = np.array([(0, 0), *map(small, range(1, 256))], np.int64).T.copy()


@njit(nogil=True, cache=True)
def store_elias(positions, count, out, at, n):  # type: ignore[no-untyped-def]
    """Write `count` ascending positions; where they end."""
    word, fill, before = u64(0), 0, np.int64(-1)
    for j in range(count):
        v = positions[j] - before
        before = positions[j]
        if v < 256:
            code, bits = CODES[v], CODE_BITS[v]
        else:
            low = width(v) - 1
            m = width(low + 1) - 1
            code, bits = compiled(v, low, m), 2 * m + 1 + low
            while fill >= 8:  # so that the code, 51 bits at most, fits in the word
                out[at] = np.uint8(word & u64(255))
                at, word, fill = at + 1, word >> u64(8), fill - 8
        word |= u64(code) << u64(fill)
        fill += bits
        if fill >= 32:
            memory.store_uint32(out, at, np.int64(word & u64(0xFFFFFFFF)))
            at, word, fill = at + 4, word >> u64(32), fill - 32
    while fill > 0:
        out[at] = np.uint8(word & u64(255))
        at, word, fill = at + 1, word >> u64(8), fill - 8
    return at


@njit(nogil=True, cache=True)
def word_at(data, bit):  # type: ignore[no-untyped-def]
    """Bits from bit number `bit` on, 57 at least; zeros where data ends."""
    first = bit >> 3
    if first + 8 <= len(data):
        return memory.load_word(data, first) >> u64(bit & 7)
    word = u64(0)
    for i in range(first, len(data)):
        word |= u64(data[i]) << u64(8 * (i - first))
    return word >> u64(bit & 7)


@njit(nogil=True, cache=True)
def take(data, bit, end, count):  # type: ignore[no-untyped-def]
    """The next bits, 40 at most, or FAILED beyond bit number `end`."""
    if bit + count > end:
        return FAILED
    return np.int64(word_at(data, bit) & ((u64(1) << u64(count)) - u64(1)))


@njit(nogil=True, cache=True)
def run(data, bit, end, kind):  # type: ignore[no-untyped-def]
    """How many bits like `kind` come next, or FAILED when none ends them."""
    start = bit
    while bit < end:
        word = word_at(data, bit)
        alike = ops.zeros_below(~word if kind else word)
        if alike < WORD:
            return bit + alike - start if bit + alike < end else FAILED
        bit += WORD
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
    below = (u64(1) << u64(b)) - u64(1)
    for j in range(count):
        first = bit >> 3
        ones = WORD
        if first + 8 <= len(data):
            word = memory.load_word(data, first) >> u64(bit & 7)
            ones = ops.zeros_below(~word)
        if ones + 1 + b <= WORD:  # all of it is in the word
            rest = np.int64((word >> u64(ones + 1)) & below)
            if bit + ones + 1 + b > end:
                return False
        else:
            ones = run(data, bit, end, 1)
            if ones == FAILED:
                return False
            rest = take(data, bit + ones + 1, end, b)
            if rest == FAILED:
                return False
        if (ones << b) >= n:
            return False
        bit += ones + 1 + b
        before += (ones << b) + rest + 1
        if before >= n:
            return False
        if keep:
            positions[j] = before
    return ended(data, bit, end)


@njit(nogil=True, cache=True)
def scan_elias(data, at, length, count, n, positions, keep):  # type: ignore[no-untyped-def]
    """Read `count` positions, all below n; whether the bytes are exactly that.

    Neighbours take a bit each: their runs are read as one.
    """
    bit, end, before, j = 8 * at, 8 * (at + length), np.int64(-1), 0
    while j < count:
        first = bit >> 3
        if first + 8 <= len(data):
            word = memory.load_word(data, first) >> u64(bit & 7)
        else:
            word = word_at(data, bit)
        alike = min(ops.zeros_below(~word), WORD, count - j)
        if bit + alike > end or before + alike >= n:
            return False
        if keep:
            for i in range(alike):
                positions[j + i] = before + 1 + i
        bit, before, j = bit + alike, before + alike, j + alike
        if j == count:
            break
        word >>= u64(alike)
        m = ops.zeros_below(word)
        if m > 5:
            if alike:
                continue  # with a new word
            return False
        low = np.int64((word >> u64(m + 1)) & ((u64(1) << u64(m)) - u64(1))) + (1 << m) - 1
        if alike + 2 * m + 1 + low > WORD and alike:
            continue
        if low > MOST_BITS or bit + 2 * m + 1 + low > end:
            return False
        rest = np.int64((word >> u64(2 * m + 1)) & ((u64(1) << u64(low)) - u64(1)))
        bit += 2 * m + 1 + low
        before += (np.int64(1) << low) + rest
        if before >= n:
            return False
        if keep:
            positions[j] = before
        j += 1
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
