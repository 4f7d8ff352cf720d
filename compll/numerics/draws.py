"""Random draws that every backend agrees on.

[Note: random draws] uniform(seed, step, tensor, draw, element) hashes a counter: SplitMix64 makes
two 32-bit keys from (seed, step, tensor, draw, high), where high is the upper half of the number of
the tile's first element. Each element's low 32 bits, spread by a Weyl multiplication, are mixed
with the keys by two rounds of xor-shift and multiply. The upper 23 bits of the result, divided by
2**23, are the draw. (Without the Weyl step, neighbours at power-of-two distances are correlated: 64
x 64 chi-square tests of 2**22 pairs fail by 10 to 300 standard deviations for lowbias32 on a plain
counter, and pass with it.)

Printers write `splitmix` to `on_circle` as instructions (see traced.py); the other functions are
NumPy's. Both keys of a stream are one int64, the first above the second.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.numerics.bits import maximum
from compll.numerics.numbers import F32
from compll.numerics.traced import bits, convert, remainder, unsigned_quotient, unsigned_right

MASK = (1 << 64) - 1


def _signed(word: int) -> int:
    """The integer of as many bits, 32 or 64, that wraps around to this one."""
    width = 32 if word < 1 << 32 else 64
    return word - (word >> (width - 1) << width)


WEYL = _signed(0x9E3779B9)


def splitmix(x: Any) -> Any:
    """SplitMix64's output function (Steele et al. 2014), of an int64."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ unsigned_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ unsigned_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ unsigned_right(x, 31)


def keys(seed: Any, step: Any, tensor: Any, draw: Any, high: Any) -> Any:
    """The keys of a stream of draws. All int64."""
    state = splitmix(seed)
    for word in (step, tensor, draw, high):
        state = splitmix(state ^ word)
    return state


def upper(words: Any) -> Any:
    """The upper half of an int64: the first of two keys."""
    return convert(unsigned_right(words, 32), "i32")


def lower(words: Any) -> Any:
    """The lower half of an int64: the second key, or that of an element's number."""
    return convert(words, "i32")


def counter(element: Any, first: Any) -> Any:
    """The counter of an element's lower half under the first key. All int32."""
    return element * WEYL + first


def mixed(keyed: Any, second: Any) -> Any:
    """32 bits of a counter under the second key; the upper ones are well mixed. All int32."""
    x = (keyed ^ unsigned_right(keyed, 15)) * 0x7FEB352D
    x = x ^ unsigned_right(x, 13) ^ second
    return x * _signed(0x846CA68B)


def unit(keyed: Any, second: Any) -> Any:
    """A draw in [0, 1): float32."""
    # 23 bits as the fraction of a float in [1, 2), minus 1: cheaper than a conversion
    return bits(unsigned_right(mixed(keyed, second), 9) | 0x3F800000) - 1.0


def uniform_of(element: Any, stream: Any) -> Any:
    """The draw of an element's number, int64, under a stream's keys."""
    return unit(counter(lower(element), upper(stream)), lower(stream))


def stretch(j: Any, n: Any, count: Any) -> tuple[Any, Any]:
    """Begin and length of number j of `count` equal stretches of n elements. All int64."""
    low = unsigned_quotient(j * n, count)
    return low, unsigned_quotient((j + 1) * n, count) - low


def sampled(first: Any, n: Any, count: Any, j: Any) -> Any:
    """The position that a sample takes of stretch j, under an int32 key."""
    low, size = stretch(j, n, count)
    drawn = unsigned_right(mixed(counter(lower(j), first), 0), 8)
    return low + remainder(convert(drawn, "i64"), maximum(size, 1))


def circle_start(stream: Any, n: Any) -> Any:
    """The begin of a circle of n elements, up to 2**32: the same chance for each."""
    words = splitmix(stream)
    high, low = unsigned_right(words, 32) * n, (words & 0xFFFFFFFF) * n
    return unsigned_right(high + unsigned_right(low, 32), 32)


def on_circle(stream: Any, start: Any, n: Any, count: Any, j: Any) -> Any:
    """The position that is drawn of stretch j; less n, if that is not below n."""
    low, size = stretch(j, n, count)
    drawn = convert(mixed(counter(lower(j), upper(stream)), lower(stream)), "i64") & 0xFFFFFFFF
    return low + unsigned_right(drawn * size, 32) + start


# of NumPy


def stream(seed: int, step: int, tensor: int, draw: int, high: int) -> Any:
    """The keys of a stream, from Python's integers."""
    words = np.array([w & MASK for w in (seed, step, tensor, draw, high)], np.uint64)
    with np.errstate(over="ignore"):
        return keys(*words.view(np.int64))


def uniform(
    seed: int, step: int, tensor: int, draw: int, start: int, count: int, tile: int = 1
) -> F32:
    """`count` draws in [0, 1) for the elements from `start` on."""
    place = np.arange(count, dtype=np.int64)
    element, high = place + start, (place // tile * tile + start) >> 32
    out = np.empty(count, np.float32)
    for value in np.unique(high):
        chosen = high == value
        keys = stream(seed, step, tensor, draw, int(value))
        out[chosen] = uniform_of(element[chosen], keys)
    return out


def sample_positions(seed: int, step: int, tensor: int, n: int, count: int) -> NDArray[np.int64]:
    """A random position in each of `count` equal stretches of n elements."""
    count = max(1, min(count, n))
    first = upper(stream(seed, step, tensor, -1, 0))
    result: NDArray[np.int64] = sampled(first, n, count, np.arange(count, dtype=np.int64))
    return result


# ---- shared draws -------------------------------------------------------------------------------
# Draws that all ranks agree on: they depend on step, tensor and place alone, not on the seed.

#: numbers of draws in [Note: random draws]; samples are -1, random matrices -2
DRAWN = -3
#: number of the first draw of elements; further ones count down
SHARED = -16


@lru_cache(maxsize=4)
def shared_positions(step: int, tensor: int, offset: int, n: int, count: int) -> NDArray[np.int64]:
    """`count` of n positions, ascending; each position has the same chance, count / n.

    One is drawn from each of `count` equal stretches of a circle of n with a random start, so that
    chances are equal even if lengths of stretches differ by one. n and count: up to 2**32.
    Read-only, since a step asks more than once.
    """
    if count == 0:
        return np.zeros(0, np.int64)
    keys, place = stream(0, step, tensor, DRAWN, offset), np.arange(count, dtype=np.int64)
    with np.errstate(over="ignore"):
        at = on_circle(keys, circle_start(keys, n), n, count, place)
    wrapped = int(np.searchsorted(at, n))
    result = np.concatenate([at[wrapped:] - n, at[:wrapped]])
    result.setflags(write=False)
    return result


def shared_uniform(step: int, tensor: int, draw: int, start: int, count: int, tile: int) -> F32:
    """`count` draws in [0, 1) for the elements of a tensor from `start` on."""
    return uniform(0, step, tensor, SHARED - draw, start, count, tile)
