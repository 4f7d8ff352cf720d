"""Functions that generated CPU kernels call: packing of tails, sums, selection."""

from __future__ import annotations

# ruff: noqa: E741
import numpy as np
from numba import njit

from compll.backends.cpu import memory, ops
from compll.backends.cpu.compress_store import squeeze64_1
from compll.backends.cpu.elementary import exp, log, log2, power
from compll.backends.cpu.nontemporal_stores import zero_past
from compll.backends.cpu.text import SLACK
from compll.numerics import quantiles

u32, u64, f32 = np.uint32, np.uint64, np.float32
LANES = 128
BLOCK = 1024


@njit(nogil=True, cache=True)
def called_exp(x):  # type: ignore[no-untyped-def]
    """exp as one function, where speed does not matter."""
    return exp(x)


@njit(nogil=True, cache=True)
def called_log(x):  # type: ignore[no-untyped-def]
    """log as one function."""
    return log(x)


@njit(nogil=True, cache=True)
def called_log2(x):  # type: ignore[no-untyped-def]
    """log2 as one function."""
    return log2(x)


@njit(nogil=True, cache=True)
def called_power(x, y):  # type: ignore[no-untyped-def]
    """power as one function."""
    return power(x, y)


# Not cached: numba would never find a function again that stands in another one.
compiled = njit(nogil=True, error_model="numpy")
gamma_above = quantiles.gammas(called_exp, called_log, compiled).above


@njit(nogil=True, cache=True)
def zero_to(x, start, stop):  # type: ignore[no-untyped-def]
    """x[start : stop] = 0, in steps of 1024 (see [Note: prefetch]); where it ended."""
    stop = min(len(x), (stop + 1023) & ~1023)
    for o in range(start, stop, 256):
        memory.prefetch256(x, o + 512)
        part = x[o : min(stop, o + 256)]
        for i in range(len(part)):
            part[i] = 0
    return max(start, stop)


@njit(nogil=True, cache=True)
def zero(x, few):  # type: ignore[no-untyped-def]
    """x = 0, faster than memset where x is not in the cache; `few` elements are written later."""
    zero_to(x, zero_past(x, few), len(x))


@njit(nogil=True, cache=True)
def fill_tail(tail, x, o, m):  # type: ignore[no-untyped-def]
    """The last m elements of x, from o on, and zeros to the end of the tile."""
    for i in range(m):
        tail[i] = x[o + i]
    for i in range(m, len(tail)):
        tail[i] = 0


@njit(nogil=True, cache=True)
def keep_tail(tail, x, o, m):  # type: ignore[no-untyped-def]
    """What fill_tail took, back to where it lies."""
    for i in range(m):
        x[o + i] = tail[i]


@njit(nogil=True, cache=True)
def splitmix(x):  # type: ignore[no-untyped-def]
    x = u64(x + u64(0x9E3779B97F4A7C15))
    x = u64((x ^ (x >> u64(30))) * u64(0xBF58476D1CE4E5B9))
    x = u64((x ^ (x >> u64(27))) * u64(0x94D049BB133111EB))
    return u64(x ^ (x >> u64(31)))


@njit(nogil=True, cache=True)
def stream(seed, step, tensor, draw, high):  # type: ignore[no-untyped-def]
    """The 64 bits whose halves are a stream's keys (see [Note: random draws])."""
    h = splitmix(u64(seed))
    h = splitmix(u64(h ^ u64(step)))
    h = splitmix(u64(h ^ u64(tensor)))
    h = splitmix(u64(h ^ u64(draw)))
    return splitmix(u64(h ^ u64(high)))


@njit(nogil=True, cache=True)
def drawn(seed, step, tensor, draw, first, i, tile):  # type: ignore[no-untyped-def]
    """The draw of element i of a piece that begins at element `first` of its tensor."""
    element = u64(first + i)
    keys = stream(seed, step, tensor, draw, u64((first + i // tile * tile) >> 32))
    k0, k1 = u32(keys >> u64(32)), u32(keys & u64(0xFFFFFFFF))
    return ops.uniform(ops.weyl(u32(element & u64(0xFFFFFFFF))), k0, k1)


@njit(nogil=True, cache=True)
def fold(lanes):  # type: ignore[no-untyped-def]
    """Sum of the lanes, by halves, into the first."""
    width = len(lanes) // 2
    while width > 0:
        for l in range(width):
            lanes[l] += lanes[l + width]
        width //= 2


@njit(nogil=True, cache=True)
def total(parts):  # type: ignore[no-untyped-def]
    """Float64 sum of the tiles' sums (see [Note: order of sums])."""
    lanes = np.zeros(LANES, np.float64)
    for i in range(len(parts)):
        lanes[i % LANES] += np.float64(parts[i])
    fold(lanes)
    return lanes[0]


@njit(nogil=True, cache=True)
def cut_hits(hit, over):  # type: ignore[no-untyped-def]
    """Clear the last `over` hits, or all."""
    for i in range(len(hit) - 1, -1, -1):
        if over > 0 and hit[i] != 0:
            hit[i] = 0
            over -= 1


@njit(nogil=True, cache=True)
def kept_sum(values, tile):  # type: ignore[no-untyped-def]
    """Sum over selected elements, in the order of a whole tensor's."""
    lanes = min(LANES, tile)
    tiles = max(1, (len(values) + tile - 1) // tile)
    parts = np.zeros(tiles, np.float32)
    acc = np.empty(lanes, np.float32)
    for t in range(tiles):
        acc[:] = f32(0)
        for i in range(t * tile, min(len(values), (t + 1) * tile)):
            acc[(i - t * tile) % lanes] += values[i]
        fold(acc)
        parts[t] = acc[0]
    return total(parts)


@njit(nogil=True, cache=True)
def kept_max(values, tile):  # type: ignore[no-untyped-def]
    """Largest of the selected elements (0 when there is none)."""
    best = np.int32(-2147483647)
    for i in range(len(values)):
        best = ops.i_max(best, ops.key(values[i]))
    return np.float64(ops.unkey(best)) if len(values) else 0.0


@njit(nogil=True, cache=True)
def kept_min(values, tile):  # type: ignore[no-untyped-def]
    """Smallest of the selected elements (0 when there is none)."""
    best = np.int32(2147483647)
    for i in range(len(values)):
        best = ops.i_min(best, ops.key(values[i]))
    return np.float64(ops.unkey(best)) if len(values) else 0.0


@njit(nogil=True, cache=True)
def count_of(number, n):  # type: ignore[no-untyped-def]
    """A number as a count from 1 to n (NaN is 1). Compared as it is: beyond 2**63 it is no int64."""
    if not number >= 1:
        return 1
    return n if number >= n else np.int64(number)


@njit(nogil=True, cache=True)
def sample_positions(seed, step, tensor, n, count):  # type: ignore[no-untyped-def]
    """One random position in each of `count` equal stretches of n elements."""
    count = count_of(count, n)
    k0 = u32(stream(seed, step, tensor, u64(0xFFFFFFFFFFFFFFFF), u64(0)) >> u64(32))
    out = np.empty(count, np.int64)
    for j in range(count):
        low, high = j * n // count, (j + 1) * n // count
        out[j] = low + np.int64(ops.scramble(u32(j), k0)) % max(high - low, 1)
    return out


@njit(nogil=True, cache=True)
def _kth(keys, k):  # type: ignore[no-untyped-def]
    """The k-th largest of int32 keys (Hoare's selection, median of three); reorders keys."""
    low, high, want = 0, len(keys) - 1, len(keys) - k
    while low < high:
        a, b, c = keys[low], keys[(low + high) // 2], keys[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while keys[i] < pivot:
                i += 1
            while keys[j] > pivot:
                j -= 1
            if i <= j:
                keys[i], keys[j] = keys[j], keys[i]
                i += 1
                j -= 1
        if want <= j:
            high = j
        elif want >= i:
            low = i
        else:
            break
    return keys[want]


@njit(nogil=True, cache=True)
def above(x, least, room):  # type: ignore[no-untyped-def]
    """Copy the order keys of x that are at least `least`, in order; how many there are.

    room: int32, SLACK longer than x. See [Note: squeezing].
    """
    n, count = len(x), 0
    mask, keys = np.zeros(BLOCK, np.uint8), np.empty(BLOCK, np.int32)
    for o in range(0, n, BLOCK):
        size = min(BLOCK, n - o)
        part = x[o : o + size]
        if size < BLOCK:
            mask[:] = 0
        for i in range(size):
            keys[i] = ops.key(part[i])
        for i in range(size):
            mask[i] = ops.b_code(ops.key(part[i]) >= least)
        count = squeeze64_1(mask, 0, count, keys, room)
    return count


@njit(nogil=True, cache=True)
def _value_and_larger(keys, k):  # type: ignore[no-untyped-def]
    value, larger = np.int32(_kth(keys, k)), 0
    for i in range(len(keys)):
        larger += keys[i] > value
    return ops.unkey(value), larger


@njit(nogil=True, cache=True)
def kth_and_larger(x, k):  # type: ignore[no-untyped-def]
    """The k-th largest of a float32 array, and how many are larger; NaN is the largest value.

    A sample brackets the answer from below, one sweep keeps what is above the bracket, and only
    that is selected from; a bracket that is too high is lowered.
    """
    n = len(x)
    k = count_of(k, n)
    wanted = k + 4 * np.int64(np.sqrt(k)) + 16
    size = 4096
    if n <= 4 * size or wanted * 2 >= n:
        keys = np.empty(n, np.int32)
        for i in range(n):
            keys[i] = ops.key(x[i])
        return _value_and_larger(keys, k)
    sample = np.empty(size, np.int32)
    for j in range(size):
        sample[j] = ops.key(x[j * n // size + np.int64(ops.scramble(u32(j), u32(0))) % (n // size)])
    rank = wanted * size // n
    rank = min(size, rank + 4 * np.int64(np.sqrt(rank)) + 4)
    least = np.int32(_kth(sample, rank))
    room = np.empty(n + SLACK, np.int32)
    count = above(x, least, room)
    if count < k:
        for i in range(n):
            room[i] = ops.key(x[i])
        count = n
    return _value_and_larger(room[:count], k)


@njit(nogil=True, cache=True)
def kth_largest(x, k):  # type: ignore[no-untyped-def]
    """The k-th largest of a float32 array."""
    return kth_and_larger(x, k)[0]
