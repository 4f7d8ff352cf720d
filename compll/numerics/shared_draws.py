"""Draws that all ranks agree on: they depend on step, tensor and place alone, not on the seed."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from compll.numerics import draws
from compll.numerics.types import F32

#: numbers of draws in [Note: random draws]; samples are -1, random matrices -2
DRAWN = -3
#: number of the first draw of elements; further ones count down
ELEMENTS = -16


@lru_cache(maxsize=4)
def positions(step: int, tensor: int, offset: int, n: int, count: int) -> NDArray[np.int64]:
    """`count` of n positions, ascending; each position has the same chance, count / n.

    One is drawn from each of `count` equal stretches of a circle of n with a random start, so that
    chances are equal even if lengths of stretches differ by one. n and count: up to 2**32.
    Read-only, since a step asks more than once.
    """
    if count == 0:
        return np.zeros(0, np.int64)
    stream, place = draws.stream(0, step, tensor, DRAWN, offset), np.arange(count, dtype=np.int64)
    with np.errstate(over="ignore"):
        at = draws.on_circle(stream, draws.circle_start(stream, n), n, count, place)
    wrapped = int(np.searchsorted(at, n))
    found = np.concatenate([at[wrapped:] - n, at[:wrapped]])
    found.setflags(write=False)
    return found


def uniform(step: int, tensor: int, draw: int, start: int, count: int, tile: int) -> F32:
    """`count` draws in [0, 1) for the elements of a tensor from `start` on."""
    return draws.uniform(0, step, tensor, ELEMENTS - draw, start, count, tile)
