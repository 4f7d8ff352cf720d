"""Singular values and vectors, and choosing among them: the same code for all array backends.

[Note: singular vectors] They come from LAPACK (gesdd, float64) through NumPy, rounded to float32:
their last bits depend on the machine and the library. That does not matter to other ranks, which
decode what they receive. A matrix that is not finite has NaN for all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compll.backends.numbers import F32


class Spectrum(NamedTuple):
    """left: [rows, r], values: [1, r], right: [columns, r]; r = min(rows, columns)."""

    left: F32
    values: F32
    right: F32


def spectrum(m: F32) -> Spectrum:
    """The thin singular value decomposition; see [Note: singular vectors]."""
    r = min(m.shape)
    try:
        if not np.isfinite(m).all():
            raise np.linalg.LinAlgError
        u, s, vt = np.linalg.svd(m.astype(np.float64), full_matrices=False)
    except np.linalg.LinAlgError:
        shapes = (m.shape[0], r), (1, r), (m.shape[1], r)
        return Spectrum(*(np.full(shape, np.nan, np.float32) for shape in shapes))
    found = (np.ascontiguousarray(a).astype(np.float32) for a in (u, s[None], vt.T))
    return Spectrum(*found)


def chosen(p: F32, u: float, k: int) -> NDArray[np.int32]:
    """At most k positions, ascending, then -1: position i with chance p[i].

    Systematic sampling: of the line on which the chances lie one after another, those at u, u + 1,
    ... (u in [0, 1)). NaN has no chance.
    """
    chances = np.clip(np.where(np.isnan(p), 0, p).astype(np.float64), 0, 1)
    steps = np.ceil(np.concatenate([[0.0], np.cumsum(chances)]) - u)
    at = np.flatnonzero(steps[1:] > steps[:-1])[:k]
    out = np.full(k, -1, np.int32)
    out[: len(at)] = at
    return out


def take_columns(m: Any, at: NDArray[np.int32]) -> F32:
    """The columns at these positions; zeros at -1."""
    found: F32 = np.where(at >= 0, m[:, at], np.float32(0))
    return found
