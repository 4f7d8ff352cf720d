"""Order keys (see order_key in bits.py) of a piece: the k-th largest, quantiles, and starts of
searches for an element's bucket.

Quantiles: counts of keys' upper halves show which halves hold the wanted keys, and only keys with
these halves are sorted.
"""

from __future__ import annotations

from compll.numerics.bits import from_key, maximum, order_key
from compll.numerics.traced import convert, where
from compll.routines.language import F32, I32, I64, U8, clz, inlined, local, routine, truth

#: elements from which counting pays; values of the upper half of a key
MANY, HALVES = 1 << 16, 1 << 16
#: upper bits of a key that tell where to look for its bucket, and number of their values
SHIFT, SLOTS = 20, 1 << 12
#: added to a key, it is not negative
UP = 1 << 31

# ---- k-th ---------------------------------------------------------------------------------------


@routine
def kth(keys: I32, count: int, k: int) -> int:
    """The k-th largest key, and above its 32 bits the number of larger ones.

    Searches digit by digit from the highest, counting each digit's occurrences below the known
    ones.
    """
    counts, prefix, larger = local(I64, 256), 0, 0
    for shift in (24, 16, 8, 0):
        counts.clear(256)
        for i in range(count):
            key = keys[i] + UP
            counts[key >> shift & 255] += truth(key >> (shift + 8) == prefix)
        digit, total = 0, larger
        for i in range(256):
            before = total
            total += counts[255 - i]
            here = (before < k) & (total >= k)
            digit = where(here, 255 - i, digit)
            larger = where(here, before, larger)
        prefix = prefix << 8 | digit
    return larger << 32 | (prefix ^ UP)


# ---- quantiles ----------------------------------------------------------------------------------


@routine
def quantiles(keys: I32, n: int, chosen: I32, spare: I32, table: F32, *, parts: int) -> None:
    """Fill a table with parts - 1 numbers, from n keys. chosen, spare: arrays as long."""
    places = local(I64, parts)
    for j in range(parts - 1):
        places[j] = (j + 1) * n // parts
    if n >= MANY:
        count = near(keys, n, chosen, spare, places, parts)
        sort(chosen, spare, count)
        fill(chosen, places, parts, table)
    else:
        sort(keys, spare, n)
        fill(keys, places, parts, table)


@inlined
def fill(keys: I32, places: I64, parts: int, table: F32) -> None:
    """Fill a table with the numbers at places of sorted keys."""
    for j in range(parts - 1):
        table[j] = from_key(convert(keys[places[j]], "i32"))


@inlined
def near(keys: I32, n: int, chosen: I32, counts: I32, places: I64, parts: int) -> int:
    """Copy the keys whose upper half is that of a wanted one to `chosen`; their number. Changes
    `places` to places among them."""
    marks, below, kept, j, count = local(U8, HALVES), 0, 0, 0, 0
    counts.clear(HALVES)
    for i in range(n):
        counts[(keys[i] + UP) >> 16] += 1
    for half in range(HALVES):
        end, first = below + counts[half], j
        while (places[j] < end) & (j < parts - 1):  # places ascend
            places[j] += kept - below
            j += 1
        marks[half] = truth(j != first)
        kept += where(j != first, counts[half], 0)
        below = end
    for i in range(n):
        key = keys[i]
        chosen[count] = key
        count += marks[(key + UP) >> 16]
    return count


@routine
def sort(keys: I32, spare: I32, count: int) -> None:
    """Sort keys, by their bytes. spare: an array as long."""
    starts = local(I32, 256)
    turns = (keys, spare, 0), (spare, keys, 8), (keys, spare, 16), (spare, keys, 24)
    for source, target, shift in turns:
        starts.clear(256)
        for i in range(count):
            starts[(source[i] + UP) >> shift & 255] += 1
        total = 0
        for value in range(256):
            here = starts[value]
            starts[value] = total
            total += here
        for i in range(count):
            key = source[i]
            place = (key + UP) >> shift & 255
            target[starts[place]] = key
            starts[place] += 1


# ---- buckets ------------------------------------------------------------------------------------


def padded(edges: int) -> int:
    """Keys of edges, with those behind the last one."""
    return 2 * (1 << edges.bit_length())


def bucket_bytes(edges: int) -> int:
    """Bytes that `buckets` writes for this number of edges."""
    return 8 + 4 * (SLOTS + 1) + 4 * padded(edges)


@routine
def buckets(table: F32, out: I32, *, edges: int) -> None:
    """Write the steps of a search, an int64; a start for each value of a key's upper bits; the
    edges' keys."""
    starts, keys = out + 2, out + (2 + SLOTS + 1)
    for j in range(padded(edges)):
        keys[j] = 2**31 - 1
    for j in range(edges):
        keys[j] = convert(order_key(table[j]), "i64")
    below, most = 0, 0
    for slot in range(SLOTS + 1):
        before = below
        while (keys[below] < (slot << SHIFT) - UP) & (below < edges):
            below += 1
        starts[slot] = below
        most = maximum(below - before, most)
    out.of(I64)[0] = 64 - clz(most)
