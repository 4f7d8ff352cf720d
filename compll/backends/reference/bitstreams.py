"""Positions as a stream of bits: Golomb-Rice codes of their gaps, in NumPy.

[Note: bit streams] Bit i of a stream is bit i mod 8 of byte i div 8; the last byte is padded with
zeros. d is the number of elements between a selected one and the one before it.

golomb: the first byte is b; then for every d, d div 2**b ones, a zero, and the b low bits of d,
lowest first. b = floor(log2(.9624 n / k)) for k of n positions is the best Rice parameter if
positions are independent (Golomb 1966; sparse ternary compression uses it). If more
than half of the elements are selected, b is 0: a bit for each element, as in a bitmap. Another b is
refused: no stream is longer than encode makes.
"""

from __future__ import annotations

import numpy as np

from compll.ir.storage import rice_parameter
from compll.numerics.types import I64, U8


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
    found, before = [], -1
    try:
        for _ in range(count):
            before += gap() + 1
            found.append(before)
    except IndexError:
        return None
    return np.array(found, np.int64) if reader.ends() else None
