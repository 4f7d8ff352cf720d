"""Numbers that every backend must agree on, in NumPy: order of sums, positions, packed codes.

[Note: order of sums] float addition is not associative, so the order is part of the language. A
tile (TILE elements, or a group) is padded with zeros; lane l of LANES sums elements l, l + LANES,
... in order; lanes are folded in halves (lane i += lane i + LANES/2, and so on). The tiles' sums
are added the same way in float64. Vector units and warps compute exactly this without permission to
reassociate, so payloads are equal bit for bit on every backend.

[Note: sums by index] `sum_by` adds integers, for which the order makes no difference, so that many
threads may add at once. A row's elements are multiplied by the largest power of two that keeps each
below 2**(62 - b), b the bits of their number, so that no sum leaves 64 bits; then they are rounded
to nearest even and added up. The sums are float64, divided by that power, and float32. For a
million elements, rounding loses less than 2**-42 of the largest from each. If one is not finite,
all sums are NaN.

[Note: tries] A try has only two possible successors, and a walk over memory leaves time to count
for several thresholds. So each walk counts for a tree of TRIES thresholds: number 0 is the next
one, and after number q comes 2 q + 1 if too few elements reach it, else 2 q + 2. gaussiank's eleven
tries take four walks.

Numbers are float64, NumPy's or a printer's (see traced.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.numerics.bits import (
    BIAS,
    FRACTION,
    INFINITE,
    NAN,
    clamp,
    magnitude_bits,
    maximum,
    power_of_two,
)
from compll.numerics.traced import bits, convert, floor, where

# ---- types --------------------------------------------------------------------------------------
# Types of NumPy arrays, by their elements.

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]


# ---- numbers ------------------------------------------------------------------------------------

LANES = 128


def fold(lanes: NDArray[Any]) -> NDArray[Any]:
    """Sum the last axis (a power of two) by halves."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def lane_count(tile: int) -> int:
    """Lanes of a tile's sum."""
    return min(LANES, tile)


def lane_sums(values: NDArray[Any], tile: int) -> NDArray[Any]:
    """Sum of each tile of `values` (padded with zeros), in the order of [Note: order of sums]."""
    tiles = max(1, -(-len(values) // tile))
    padded = np.zeros(tiles * tile, values.dtype)
    padded[: len(values)] = values
    lanes = lane_count(tile)
    parts = padded.reshape(tiles, tile // lanes, lanes)
    total = parts[:, 0]
    for k in range(1, tile // lanes):
        total = total + parts[:, k]
    return fold(total)


def total(values: F32, tile: int) -> float:
    """The float64 sum of a whole tensor; 0.0, not -0.0, if it is zero, as sums begin with 0.0."""
    parts = lane_sums(values, tile).astype(np.float64)
    size = -(-len(parts) // LANES) * LANES
    return float(lane_sums(parts, size)[0]) + 0.0


def sum_units(largest: Any, n: Any) -> tuple[Any, Any]:
    """Factors, float64, for n elements before they are added up, and for sums after it; NaN if the
    largest magnitude, float32, is not finite. NumPy's numbers or a printer's (see traced.py).

    See [Note: sums by index].
    """
    size = magnitude_bits(largest)
    length = (bits(convert(maximum(n, 1), "f64")) >> FRACTION) - (BIAS - 1)
    shift = 62 - length - (convert(maximum(size >> 23, 1), "i64") - 126)
    up, down = power_of_two(shift), power_of_two(-shift)
    return where(size < INFINITE, up, NAN), where(size < INFINITE, down, NAN)


def sum_by(index: NDArray[np.int32], x: F32, size: int) -> F32:
    """Sums of x for each index (clipped to the row); see [Note: sums by index]."""
    up, down = sum_units(np.abs(x).max(initial=np.float32(0)), np.int64(len(x)))
    if np.isnan(up):
        return np.full(size, np.nan, np.float32)
    sums = np.zeros(size, np.int64)
    whole = np.rint(x.astype(np.float64) * up).astype(np.int64)
    np.add.at(sums, np.clip(index, 0, size - 1), whole)
    result: F32 = (sums.astype(np.float64) * down).astype(np.float32)
    return result


def pack(codes: U8, bits: int, tile: int) -> U8:
    """Pack codes of `bits` bits, in tiles (see [Note: packing] in layout.py)."""
    return codes if bits == 8 else pack_digits(codes, _weights(bits), 0, tile)


def unpack(data: U8, count: int, bits: int, tile: int) -> U8:
    """Inverse of pack."""
    if bits == 8:
        return data[:count]
    return unpack_digits(data, count, _weights(bits), 1 << bits, tile)


def _weights(bits: int) -> U8:
    return np.left_shift(np.uint8(1), np.arange(0, 8, bits, dtype=np.uint8))[:, None]


def pack_digits(digits: U8, weights: U8, fill: int, tile: int) -> U8:
    """Several digits in a byte, neighbours in neighbouring bytes, tile after tile.

    weights: of the digits of a byte, [digits, 1]. fill: the digit of a tile's last places.
    """
    parts = [np.zeros(0, np.uint8)]
    for i in range(0, len(digits), tile):
        part = digits[i : i + tile]
        padded = np.full((len(weights), -(-len(part) // len(weights))), fill, np.uint8)
        padded.reshape(-1)[: len(part)] = part
        parts.append((padded * weights).sum(0, dtype=np.uint8))
    return np.concatenate(parts)


def unpack_digits(data: U8, count: int, weights: U8, base: int, tile: int) -> U8:
    """Inverse of pack_digits, for digits below `base`."""
    out, at = np.empty(count, np.uint8), 0
    for i in range(0, count, tile):
        size = min(tile, count - i)
        width = -(-size // len(weights))
        planes = data[at : at + width] // weights % np.uint8(base)
        out[i : i + size] = planes.reshape(-1)[:size]
        at += width
    return out


# ---- tries --------------------------------------------------------------------------------------
# Searched thresholds: `adjust` and `bisect` try thresholds until the wanted number of elements
# reaches one.

TRIES = 7
MOST_TRIES = 100


def walks_of_tries(tries: int) -> int:
    """Walks for this many tries and a look at the last one: a walk makes one on each level."""
    return -(-(1 + tries) // TRIES.bit_length())


class Tries:
    """The rule of a search. The state between two tries: the interval that `bisect` halves, or the
    next threshold of `adjust` twice; and how many tries are left after the next one.

    given: the operator's numbers: of `adjust` the first threshold, the fewest and the most elements
    wanted, the factors after too few and too many, and the number of tries; of `bisect` the
    interval, the fewest and the most, and the number of tries.
    """

    def __init__(self, op: str, given: Sequence[Any]) -> None:
        self.halves, self.given = op == "bisect", given
        self.fewest, self.most = given[2:4] if self.halves else given[1:3]

    def begin(self) -> tuple[Any, Any, Any]:
        """The first state. adjust looks once more after its last try."""
        low, high = self.given[0], self.given[int(self.halves)]
        tries = floor(clamp(self.given[-1], float(self.halves), float(MOST_TRIES)))
        return low, high, tries - float(self.halves)

    def threshold(self, low: Any, high: Any) -> Any:
        """The threshold to try."""
        return low + (high - low) / 2.0 if self.halves else low

    def after(self, low: Any, high: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """The next interval if too few elements reach the threshold, and if too many do."""
        t = self.threshold(low, high)
        if self.halves:
            return (low, t), (t, high)
        lower, higher = t * self.given[3], t * self.given[4]
        return (lower, lower), (higher, higher)

    def fits(self, count: Any) -> Any:
        """True if as many elements as wanted reach a threshold."""
        return (self.fewest <= count) & (count <= self.most)

    def tree(self, low: Any, high: Any) -> list[Any]:
        """The thresholds that a walk counts for."""
        nodes = [(low, high)]
        for q in range(TRIES // 2):
            nodes += self.after(*nodes[q])
        return [self.threshold(*node) for node in nodes]

    def decide(self, state: Sequence[Any], counts: Sequence[Any], q: int = 0) -> tuple[Any, ...]:
        """The path through the tree, from number q on, by the counts of elements that reach its
        thresholds: the last threshold, its count, and the next state, with -1 tries left if the
        search is over."""
        low, high, left = state
        result, count = self.threshold(low, high), counts[q]
        few, over = count < self.fewest, self.fits(count) | (left <= 0.0)
        paths = [
            self.decide((*interval, left - 1.0), counts, child)
            if (child := 2 * q + 1 + k) < TRIES
            else (result, count, *interval, left - 1.0)
            for k, interval in enumerate(self.after(low, high))
        ]
        here = (result, count, low, high, -1.0)
        return tuple(
            where(over, value, where(few, *both))
            for value, both in zip(here, zip(*paths, strict=True), strict=True)
        )
