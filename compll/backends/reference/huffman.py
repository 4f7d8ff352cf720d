"""Huffman codes of numbers below 2**bits, in NumPy.

[Note: huffman] First come four bits a number, that of an even number in the low half of its byte: 0
if it does not occur, else 1 + the length of its code. Then 16 bits for each tile of TILE numbers,
the bytes of its stream; then the streams. Bit i of a stream is bit 7 - i mod 8 of byte i div 8, the
highest bit of a code first; the last byte is padded with zeros.

Lengths are Huffman's for the numbers' counts (1952). Of equal weights a number is joined before a
pair, a lower number before a higher, and an earlier pair before a later one. While a length is
above LONGEST, counts are halved, rounded up. If the codes together are longer than `bits` a number,
every number has the length `bits`. Codes are canonical: ascending by length, then by number. So
a single number that occurs takes no bits. 2**(LONGEST - length) sums to 2**LONGEST, and in windows
of LONGEST bits the codes follow one another without gaps.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.ir.storage import HUFFMAN_LONGEST as LONGEST
from compll.ir.storage import HUFFMAN_TILE as TILE
from compll.numerics.types import I64, U8

_WEIGHTS = 1 << np.arange(LONGEST)[::-1]


def lengths(counts: I64, bits: int) -> I64:
    """The lengths of the codes; -1 for numbers that do not occur."""
    found, weights = _depths(counts), counts
    while found.max() > LONGEST:
        weights = (weights + 1) // 2
        found = _depths(weights)
    fixed = np.full(len(counts), bits)
    return fixed if counts @ (found - bits) > 0 else found


def _depths(weights: I64) -> I64:
    """Depths in Huffman's tree; -1 for weights of 0."""
    depths = np.where(weights > 0, 0, -1)
    queue: list[Any] = [(int(w), i, [i]) for i, w in enumerate(weights) if w]
    heapq.heapify(queue)
    for joined in range(len(weights), len(weights) + len(queue) - 1):
        (one, _, some), (other, _, more) = heapq.heappop(queue), heapq.heappop(queue)
        depths[some + more] += 1
        heapq.heappush(queue, (one + other, joined, some + more))
    return depths


def _windows(found: I64) -> tuple[I64, I64]:
    """Numbers that occur in the order of their codes, and the first window of each code."""
    order = np.lexsort((np.arange(len(found)), found))
    order = order[found[order] >= 0]
    sizes = 1 << (LONGEST - found[order])
    return order, np.cumsum(sizes) - sizes


def encode(values: NDArray[Any], bits: int) -> U8:
    """The field of these numbers."""
    counts = np.bincount(values, minlength=1 << bits)
    found = lengths(counts, bits)
    order, first = _windows(found)
    windows = np.zeros(1 << bits, np.int64)
    windows[order] = first
    streams = [_stream(windows[part], found[part]) for part in np.split(values, _cuts(len(values)))]
    head = (found[::2] + 1 | found[1::2] + 1 << 4).astype(np.uint8)
    sizes = np.array([len(one) for one in streams], "<u2").view(np.uint8)
    return np.concatenate([head, sizes, *streams])


def _cuts(count: int) -> NDArray[Any]:
    return np.arange(TILE, count, TILE)


def _stream(windows: I64, sizes: I64) -> U8:
    """The first `size` bits of each window."""
    bits = windows[:, None] & _WEIGHTS > 0
    return np.packbits(bits[np.arange(LONGEST) < sizes[:, None]])


def decode(data: U8, count: int, bits: int) -> U8 | None:
    """Inverse of encode; None if the bytes are not `count` numbers."""
    tiles = len(_cuts(count)) + 1
    head = (1 << bits) // 2
    if len(data) < head + 2 * tiles:
        return None
    found = np.stack([data[:head] & 15, data[:head] >> 4], 1).reshape(-1).astype(np.int64) - 1
    table = _table(found)
    sizes = np.ascontiguousarray(data[head : head + 2 * tiles]).view("<u2").astype(np.int64)
    ends = head + 2 * tiles + np.cumsum(sizes)
    if table is None or ends[-1] != len(data):
        return None
    numbers = list[int]()
    for size, end in zip(sizes, ends, strict=True):
        left = min(TILE, count - len(numbers))
        part = _numbers(data[end - size : end], left, table, found)
        if part is None:
            return None
        numbers += part
    return np.array(numbers, np.uint8)


def _table(found: I64) -> I64 | None:
    """The number of every window; None if codes do not fill all windows."""
    order, _ = _windows(found)
    if found.max() > LONGEST or (1 << (LONGEST - found[order])).sum() != 1 << LONGEST:
        return None
    return np.repeat(order, 1 << (LONGEST - found[order]))


def _numbers(data: U8, count: int, table: I64, found: I64) -> list[int] | None:
    """The numbers of a stream; None if it does not end with the last one's code."""
    bits = np.pad(np.unpackbits(data), (0, LONGEST)).astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(bits, LONGEST) @ _WEIGHTS
    values = table[windows]
    following = (np.arange(len(values)) + found[values]).tolist()
    numbers, at, held = list[int](), 0, values.tolist()
    for _ in range(count):
        if at > 8 * len(data):
            return None
        numbers.append(held[at])
        at = following[at]
    padded = 0 <= 8 * len(data) - at < 8 and not bits[at:].any()
    return numbers if padded else None
