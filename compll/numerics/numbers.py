"""Numbers that every backend must agree on, in NumPy: rounding, order of sums, random draws.

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

[Note: random draws] uniform(seed, step, tensor, draw, element) hashes a counter: SplitMix64 makes
two 32-bit keys from (seed, step, tensor, draw, high), where high is the upper half of the number of
the tile's first element. Each element's low 32 bits, spread by a Weyl multiplication, are mixed
with the keys by two rounds of xor-shift and multiply. The upper 23 bits of the result, divided by
2**23, are the draw. (Without the Weyl step, neighbours at power-of-two distances are correlated: 64
x 64 chi-square tests of 2**22 pairs fail by 10 to 300 standard deviations for lowbias32 on a plain
counter, and pass with it.)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.numerics.types import F32

LANES = 128
MASK = (1 << 64) - 1


def splitmix(x: int) -> int:
    """SplitMix64's output function (Steele et al. 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def stream(seed: int, step: int, tensor: int, draw: int, high: int) -> tuple[int, int]:
    """The two 32-bit keys of a stream of draws."""
    state = 0
    for word in (seed, step, tensor, draw, high):
        state = splitmix((state ^ word) & MASK)
    return state >> 32, state & 0xFFFFFFFF


def hashed(element: NDArray[np.uint32], k0: np.uint32, k1: np.uint32) -> NDArray[np.uint32]:
    """32 hashed bits per element; the upper ones are well mixed."""
    x = element * np.uint32(0x9E3779B9) + k0
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x7FEB352D)
    x = x ^ (x >> np.uint32(13)) ^ k1
    return x * np.uint32(0x846CA68B)


def uniform(
    seed: int, step: int, tensor: int, draw: int, start: int, count: int, tile: int = 1
) -> F32:
    """`count` draws in [0, 1) for the elements from `start` on."""
    place = np.arange(count, dtype=np.uint64)
    element = place + np.uint64(start)
    first = place // np.uint64(tile) * np.uint64(tile) + np.uint64(start)
    high = (first >> np.uint64(32)).astype(np.uint32)
    out = np.empty(count, np.float32)
    for value in np.unique(high):
        k0, k1 = (np.uint32(k) for k in stream(seed, step, tensor, draw, int(value)))
        chosen = high == value
        x = hashed(element[chosen].astype(np.uint32), k0, k1)
        out[chosen] = (x >> np.uint32(9)).astype(np.float32) * np.float32(2.0**-23)
    return out


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
    """The float64 sum of a whole tensor."""
    parts = lane_sums(values, tile).astype(np.float64)
    size = -(-len(parts) // LANES) * LANES
    return float(lane_sums(parts, size)[0])


#: key of every NaN, which processors make with either sign: the one above that of infinity
NAN_KEY = 0x7F800001
#: bits of the NaN with that key, which conversions leave as they are
QUIET = 0x7FC00000


def order_key(x: NDArray[np.float32]) -> NDArray[np.int32]:
    """int32 keys that order as the floats do, NaN largest."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32)
    key: NDArray[np.int32] = np.where(np.isnan(x), np.int32(NAN_KEY), _folded(bits))
    return key


def from_key(key: NDArray[np.int32]) -> F32:
    """Inverse of order_key."""
    bits = np.where(key == NAN_KEY, np.int32(QUIET), _folded(key))
    return np.ascontiguousarray(bits, np.int32).view(np.float32)


def _folded(bits: NDArray[np.int32]) -> NDArray[np.int32]:
    """Bits of floats as integers of their order, and back."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))


#: magnitudes of E4M3, by their codes: the last, 127, is NaN
FLOAT8 = np.array([*((max(c >> 3, 1) - 10, c & 7 | (c > 7) << 3) for c in range(127))], np.float32)
FLOAT8 = np.append(np.ldexp(FLOAT8[:, 1], FLOAT8[:, 0].astype(np.int32)), np.float32(np.nan))


def float8_codes(x: F32) -> NDArray[np.uint8]:
    """E4M3 (OCP): nearest even, 448 where finite x is larger; NaN where x is not finite."""
    size = np.minimum(np.abs(x), np.float32(448))
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(size, 2**-20))), -6) - 3)
    code = np.searchsorted(FLOAT8[:127], (np.rint(size / step) * step).astype(np.float32))
    found = np.where(np.isfinite(x), code, 127) + 128 * np.signbit(x)
    return np.asarray(found, np.uint8)


def from_float8(codes: NDArray[np.uint8]) -> F32:
    """float32 of E4M3 codes."""
    size = FLOAT8[codes & 127]
    return np.asarray(np.where(codes & 128, -size, size), np.float32)


def bfloat16_bits(x: F32) -> NDArray[np.uint16]:
    """bfloat16 bits, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (np.where(np.isnan(x), bits | np.uint32(0x400000), rounded) >> np.uint32(16)).astype(
        np.uint16
    )


def from_bfloat16(bits: NDArray[np.uint16]) -> F32:
    """float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bfloat16_up(x: F32) -> F32:
    """x rounded to bfloat16, away from zero."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    up = (bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), up.view(np.float32), x).astype(np.float32)


def sample_positions(seed: int, step: int, tensor: int, n: int, count: int) -> NDArray[np.int64]:
    """A random position in each of `count` equal stretches of n elements."""
    count = max(1, min(count, n))
    j = np.arange(count, dtype=np.int64)
    k0, _ = stream(seed, step, tensor, -1, 0)
    low, high = j * n // count, (j + 1) * n // count
    x = hashed(
        (j.astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.uint32), np.uint32(k0), np.uint32(0)
    ) >> np.uint32(8)
    found: NDArray[np.int64] = low + (x.astype(np.int64) % np.maximum(high - low, 1))
    return found


def float_bits(x: Any) -> NDArray[np.int32]:
    """The bits of float32 values."""
    return np.asarray(x, np.float32).view(np.int32)


def from_float_bits(bits: Any) -> F32:
    """The float32 values of bits: the lower 32 bits of integers."""
    return np.asarray(bits).astype(np.int32).view(np.float32)


def exponent(x: Any) -> NDArray[np.int32]:
    """The exponent in the bits of float32 values: floor(log2(abs(x))) for a normal number."""
    bits = np.asarray(x, np.float32).view(np.int32)
    return (bits >> np.int32(23) & np.int32(255)) - np.int32(127)


def exp2(i: Any) -> F32:
    """2**i as float32, exactly: 0 below -126, infinity above 127."""
    biased = np.clip(np.asarray(i, np.int64) + 127, 0, 255).astype(np.int32)
    return (biased << np.int32(23)).view(np.float32)


def sum_units(x: F32) -> tuple[float, float]:
    """Factors for elements before they are added up, and for sums after it; NaN if an element is
    not finite.

    See [Note: sums by index].
    """
    bits = int((np.ascontiguousarray(x).view(np.int32) & np.int32(0x7FFFFFFF)).max(initial=0))
    if bits >= 0x7F800000:
        return math.nan, math.nan
    shift = 62 - len(x).bit_length() - (max(bits >> 23, 1) - 126)
    return 2.0**shift, 2.0**-shift


def sum_by(index: NDArray[np.int32], x: F32, size: int) -> F32:
    """Sums of x for each index (clipped to the row); see [Note: sums by index]."""
    up, down = sum_units(x)
    if math.isnan(up):
        return np.full(size, np.nan, np.float32)
    sums = np.zeros(size, np.int64)
    whole = np.rint(x.astype(np.float64) * up).astype(np.int64)
    np.add.at(sums, np.clip(index, 0, size - 1), whole)
    return (sums.astype(np.float64) * down).astype(np.float32)


def encode_gaps(positions: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Ascending positions as LEB128 gaps (see Gaps in ir/storage.py)."""
    out, before = bytearray(), -1
    for position in positions.tolist():
        gap, before = position - before - 1, position
        while gap >= 128:
            out.append(128 | gap & 127)
            gap >>= 7
        out.append(gap)
    return np.frombuffer(bytes(out), np.uint8)


def decode_gaps(data: NDArray[np.uint8], count: int) -> NDArray[np.int64] | None:
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


def pack(codes: NDArray[np.uint8], bits: int, tile: int) -> NDArray[np.uint8]:
    """Pack codes of `bits` bits, in tiles (see [Note: packing] in layout.py)."""
    if bits == 8:
        return codes
    parts = [_pack_tile(codes[i : i + tile], bits) for i in range(0, len(codes), tile)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def _pack_tile(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    width, planes = (len(codes) * bits + 7) // 8, 8 // bits
    padded = np.zeros(width * planes, np.uint8)
    padded[: len(codes)] = codes
    shifts = (np.arange(planes, dtype=np.uint8) * np.uint8(bits))[:, None]
    packed: NDArray[np.uint8] = np.bitwise_or.reduce(
        padded.reshape(planes, width) << shifts, axis=0
    )
    return packed


def unpack(data: NDArray[np.uint8], count: int, bits: int, tile: int) -> NDArray[np.uint8]:
    """Inverse of pack."""
    if bits == 8:
        return data[:count]
    out, at = np.empty(count, np.uint8), 0
    shifts = (np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits))[:, None]
    for i in range(0, count, tile):
        size = min(tile, count - i)
        width = (size * bits + 7) // 8
        planes = (data[at : at + width] >> shifts) & np.uint8((1 << bits) - 1)
        out[i : i + size] = planes.reshape(-1)[:size]
        at += width
    return out
