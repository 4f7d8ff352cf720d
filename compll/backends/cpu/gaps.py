"""Positions as LEB128 gaps (see gap_bytes in layout.py) for the CPU kernels.

Gaps below 128 take a byte each: stretches of such are written and read as bytes, which vectorizes.
Other gaps of one or two bytes are written and read without a branch on which it is.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from compll.backends.cpu.compress_store import high16, high64
from compll.backends.cpu.memory import load_uint16, store_uint16

__all__ = ["check_gaps", "load_gaps", "store_gaps"]
#: positions that are looked at together, written or checked; and read
GAPS, FEW = 64, 16
TWO_BYTES = 1 << 14


@njit(nogil=True, cache=True)
def store_gap(gap, out, at):  # type: ignore[no-untyped-def]
    """A gap of any size; where it ends."""
    while gap >= 128:
        out[at] = np.uint8(128 | (gap & 127))
        at += 1
        gap >>= 7
    out[at] = np.uint8(gap)
    return at + 1


@njit(nogil=True, cache=True)
def store_gaps(positions, count, out, at, before):  # type: ignore[no-untyped-def]
    """Ascending positions as gaps; where they end. before: the position before the first, or -1."""
    for start in range(0, count, GAPS):
        size = min(GAPS, count - start)
        found = positions[start : start + size]
        earlier, later = found[: size - 1], found[1:]
        first, most = found[0] - before - 1, np.int64(0)
        for j in range(size - 1):
            most |= later[j] - earlier[j] - 1
        before = found[size - 1]
        if (first | most) < 128:
            out[at] = np.uint8(first)
            bytes_ = out[at + 1 : at + size]
            for j in range(size - 1):
                bytes_[j] = np.uint8(later[j] - earlier[j] - 1)
            at += size
            continue
        at = store_gap(first, out, at)
        for j in range(size - 1):
            gap = later[j] - earlier[j] - 1
            # the byte after a short gap is another gap's, which is written later
            if gap < TWO_BYTES and j < size - 2:
                high = gap >> 7
                more = np.int64(high > 0)
                store_uint16(out, at, (gap & 127) | (more << 7) | (high << 8))
                at += 1 + more
            else:
                at = store_gap(gap, out, at)
    return at


@njit(nogil=True, cache=True)
def load_gaps(data, at, before, count, positions):  # type: ignore[no-untyped-def]
    """`count` positions of gaps that check_gaps found right; where they end.

    at: of their first byte. before: the position before the first (-1 at the beginning).
    """
    j = 0
    while j < count:
        if j + FEW <= count and at + FEW <= len(data) and not high16(data, at):
            for i in range(FEW):
                before += np.int64(data[at + i]) + 1
                positions[j + i] = before
            at, j = at + FEW, j + FEW
            continue
        stop = min(count, j + FEW)
        while j < stop:
            both = load_uint16(data, at) if at + 2 <= len(data) else np.int64(data[at])
            if both & 0x8080 == 0x8080:
                gap, at = long_gap(data, at)
            else:
                more = (both >> 7) & 1
                gap = (both & 127) | (((both >> 8) * more) << 7)
                at += 1 + more
            before += gap + 1
            positions[j] = before
            j += 1
    return at


@njit(nogil=True, cache=True)
def long_gap(data, at):  # type: ignore[no-untyped-def]
    """A gap of any size, and where it ends."""
    byte = np.int64(data[at])
    gap, shift = byte & 127, 0
    while byte >= 128:
        at += 1
        shift += 7
        byte = np.int64(data[at])
        gap |= (byte & 127) << shift
    return gap, at + 1


@njit(nogil=True, cache=True)
def check_gaps(data, at, length, count, n):  # type: ignore[no-untyped-def]
    """Whether `length` bytes are exactly `count` gaps between positions below n, none overlong."""
    before, found, i, end = np.int64(-1), 0, at, at + length
    while i < end:
        if i + GAPS <= end and not high64(data, i):
            part, total = data[i : i + GAPS], np.uint32(0)
            for j in range(GAPS):
                total = np.uint32(total + np.uint32(part[j]))
            before += np.int64(total) + GAPS
            found += GAPS
            i += GAPS
            if before >= n:
                return False
            continue
        stop = min(end, i + GAPS)
        while i < stop:
            gap, shift = np.int64(data[i]), 0
            i += 1
            if gap >= 128:
                byte, gap = gap, gap & 127
                while byte >= 128:
                    shift += 7
                    if i == end or shift > 35:
                        return False
                    byte = np.int64(data[i])
                    gap |= (byte & 127) << shift
                    i += 1
                if byte == 0:
                    return False
            before += gap + 1
            found += 1
            if before >= n:
                return False
    return found == count
