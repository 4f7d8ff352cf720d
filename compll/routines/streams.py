"""Fields of varying length: positions as gaps or Golomb-Rice codes, runs of bytes of trits.

A store gives the bytes that it wrote; a load 1 if `length` bytes are exactly `count` positions or
bytes, else 0, and checks all that it reads. Arrays of positions below n have -1 before the first.
Arrays can be written, and positions read, CHUNK elements past their ends.

[Note: bit streams] Bit i of a stream is bit i mod 8 of byte i div 8; the last byte is padded with
zeros. d is the number of elements between a selected one and the one before it.

golomb: the first byte is b; then for every d, d div 2**b ones, a zero, and the b low bits of d,
lowest first. b = floor(log2(.9624 n / k)) for k of n positions is the best Rice parameter if
positions are independent (Golomb 1966; sparse ternary compression uses it). If more
than half of the elements are selected, b is 0: a bit for each element, as in a bitmap. Another b is
refused: no stream is longer than encode makes.

[Note: runs] In bytes of trits (see [Note: trits] in reference/fields.py), 2 to 14 bytes of 121 in a
row become one, from 243 to 255 (3LC, Lim et al. 2019).
"""

from __future__ import annotations

from typing import NamedTuple

from compll.numerics.bits import maximum, minimum
from compll.numerics.traced import convert, unsigned_right, where
from compll.routines.huffman import load_huffman, store_huffman
from compll.routines.language import (
    I32,
    I64,
    U8,
    U16,
    Routine,
    any_bits,
    ctz,
    inlined,
    last,
    likely,
    mask,
    popcount,
    routine,
    running,
    splat,
    truth,
    unlikely,
)

CHUNK = 16


@routine
def ascending(positions: I32, count: int, n: int) -> int:
    """1 if each uint32 is above the one before and below n, else 0."""
    before, good = -1, True
    for i in range(count):
        position = positions[i] & 0xFFFFFFFF
        good &= position > before
        before = position
    return truth(good & (before < n))


# ---- gaps ---------------------------------------------------------------------------------------
# Positions as LEB128 gaps (see Gaps in ir/storage.py). Sixteen gaps below 128 are sixteen bytes,
# one vector; gaps of one or two bytes are written and read without a branch on their length.


@routine
def store_gaps(positions: I32, count: int, n: int, out: U8) -> int:
    """Write positions."""
    end = 0
    for j in range(0, count, CHUNK):
        gaps = positions[j, CHUNK] - positions[j - 1, CHUNK] - 1
        if (j + CHUNK <= count) & ((any_bits(gaps) & -128) == 0):
            out[end] = gaps
            end += CHUNK
        else:
            for i in range(j, minimum(j + CHUNK, count)):
                gap = positions[i] - positions[i - 1] - 1
                if (gap < 1 << 14) & (i < count - 1):  # the second byte may be overwritten
                    high = gap >> 7
                    two = truth(high != 0)
                    (out + end).of(U16)[0] = gap & 127 | two << 7 | high << 8
                    end += two + 1
                else:
                    while gap >= 128:
                        out[end] = gap | 128
                        end += 1
                        gap >>= 7
                    out[end] = gap
                    end += 1
    return end


@routine
def load_gaps(data: U8, length: int, count: int, n: int, positions: I32) -> int:
    """Read positions."""
    place, before, good = 0, -1, True
    for j in range(0, count, CHUNK):
        single = False
        if (j + CHUNK <= count) & (place + CHUNK <= length):
            single = (any_bits(data[place, CHUNK]) & -128) == 0
        if single:
            sums = running(data[place, CHUNK] + 1)
            positions[j] = sums + splat(convert(before, "i32"), CHUNK)
            before += convert(last(sums), "i64")
            place += CHUNK
        else:
            for i in range(j, minimum(j + CHUNK, count)):
                place, before, good = load_gap(data, length, place, before, good)
                positions[i] = before
        good &= before < n
    return truth(good & (place == length))


@inlined
def load_gap(data: U8, length: int, place: int, before: int, good: bool) -> tuple[int, int, bool]:
    """Read a gap. If it is overlong or the bytes end, `good` becomes false."""
    both = 0x8080
    if likely(place + 2 <= length):
        both = (data + place).of(U16)[0]
    if (both & 0x8080) == 0x8080:
        gap, shift, to, byte = 0, 0, place, 128
        while (byte >= 128) & (to < length) & (shift <= 35):
            byte = data[to]
            gap |= (byte & 127) << shift
            shift += 7
            to += 1
        good &= (byte < 128) & ((byte != 0) | (shift <= 7))
        if byte < 128:
            before += gap + 1
            place = to
    else:
        more = (both >> 7) & 1
        high = (both >> 8) * more
        good &= (more == 0) | (high != 0)
        before += (both & 127 | high << 7) + 1
        place += more + 1
    return place, before, good


# ---- golomb -------------------------------------------------------------------------------------
# A store collects bits in a word;
# while AHEAD codes of at least a bit follow, it writes the whole word with every code. A load looks
# at the WORD bits that eight bytes hold after the first bit. With the parameter 0, the bits are a
# bitmap of elements that are not selected.

WORD, AHEAD = 57, 64


def ones_below(count: int) -> int:
    """A number whose `count` lowest bits are set."""
    return (1 << count) - 1


@routine
def rice_parameter(count: int, n: int) -> int:
    """The Rice parameter: see storage.rice_parameter."""
    mean, rice = n * 9624 // (maximum(count, 1) * 10000), 0
    while mean > 1:
        mean >>= 1
        rice += 1
    return rice


@routine
def store_golomb(positions: I32, count: int, n: int, out: U8) -> int:
    """Write positions."""
    rice = rice_parameter(count, n)
    out[0] = rice
    end, word, fill, before = 1, 0, 0, -1
    few = maximum(count - AHEAD, 0)
    if (rice == 0) & (count != 0):
        end += store_bitmap(positions, count, out + 1)
    else:
        for ahead, first, stop in ((True, 0, few), (False, few, count)):
            for j in range(first, stop):
                here = positions[j]
                d = here - before - 1
                before = here
                ones = unsigned_right(d, rice)
                while ones >= 16:
                    end, word, fill = put(out, end, word, fill, 65535, 16, ahead)
                    ones -= 16
                code = ones_below(ones) | (d & ones_below(rice)) << (ones + 1)
                end, word, fill = put(out, end, word, fill, code, ones + 1 + rice, ahead)
        if fill > 0:
            out[end] = word
            end += 1
    return end


@inlined
def put(
    out: U8, end: int, word: int, fill: int, code: int, count: int, ahead: bool
) -> tuple[int, int, int]:
    """Append the lowest `count` bits of a code, at most 56, to the `fill` bits of a word, and write
    its complete bytes."""
    full, filled = word | code << fill, fill + count
    if ahead:
        (out + end).of(I64)[0] = full
    else:
        for k in range(filled >> 3):
            out[end + k] = unsigned_right(full, k * 8)
    return end + (filled >> 3), unsigned_right(full, filled & -8), filled & 7


@inlined
def store_bitmap(positions: I32, count: int, out: U8) -> int:
    """Write a bit for each element up to the last position, 0 at positions; their bytes."""
    bits, words, last = -1, 0, 0
    for j in range(count):
        place = positions[j]
        while words < place >> 6:
            out.of(I64)[words] = bits
            bits = -1
            words += 1
        last = place & 63
        bits ^= 1 << last
    bits &= (2 << last) - 1
    for k in range((last >> 3) + 1):
        out[words * 8 + k] = unsigned_right(bits, k * 8)
    return words * 8 + (last >> 3) + 1


@inlined
def word_at(data: U8, bit: int, length: int) -> int:
    """At least WORD bits from a bit on; zeros behind the end."""
    first, word = bit >> 3, 0
    if likely(first + 8 <= length):
        word = (data + first).of(I64)[0]
    else:
        word = last_word(data, first, length)
    return unsigned_right(word, bit & 7)


@routine
def last_word(data: U8, first: int, length: int) -> int:
    """The last bytes, fewer than eight, as a word."""
    word = 0
    for i in range(first, length):
        word |= data[i] << (i - first) * 8
    return word


@routine
def load_golomb(data: U8, length: int, count: int, n: int, positions: I32) -> int:
    """Read positions."""
    rice, bit, before = rice_parameter(count, n), 8, -1
    good = length >= 1
    if good:
        good = data[0] == rice
    bitmap = good & (rice == 0)
    if bitmap:
        bit, good = load_bitmap(data, length, count, n, positions)
    for j in range(where(bitmap, 0, count)):
        if good:
            word = word_at(data, bit, length)
            ones = ctz(word ^ -1)
            if unlikely(ones + 1 + rice > WORD):
                ones = ones_at(data, bit, length)
                word = word_at(data, bit + ones + 1, length)
            else:
                word = unsigned_right(word, ones + 1)
            bit += ones + 1 + rice
            before += (ones << rice) + (word & ones_below(rice)) + 1
            good = (bit <= length * 8) & (ones <= n >> rice) & (before < n)
            positions[j] = before
    left = length * 8 - bit
    good &= (left >= 0) & (left < 8)
    if good:
        good = word_at(data, bit, length) == 0
    return truth(good)


@inlined
def ones_at(data: U8, bit: int, length: int) -> int:
    """Ones from a bit on, to the end at most."""
    ones, alike = 0, WORD
    while alike == WORD:
        alike = minimum(ctz(word_at(data, bit + ones, length) ^ -1), WORD)
        ones += alike
        alike = where(bit + ones >= length * 8, 0, alike)
    return ones


@inlined
def load_bitmap(data: U8, length: int, count: int, n: int, positions: I32) -> tuple[int, bool]:
    """Read the numbers of `count` zeros; the bit behind them, and true if they are below n."""
    done, last, bit, good = 0, -1, 8, True
    while good & (done < count):
        zeros = (word_at(data, bit, length) ^ -1) & ones_below(WORD)
        some = minimum(popcount(zeros), count - done)
        for k in range(some):
            last = bit - 8 + ctz(zeros)
            positions[done + k] = last
            zeros &= zeros - 1
        done += some
        bit = where(done == count, last + 9, bit + WORD)
        good = bit <= length * 8
    return bit, good & (last < n)


# ---- runs ---------------------------------------------------------------------------------------
# Runs of the byte of ones, shortened: [Note: runs]. The byte for a run
# so far is written without a branch, and overwritten as the run grows.

ONES, FIRST, LONGEST = 121, 243, 14


@routine
def store_runs(data: U8, count: int, n: int, out: U8) -> int:
    """Shorten `count` bytes of trits."""
    end, run = 0, 0
    few = maximum((count - 2 * CHUNK) & -CHUNK, 0)  # only the last is written past its end
    for i in range(0, few, CHUNK):
        left, first = mask(data[i, CHUNK] != ONES), 0
        while left != 0:  # only the bytes that are not of ones
            here = ctz(left)
            left &= left - 1
            end, run = end_runs(out, end, run + here - first)
            out[end] = run_code(run)
            end += truth(run != 0)
            out[end] = data[i + here]
            end += 1
            run, first = 0, here + 1
        end, run = end_runs(out, end, run + CHUNK - first)
        out[end] = run_code(run)
    for i in range(few, count):
        byte, longer = data[i], run + 1
        alike = byte == ONES
        end += truth(~alike & (run != 0))
        out[end] = where(alike, run_code(longer), byte)
        done = ~alike | (longer == LONGEST)
        end += truth(done)
        run = where(done, 0, longer)
    return end + truth(run != 0)


def run_code(run: int) -> int:
    """The byte that stands for a run of bytes of ones."""
    return where(run == 1, ONES, run + (FIRST - 2))


@inlined
def end_runs(out: U8, end: int, run: int) -> tuple[int, int]:
    """Write the bytes for complete runs of the longest length, at most two."""
    (out + end).of(U16)[0] = 0xFFFF
    full = truth(run >= LONGEST) + truth(run >= 2 * LONGEST)
    return end + full, run - full * LONGEST


@routine
def load_runs(data: U8, length: int, count: int, n: int, out: U8) -> int:
    """Lengthen runs to `count` bytes of trits."""
    to = 0
    for i in range(length):
        byte = data[i]
        longer = byte >= FIRST
        # a vector is written, and the next one overwrites the surplus
        out[to] = splat(convert(where(longer, ONES, byte), "i32"), CHUNK)
        to = minimum(to + where(longer, byte - (FIRST - 2), 1), count + 1)
    return truth(to == count)


# ---- fields -------------------------------------------------------------------------------------


class Coder(NamedTuple):
    """Routines that store values of varying length, and load them."""

    store: Routine
    load: Routine


#: of the fields' storages
STREAMS = {
    "gaps": Coder(store_gaps, load_gaps),
    "golomb": Coder(store_golomb, load_golomb),
    "runs": Coder(store_runs, load_runs),
    "huffman": Coder(store_huffman, load_huffman),
}
