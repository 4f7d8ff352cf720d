"""Singular values and vectors, and choosing among them: the same code for all array backends.

[Note: singular vectors] LAPACK (gesdd, float64) computes them through NumPy; they are rounded to
float32. If a matrix m is at least TALL times as long as wide, the right vectors are the
eigenvectors of its Gram matrix (syevd), in a fraction of the time, and the singular values are the
lengths of the products of m with them. Times the right vectors these products add up to m, however
accurate the vectors are. But values below 1e-8 of the largest, and their left vectors, have no true
digits then. The last bits depend on the machine and the library. That does not matter to other
ranks, which decode what they receive. A matrix that is not finite has only NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compll.numerics.types import F32

F64 = NDArray[np.float64]
#: rows per column from which the Gram matrix is used
TALL = 8
#: elements that are converted to float64 at a time
BLOCK = 1 << 16


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
        u, s, v = _decomposed(m)
    except np.linalg.LinAlgError:
        shapes = (m.shape[0], r), (1, r), (m.shape[1], r)
        return Spectrum(*(np.full(shape, np.nan, np.float32) for shape in shapes))
    return Spectrum(*(np.ascontiguousarray(a, np.float32) for a in (u, s[None], v)))


def _decomposed(m: F32) -> tuple[NDArray[Any], F64, NDArray[Any]]:
    """Left vectors, values and right vectors; see [Note: singular vectors]."""
    if m.shape[1] >= TALL * m.shape[0]:
        left, values, right = _decomposed(m.T)
        return right, values, left
    if m.shape[0] < TALL * m.shape[1]:
        u, s, vt = np.linalg.svd(m.astype(np.float64), full_matrices=False)
        return u, s, vt.T
    v = np.ascontiguousarray(np.linalg.eigh(_gram(m))[1][:, ::-1])
    left, values = _products(m, v)
    np.divide(left, np.where(values > 0, values, 1), out=left, casting="same_kind")
    order = np.argsort(-values, kind="stable")
    if (order == np.arange(len(order))).all():
        return left, values, v
    return left[:, order], values[order], v[:, order]


def _blocks(m: F32) -> Iterator[slice]:
    """Slices of rows that fit into a cache as float64."""
    step = max(1, BLOCK // m.shape[1])
    return (slice(i, i + step) for i in range(0, m.shape[0], step))


def _gram(m: F32) -> F64:
    """transpose(m) @ m."""
    total = np.zeros((m.shape[1], m.shape[1]))
    for at in _blocks(m):
        block = m[at].astype(np.float64)
        total += block.T @ block
    return total


def _products(m: F32, v: F64) -> tuple[F32, F64]:
    """m @ v, and the lengths of its columns."""
    out, squares = np.empty((m.shape[0], v.shape[1]), np.float32), np.zeros(v.shape[1])
    for at in _blocks(m):
        block = m[at].astype(np.float64) @ v
        squares += np.einsum("ij,ij->j", block, block)
        out[at] = block
    return out, np.sqrt(squares)


def chosen(p: F32, u: float, k: int) -> NDArray[np.int32]:
    """At most k positions, ascending, then -1: position i has chance p[i].

    Systematic sampling: the chances lie on a line, one after another, and those at u, u + 1, ... (u
    in [0, 1)) are chosen. NaN has no chance.
    """
    chances = np.clip(np.where(np.isnan(p), 0, p).astype(np.float64), 0, 1)
    steps = np.ceil(np.concatenate([[0.0], np.cumsum(chances)]) - u)
    at = np.flatnonzero(steps[1:] > steps[:-1])[:k]
    out = np.full(k, -1, np.int32)
    out[: len(at)] = at
    return out
