"""Fields of varying length in NumPy and Python's lists, written apart from compll/routines, which
tests hold against them."""

from __future__ import annotations

import heapq
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.ir.storage import HUFFMAN_LONGEST as LONGEST
from compll.ir.storage import HUFFMAN_TILE as TILE
from compll.ir.storage import rice_parameter
from compll.numerics.numbers import I64, U8

# ---- gaps ---------------------------------------------------------------------------------------


def encode_gaps(positions: NDArray[np.int64]) -> U8:
    """Ascending positions as LEB128 gaps (see Gaps in ir/storage.py)."""
    out, before = bytearray(), -1
    for position in positions.tolist():
        gap, before = position - before - 1, position
        while gap >= 128:
            out.append(128 | gap & 127)
            gap >>= 7
        out.append(gap)
    return np.frombuffer(bytes(out), np.uint8)


def decode_gaps(data: U8, count: int) -> NDArray[np.int64] | None:
    """Inverse of encode_gaps; None if the bytes are not `count` gaps, each as short as possible."""
    positions, before, gap, shift = [], -1, 0, 0
    for byte in data.tolist():
        gap |= (byte & 127) << shift
        shift += 7
        if shift > 42 or (byte == 0 and shift > 7):
            return None
        if byte < 128:
            before += gap + 1
            positions.append(before)
            gap = shift = 0
    return np.array(positions, np.int64) if len(positions) == count and shift == 0 else None


# ---- golomb -------------------------------------------------------------------------------------


class _Writer:
    def __init__(self) -> None:
        self.bits: list[int] = []

    def put(self, value: int, count: int) -> None:
        self.bits += [value >> i & 1 for i in range(count)]

    def data(self) -> U8:
        return np.packbits(np.array(self.bits, np.uint8), bitorder="little")


class _Reader:
    def __init__(self, data: U8) -> None:
        self.bits, self.at = np.unpackbits(data, bitorder="little").tolist(), 0

    def take(self, count: int) -> int:
        """The next `count` bits. Raises IndexError beyond the end."""
        if self.at + count > len(self.bits):
            raise IndexError
        value = sum(self.bits[self.at + i] << i for i in range(count))
        self.at += count
        return value

    def run(self, bit: int) -> int:
        """The number of next bits that equal `bit`; also takes the bit that ends them."""
        count = 0
        while self.take(1) == bit:
            count += 1
        return count

    def ends(self) -> bool:
        """True if only the last byte's padding is left."""
        return len(self.bits) - self.at < 8 and not any(self.bits[self.at :])


def encode_golomb(positions: I64, n: int) -> U8:
    """The stream of ascending positions below n."""
    b = rice_parameter(len(positions), n)
    out = _Writer()
    for d in _gaps(positions):
        out.put((1 << (d >> b)) - 1, (d >> b) + 1)
        out.put(d & ((1 << b) - 1), b)
    return np.concatenate([np.array([b], np.uint8), out.data()])


def decode_golomb(data: U8, count: int, n: int) -> I64 | None:
    """Inverse of encode_golomb; None if the bytes are not `count` positions."""
    b, reader = rice_parameter(count, n), _Reader(data[1:])
    if len(data) == 0 or data[0] != b:
        return None

    def gap() -> int:
        return (reader.run(1) << b) + reader.take(b)

    return _positions(reader, gap, count)


def _gaps(positions: I64) -> list[int]:
    return [int(d) for d in np.diff(positions, prepend=-1) - 1]


def _positions(reader: _Reader, gap, count: int) -> I64 | None:  # type: ignore[no-untyped-def]
    positions, before = [], -1
    try:
        for _ in range(count):
            before += gap() + 1
            positions.append(before)
    except IndexError:
        return None
    return np.array(positions, np.int64) if reader.ends() else None


# ---- runs ---------------------------------------------------------------------------------------

ONES, FIRST, LONGEST_RUN = 121, 243, 14


def shorten_runs(data: U8) -> U8:
    """Bytes of trits with runs of ONES shortened."""
    out = bytearray()
    for byte, group in groupby(data.tolist()):
        count = len(list(group))
        if byte == ONES:
            out += bytes([FIRST + LONGEST_RUN - 2]) * (count // LONGEST_RUN)
            rest = count % LONGEST_RUN
            out += bytes([] if rest == 0 else [ONES] if rest == 1 else [FIRST + rest - 2])
        else:
            out += bytes([byte]) * count
    return np.frombuffer(bytes(out), np.uint8)


def lengthen_runs(data: U8) -> U8:
    """Inverse of shorten."""
    runs = np.where(data >= FIRST, data.astype(np.int64) - (FIRST - 2), 1)
    return np.repeat(np.where(data >= FIRST, np.uint8(ONES), data), runs)


# ---- huffman ------------------------------------------------------------------------------------

_WEIGHTS = 1 << np.arange(LONGEST)[::-1]


def huffman_lengths(counts: I64, bits: int) -> I64:
    """The lengths of the codes; -1 for numbers that do not occur."""
    lengths, weights = _depths(counts), counts
    while lengths.max() > LONGEST:
        weights = (weights + 1) // 2
        lengths = _depths(weights)
    fixed = np.full(len(counts), bits)
    return fixed if counts @ (lengths - bits) > 0 else lengths


def _depths(weights: I64) -> I64:
    """Depths in Huffman's tree; -1 for weights of 0."""
    depths = np.where(weights > 0, 0, -1)
    queue: list[Any] = [(int(w), i, [i]) for i, w in enumerate(weights) if w]
    heapq.heapify(queue)
    for joined in range(len(weights), len(weights) + len(queue) - 1):
        (first, _, some), (other, _, more) = heapq.heappop(queue), heapq.heappop(queue)
        depths[some + more] += 1
        heapq.heappush(queue, (first + other, joined, some + more))
    return depths


def _windows(lengths: I64) -> tuple[I64, I64]:
    """Numbers that occur in the order of their codes, and the first window of each code."""
    order = np.lexsort((np.arange(len(lengths)), lengths))
    order = order[lengths[order] >= 0]
    sizes = 1 << (LONGEST - lengths[order])
    return order, np.cumsum(sizes) - sizes


def encode_huffman(values: NDArray[Any], bits: int) -> U8:
    """The field of these numbers."""
    counts = np.bincount(values, minlength=1 << bits)
    lengths = huffman_lengths(counts, bits)
    order, first = _windows(lengths)
    windows = np.zeros(1 << bits, np.int64)
    windows[order] = first
    streams = [
        _stream(windows[part], lengths[part]) for part in np.split(values, _cuts(len(values)))
    ]
    head = (lengths[::2] + 1 | lengths[1::2] + 1 << 4).astype(np.uint8)
    sizes = np.array([len(stream) for stream in streams], "<u2").view(np.uint8)
    return np.concatenate([head, sizes, *streams])


def _cuts(count: int) -> NDArray[Any]:
    return np.arange(TILE, count, TILE)


def _stream(windows: I64, sizes: I64) -> U8:
    """The first `size` bits of each window."""
    bits = windows[:, None] & _WEIGHTS > 0
    return np.packbits(bits[np.arange(LONGEST) < sizes[:, None]])


def decode_huffman(data: U8, count: int, bits: int) -> U8 | None:
    """Inverse of encode; None if the bytes are not `count` numbers."""
    tiles = len(_cuts(count)) + 1
    head = (1 << bits) // 2
    if len(data) < head + 2 * tiles:
        return None
    lengths = np.stack([data[:head] & 15, data[:head] >> 4], 1).reshape(-1).astype(np.int64) - 1
    table = _table(lengths)
    sizes = np.ascontiguousarray(data[head : head + 2 * tiles]).view("<u2").astype(np.int64)
    ends = head + 2 * tiles + np.cumsum(sizes)
    if table is None or ends[-1] != len(data):
        return None
    numbers = list[int]()
    for size, end in zip(sizes, ends, strict=True):
        left = min(TILE, count - len(numbers))
        part = _numbers(data[end - size : end], left, table, lengths)
        if part is None:
            return None
        numbers += part
    return np.array(numbers, np.uint8)


def _table(lengths: I64) -> I64 | None:
    """The number of every window; None if codes do not fill all windows."""
    order, _ = _windows(lengths)
    if lengths.max() > LONGEST or (1 << (LONGEST - lengths[order])).sum() != 1 << LONGEST:
        return None
    return np.repeat(order, 1 << (LONGEST - lengths[order]))


def _numbers(data: U8, count: int, table: I64, lengths: I64) -> list[int] | None:
    """The numbers of a stream; None if it does not end with the last one's code."""
    bits = np.pad(np.unpackbits(data), (0, LONGEST)).astype(np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(bits, LONGEST) @ _WEIGHTS
    values = table[windows]
    following = (np.arange(len(values)) + lengths[values]).tolist()
    numbers, at, held = list[int](), 0, values.tolist()
    for _ in range(count):
        if at > 8 * len(data):
            return None
        numbers.append(held[at])
        at = following[at]
    padded = 0 <= 8 * len(data) - at < 8 and not bits[at:].any()
    return numbers if padded else None
