"""Values 0, 1 and 2, five in a byte, and runs of the byte of ones shortened, in NumPy.

[Note: trits] A tile of m values takes w = ceil(m / 5) bytes; value i is the digit of byte i mod w
with weight 3**(4 - i div w), and digits beyond m are 1. So bytes are below 243, and a byte of ones
is 121. Shortened, 2 to 14 bytes of 121 in a row become one, from 243 to 255 (3LC, Lim et al. 2019).
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.numerics import numbers
from compll.numerics.types import U8

DIGITS = 5
WEIGHTS = np.array([81, 27, 9, 3, 1], np.uint8)[:, None]
ONES, FIRST, LONGEST = 121, 243, 14


def pack(codes: NDArray[Any], tile: int) -> U8:
    """Trits as bytes, tile after tile."""
    return numbers.pack_digits(codes.astype(np.uint8), WEIGHTS, 1, tile)


def unpack(data: U8, count: int, tile: int) -> U8:
    """Inverse of pack."""
    return numbers.unpack_digits(data, count, WEIGHTS, 3, tile)


def unpack_runs(data: U8, count: int, tile: int) -> U8 | None:
    """Inverse of shorten and pack; None if the bytes are not `count` trits."""
    full, (tiles, rest) = lengthen(data), divmod(count, tile)
    width = tiles * -(-tile // DIGITS) + -(-rest // DIGITS)
    return unpack(full, count, tile) if len(full) == width else None


def shorten(data: U8) -> U8:
    """Bytes of trits with runs of ONES shortened."""
    out = bytearray()
    for byte, group in groupby(data.tolist()):
        count = len(list(group))
        if byte == ONES:
            out += bytes([FIRST + LONGEST - 2]) * (count // LONGEST)
            rest = count % LONGEST
            out += bytes([] if rest == 0 else [ONES] if rest == 1 else [FIRST + rest - 2])
        else:
            out += bytes([byte]) * count
    return np.frombuffer(bytes(out), np.uint8)


def lengthen(data: U8) -> U8:
    """Inverse of shorten."""
    runs = np.where(data >= FIRST, data.astype(np.int64) - (FIRST - 2), 1)
    return np.repeat(np.where(data >= FIRST, np.uint8(ONES), data), runs)
