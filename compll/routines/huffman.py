"""Numbers below 2**bits, as bytes, in Huffman codes.

Arguments and results of `store` and `load` are those of streams.py, with `bits` for n. Other arrays
hold an int64 for each number; a length of -1 is that of a number that does not occur. A tile's
stream is written and read in memory of its own, which is as large as the longest one: so words can
be longer than what is left, and wrong streams stay within it.

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

from compll.ir.storage import HUFFMAN_LONGEST as LONGEST
from compll.ir.storage import HUFFMAN_TILE as TILE
from compll.numerics.bits import maximum, minimum
from compll.numerics.traced import unsigned_right, where
from compll.routines.language import (
    I32,
    I64,
    U8,
    U16,
    inlined,
    local,
    routine,
    splat,
    sum_of,
    swapped,
    truth,
    unrolled,
)

NUMBERS, RANKED = 256, 8
#: weight to sort a number by that does not occur: above all others
LAST = 1 << 54
#: codes that a word holds, and bytes of a stream's memory, with a word behind the longest one
AT_ONCE, ROOM = 4, TILE * LONGEST // 8 + 16
#: tiles that are read side by side, since each code of a tile waits for the one before
BESIDE = 4
#: windows of the table that are filled at once
LANES = 16
WINDOWS = 1 << LONGEST

# ---- codes --------------------------------------------------------------------------------------


@routine
def code_lengths(counts: I64, bits: int, out: I64) -> None:
    """Fill `out` with the lengths of 2**bits numbers."""
    numbers, weights = 1 << bits, local(I64, NUMBERS)
    for i in range(numbers):
        weights[i] = counts[i]
    longest = depths(weights, numbers, out)
    while longest > LONGEST:
        for i in range(numbers):
            weights[i] = (weights[i] + 1) >> 1
        longest = depths(weights, numbers, out)
    longer = 0
    for i in range(numbers):
        longer += counts[i] * (out[i] - bits)
    if longer > 0:
        for i in range(numbers):
            out[i] = bits


@routine
def depths(weights: I64, numbers: int, out: I64) -> int:
    """Depths in the tree, as lengths; that of the lightest leaf, the largest. A weight is not 0."""
    order, tree, parents = local(I64, NUMBERS), local(I64, 2 * NUMBERS), local(I32, 2 * NUMBERS)
    leaves = by_weight(weights, numbers, order, tree)
    join(tree, parents, leaves)
    for i in range(numbers):
        out[i] = -1
    for i in range(leaves):
        out[order[i]] = tree[i]
    return tree[0]


@inlined
def by_weight(weights: I64, numbers: int, order: I64, tree: I64) -> int:
    """Fill `order` with the numbers by ascending weight, and `tree` with their weights; the number
    of weights that are not 0. Those that are come last."""
    keys, leaves = local(I64, NUMBERS + RANKED), 0
    keys[numbers] = splat(LAST << 8, RANKED)  # behind the last one
    for i in range(numbers):
        occurs = weights[i] > 0
        keys[i] = where(occurs, weights[i], LAST) << 8 | i
        leaves += truth(occurs)
    for i in range(numbers):
        key = splat(keys[i], RANKED)
        ranks = splat(0, RANKED)
        for j in range(0, numbers, RANKED):
            ranks += truth(keys[j, RANKED] < key)
        rank = sum_of(ranks)
        order[rank] = i
        tree[rank] = weights[i]
    return leaves


@routine
def join(tree: I64, parents: I32, leaves: int) -> None:
    """Huffman's tree of ascending weights: weights become depths. Pairs become ever heavier, so the
    lightest node is the next leaf or the next pair."""
    leaf, pair, end = 0, leaves, maximum(leaves * 2 - 2, 0)
    for node in range(leaves, end + 1):
        total = 0
        for _ in (0, 1):
            first, other = tree[leaf], tree[pair]
            lighter = (leaf < leaves) & ((pair >= node) | (first <= other))
            parents[where(lighter, leaf, pair)] = node
            total += where(lighter, first, other)
            leaf += truth(lighter)
            pair += truth(~lighter)
        tree[node] = total
    tree[end] = 0
    for i in range(end):
        tree[end - 1 - i] = tree[parents[end - 1 - i]] + 1


@routine
def first_windows(lengths: I64, numbers: int, out: I64) -> None:
    """Fill `out` with the first window of each code."""
    filled = 0
    for length in range(LONGEST + 1):
        for i in range(numbers):
            if lengths[i] == length:
                out[i] = filled
                filled += unsigned_right(WINDOWS, length)


# ---- store --------------------------------------------------------------------------------------


@routine
def store_huffman(data: U8, count: int, bits: int, out: U8) -> int:
    """Write numbers."""
    counts, lengths, codes = local(I64, NUMBERS), local(I64, NUMBERS), local(I64, NUMBERS)
    numbers = 1 << bits
    count_numbers(data, count, numbers, counts)
    code_lengths(counts, bits, lengths)
    first_windows(lengths, numbers, codes)
    for i in range(0, numbers, 2):
        out[i >> 1] = lengths[i] + 1 | (lengths[i + 1] + 1) << 4
    for i in range(numbers):  # a code's length, and the code from bit 8 on
        length = maximum(lengths[i], 0)
        codes[i] = length | codes[i] >> (LONGEST - length) << 8
    sizes, stream = out + (numbers >> 1), local(U8, ROOM)
    tiles = tiles_of(count)
    end = (numbers >> 1) + tiles * 2
    for t in range(tiles):
        size = store_tile(data + t * TILE, minimum(count - t * TILE, TILE), codes, stream)
        (out + end).copy(stream, size)
        sizes.of(U16)[t] = size
        end += size
    return end


def tiles_of(count: int) -> int:
    """The number of tiles."""
    return (count + (TILE - 1)) >> (TILE.bit_length() - 1)


@inlined
def count_numbers(data: U8, count: int, numbers: int, counts: I64) -> None:
    """Count each number, in turns, so that equal numbers in a row need not wait for one another."""
    turns, whole = local(I64, AT_ONCE * NUMBERS), count & -AT_ONCE
    turns.clear(numbers * AT_ONCE)
    for step, start, stop in ((AT_ONCE, 0, whole), (1, whole, count)):
        for i in range(start, stop, step):
            for k in unrolled(step):
                turns[data[i + k] * AT_ONCE + k] += 1
    for i in range(numbers):
        counts[i] = sum_of(turns[i * AT_ONCE, AT_ONCE])


@routine
def store_tile(data: U8, count: int, codes: I64, out: U8) -> int:
    """Store the stream of `count` numbers; its bytes. The word's highest bits are those that are
    not stored yet."""
    word, fill, end, whole = 0, 0, 0, count & -AT_ONCE
    for step, start, stop in ((AT_ONCE, 0, whole), (1, whole, count)):
        for i in range(start, stop, step):
            code, lengths = 0, 0
            for k in unrolled(step):
                entry = codes[data[i + k]]
                code = code << (entry & 63) | unsigned_right(entry, 8)
                lengths += entry
            filled = fill + (lengths & 255)
            word |= code << 1 << (63 - filled)
            (out + end).of(I64)[0] = swapped(word)
            end += filled >> 3
            word <<= filled & -8
            fill = filled & 7
    return end + ((fill + 7) >> 3)


# ---- load ---------------------------------------------------------------------------------------


@routine
def load_huffman(data: U8, length: int, count: int, bits: int, out: U8) -> int:
    """Read numbers. Checks the head, and loads the tiles until one is wrong."""
    numbers, table = 1 << bits, local(U16, WINDOWS + LANES)
    tiles = tiles_of(count)
    sizes, place = data + (numbers >> 1), (numbers >> 1) + tiles * 2
    good = length >= place
    if good:
        total = place
        for t in range(tiles):
            total += sizes.of(U16)[t]
        good = fill_table(data, numbers, table) & (total == length)
    whole = count >> (TILE.bit_length() - 1) & -BESIDE
    for beside, start, stop in ((BESIDE, 0, whole), (1, whole, tiles)):
        for t in range(start, stop, beside):
            if good:
                first, most = t * TILE, minimum(count - t * TILE, TILE)
                parts = table, data + place, sizes + t * 2
                taken = load_tiles(*parts, most, out + first, tiles=beside)
                good = taken >= 0
                place += taken
    return truth(good)


@inlined
def fill_table(data: U8, numbers: int, table: U16) -> bool:
    """Fill the table with the length of every window's code and, from bit 8 on, its number; true if
    codes fill all windows. Vectors may be longer than a code's windows: those of later codes
    follow."""
    lengths, filled, good = local(I64, NUMBERS), 0, True
    for i in range(numbers):
        half = data[i >> 1] >> (i & 1) * 4 & 15
        good &= half <= LONGEST + 1
        lengths[i] = half - 1
    for length in range(LONGEST + 1):
        for i in range(numbers):
            if lengths[i] == length:
                start = filled
                filled += unsigned_right(WINDOWS, length)
                if filled <= WINDOWS:
                    for j in range(start, filled, LANES):
                        table[j] = splat(length | i << 8, LANES)
    return good & (filled == WINDOWS)


@routine
def load_tiles(table: U16, data: U8, sizes: U8, count: int, out: U8, *, tiles: int) -> int:
    """Load neighbouring tiles of `count` numbers: the bytes of their streams, or -1 if one does not
    end with its last code."""
    taken, whole = 0, count & -AT_ONCE
    streams, bits = local(U8, tiles * ROOM), local(I64, tiles)
    for k in unrolled(tiles):
        (streams + k * ROOM).copy(data + taken, minimum(sizes.of(U16)[k], ROOM))
        taken += sizes.of(U16)[k]
        bits[k] = 0
    for step, start, stop in ((AT_ONCE, 0, whole), (1, whole, count)):
        for i in range(start, stop, step):
            for k in unrolled(tiles):
                word, lengths = word_at(streams + k * ROOM, bits[k]), 0
                for m in unrolled(step):
                    entry = table[unsigned_right(word, 64 - LONGEST)]
                    out[i + (k * TILE + m)] = entry >> 8
                    word <<= entry & 63
                    lengths += entry
                bits[k] += lengths & 255
    for k in unrolled(tiles):
        left = (sizes.of(U16)[k] << 3) - bits[k]
        rest = unsigned_right(word_at(streams + k * ROOM, bits[k]), 57)
        ended = (left >= 0) & (left < 8) & (rest >> (7 - left & 7) == 0)
        taken = where(ended, taken, -1)
    return taken


@inlined
def word_at(stream: U8, bit: int) -> int:
    """At least 57 bits from a bit on, the first one highest."""
    return swapped((stream + (bit >> 3)).of(I64)[0]) << (bit & 7)
