"""Matrices in NumPy: numbers that every backend must agree on.

[Note: order of matrix products] An element of a @ b is a float64 sum of products of float32 values.
Those of each CHUNK of the inner dimension are added up in order, then the chunks' sums in order, so
that many blocks of a GPU share a tall matrix. The products are exact in float64, so it makes no
difference whether a machine fuses them with the addition. The sum is rounded to float32 once. If
the inner dimension is short for every n (matrices.short), as for factors of low rank, no precision
is lost with float32: products and sums are float32, each rounded, in the same order. In float64
such a product would take longer than its elements take in memory, and far longer on most GPUs.

[Note: orthonormal] Gram-Schmidt in float64, column after column, each made orthogonal to those
before it twice (Giraud et al. 2005: twice is enough). Dot products run over 128 lanes, padded with
zeros and folded in halves, as in [Note: order of sums]. If less than TINY of a column's length is
left, the column depends on those before it: float32 has no digits for the rest.

[Note: hadamard] Runs of `block` elements, then of ever smaller powers of two. In a run of m the
distance h is 1, 2, 4 ... m / 2; elements h apart become their sum and their difference, in float32.
Then all are multiplied by m**-0.5, rounded to float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.numerics import bits, draws, numbers
from compll.numerics.numbers import F32, F64, I32

TINY = 1e-6
#: products of an element that are added up by themselves
CHUNK = 1024
#: number of the draw in [Note: random draws]; a spec's draws count from 0, samples are -1
DRAW = -2


def product(a: F32, b: F32, short: bool) -> F32:
    """a @ b; see [Note: order of matrix products]."""
    sums = np.float32 if short else np.float64
    left, right = a.astype(sums), b.astype(sums)
    total = np.zeros((a.shape[0], b.shape[1]), sums)
    for start in range(0, a.shape[1], CHUNK):
        part = np.zeros_like(total)
        for j in range(start, min(start + CHUNK, a.shape[1])):
            part += left[:, j : j + 1] * right[j]
        total += part
    return total.astype(np.float32)


def orthonormal(a: F32, spare: F32) -> F32:
    """Orthonormal columns that span those of a, or else of spare; see [Note: orthonormal]."""
    rows, cols = a.shape
    padded = -(-rows // numbers.LANES) * numbers.LANES
    basis = np.zeros((cols, padded))
    for c in range(cols):
        for source in (a, spare):
            basis[c, :rows] = source[:, c]
            if _direction(basis, c):
                break
            basis[c] = 0.0
    return np.ascontiguousarray(basis[:, :rows].T).astype(np.float32)


def _direction(basis: F64, c: int) -> bool:
    """Make row c orthogonal to the rows before it, and of length one; False if nothing is left of
    it."""
    v = basis[c]
    before = math.sqrt(_dot(v, v))
    for _ in range(2):
        for other in basis[:c]:
            v -= _dot(other, v) * other
    after = math.sqrt(_dot(v, v))
    if after <= TINY * before < math.inf:
        return False
    v /= after
    return True


def _dot(a: F64, b: F64) -> float:
    return float(numbers.lane_sums(a * b, len(a))[0])


def runs(n: int, block: int) -> list[tuple[int, int]]:
    """Start and length of a tensor's runs of one length; the length is a power of two."""
    all_runs, at, size = [], 0, block
    while at < n:
        if n - at >= size:
            all_runs.append((at, size))
            at += (n - at) // size * size
        size //= 2
    return all_runs


def hadamard(x: F32, block: int) -> F32:
    """The transform of each run; see [Note: hadamard]."""
    out = x.copy()
    for start, size in runs(len(x), block):
        run = out[start : start + (len(x) - start) // size * size]
        h = 1
        while h < size:
            pairs = run.reshape(-1, 2, h)
            a, b = pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]
            pairs[:, 0], pairs[:, 1] = a, b
            h *= 2
        run *= np.float32(size**-0.5)
    return out


def top_columns(m: F32, k: int) -> I32:
    """[rows, k]: positions of the k largest elements of each row, ascending, then -1.

    Of equal elements the first win.
    """
    keys = bits.order_key(m)
    result = np.sort(np.argsort(-keys.astype(np.int64), axis=1, kind="stable")[:, :k], axis=1)
    out = np.full((m.shape[0], k), -1, np.int32)
    out[:, : result.shape[1]] = result
    return out


def chosen(p: F32, u: float, k: int) -> I32:
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


def take_columns(m: F32, at: I32) -> F32:
    """Elements at positions of each row, or at the same positions of all rows; zeros beyond the
    columns."""
    inside = (at >= 0) & (at < m.shape[1])
    clipped = np.broadcast_to(np.where(inside, at, 0), (m.shape[0], at.shape[1]))
    result: F32 = np.where(inside, np.take_along_axis(m, clipped, 1), np.float32(0))
    return result


def flat_places(at: I32, cols: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Places of row positions in a matrix with `cols` columns, and a mask of positions that
    exist."""
    rows = np.arange(len(at), dtype=np.int64)[:, None]
    return rows * cols + at, (at >= 0) & (at < cols)


def place_columns(at: I32, x: F32, cols: int) -> F32:
    """x at positions of each row, zeros elsewhere. If positions repeat, the last wins."""
    out = np.zeros((len(at), cols), np.float32)
    places, inside = flat_places(at, cols)
    for j in range(at.shape[1]):
        out.reshape(-1)[places[:, j][inside[:, j]]] = x[:, j][inside[:, j]]
    return out


def random_matrix(step: int, tensor: int, rows: int, cols: int) -> F32:
    """Uniform in [-1, 1). Without a seed, so that it is the same on every rank."""
    u = draws.uniform(0, step, tensor, DRAW, 0, rows * cols)
    return (np.float32(2) * u - np.float32(1)).reshape(rows, cols)


def padded(x: Any, rows: int, cols: int) -> F32:
    """x row by row, padded with zeros; a view if it needs no padding."""
    if len(x) == rows * cols:
        return np.asarray(x, np.float32).reshape(rows, cols)
    out = np.zeros(rows * cols, np.float32)
    out[: len(x)] = x
    return out.reshape(rows, cols)


def lookup(table: F32, index: I32) -> F32:
    """The values of a table at indices, clipped to it."""
    return table.take(index, mode="clip")


#: operators on arrays: functions of the arguments, and of the operator's own number or, without
#: one, the columns of the result
OPERATORS: dict[str, Callable[..., Any]] = {
    "hadamard": hadamard, "top_columns": top_columns, "place_columns": place_columns,
}  # fmt: skip
