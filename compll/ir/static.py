"""Values known before any data: functions of n, step and the parameters, computed on the host.

Floats are float64; exp, log, log2 and powers are those of bits.py. Integers are exact up to
EXACT, which float64 holds: larger ones stay there, and NaN is 0.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from compll.errors import UsageError
from compll.ir.expr import Expr, walk
from compll.numerics import bits
from compll.numerics.bits import MEANINGS

Number = int | float | bool | str
#: the largest magnitude of an integer that is known before any data
EXACT = 1 << 53


def _in_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of 64-bit numbers, as one of Python's."""

    def call(*args: float) -> Any:
        given = (np.int64(a) if isinstance(a, int) else np.float64(a) for a in args)
        with np.errstate(all="ignore"):
            return function(*given).item()

    return call


def _whole(a: Any) -> int:
    """An integer: truncated, at most EXACT; 0 for NaN."""
    return 0 if a != a else int(max(-EXACT, min(a, EXACT)))


_MEANING: dict[str, Callable[..., Any]] = {
    **{
        name: _in_numpy(meaning.of)
        for name, meaning in MEANINGS.items()
        if {"f64", "i64"}.intersection(meaning.kinds)
    },
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "div": _in_numpy(np.divide), "sqrt": _in_numpy(np.sqrt),
    "floor": _in_numpy(np.floor), "ceil": _in_numpy(np.ceil), "round": _in_numpy(np.rint),
    "bitand": operator.and_, "bitor": operator.or_, "bitxor": operator.xor,
    "shl": lambda a, b: a << min(b, 64) if b >= 0 else 0,
    "shr": lambda a, b: a >> b if b >= 0 else -(a < 0),
    "abs": abs, "min": lambda a, b: a if a < b else b, "max": lambda a, b: a if a > b else b,
    "trunc": lambda a: a if math.isfinite(a) else 0,
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "eq": operator.eq, "ne": operator.ne, "and": lambda a, b: bool(a) and bool(b),
    "or": lambda a, b: bool(a) or bool(b), "not": operator.not_,
    "choose": lambda c, a, b: a if c else b, "where": lambda c, a, b: a if c else b,
    "probit": bits.probit,
    "float": float, "int": lambda a: a, "lift": lambda a: a,
}  # fmt: skip


def evaluate(expr: Expr, env: Mapping[str, Number]) -> Number:
    """The value of a static expression; `env` gives n, step and the parameters."""
    done: dict[Expr, Number] = {}
    for e in walk(expr):
        done[e] = apply(e, [done[a] for a in e.args], env)
    return done[expr]


def apply(e: Expr, args: Sequence[Number], env: Mapping[str, Number]) -> Number:
    """The value of a static expression whose arguments have these values."""
    value: Number
    if e.op in ("const", "param"):
        value = e.value if e.op == "const" else env[str(e.value)]
    else:
        value = _MEANING[e.op](*args)
    if e.type.dtype == "int":
        return _whole(value)
    return float(value) if e.type.dtype == "float" else value


def as_count(value: Number, n: int) -> int:
    """A static value as a number of elements, 0..n (NaN is 0)."""
    number = float(value)
    return 0 if math.isnan(number) else int(min(max(number, 0.0), float(n)))


def covers(op: str) -> bool:
    """True if the host can compute the operator."""
    return op in _MEANING


def depends(expr: Expr) -> set[str]:
    """Names (n, step, parameters) that a static expression depends on."""
    return {str(e.value) for e in walk(expr) if e.op == "param"}


# ---- matrices -----------------------------------------------------------------------------------
# Sizes of matrices: functions of n alone, so that payloads have a known bound.
# A dimension is an integer expression with the parameters replaced by their values. Expressions
# are interned, so two dimensions are equal when they are the same object.

#: elements that a matrix of a tiny tensor may have; of a large one, ROOM times the tensor's
LEAST, ROOM = 1 << 20, 64
#: elements of any matrix: positions are int32, also those of the elements of a last tile behind
#: them; a tile has at most 2**14
LARGEST = 2**31 - 2**14
#: the longest inner dimension of products with float32 sums; CUDA computes their elements on reads
SHORT = 8
#: products of at most this many columns read each row of the first matrix once
NARROW = 16


def extents(dims: tuple[Expr, ...], n: int) -> tuple[int, int]:
    """Rows and columns for n elements. Raises UsageError for over max(LEAST, ROOM * n) elements, or
    over LARGEST."""
    rows, cols = (extent(d, n) for d in dims)
    if rows * cols > max(LEAST, ROOM * n):
        raise UsageError(
            f"a matrix of {rows} x {cols} elements for a tensor of {n}: "
            "`when:` in the spec can exclude such tensors"
        )
    if rows * cols > LARGEST:
        raise UsageError(
            f"a matrix of {rows} x {cols} elements for a tensor of {n}: positions are int32, too "
            f"small for more than {LARGEST}; encode the tensor in parts"
        )
    return rows, cols


@lru_cache(maxsize=4096)
def extent(dim: Expr, n: int) -> int:
    """A dimension for n elements, at least 1. Cached, as small tensors ask for it in every step."""
    value = float(evaluate(dim, {"n": n}))
    return int(min(value, 2.0**62)) if value >= 1 else 1


def check_matrices(matrices: Iterable[tuple[str, tuple[Expr, ...]]], n: int) -> None:
    """Raise UsageError if a matrix has fewer elements than the piece of n.

    matrices: kind, rows and columns of each. A matrix of kind "matrix" stores the elements, one of
    kind "flat" replaces them; "" is for other matrices, and only their size is checked.
    """
    for kind, dims in matrices if n else ():
        rows, cols = extents(dims, n)
        if kind and rows * cols < n:
            raise UsageError(
                f"a matrix of {rows} x {cols} has no room for {n} elements"
                if kind == "matrix"
                else f"flat: a matrix of {rows * cols} elements, {n} are needed"
            )


def short(product: Expr) -> bool:
    """True if the inner dimension of a product is a constant of at most SHORT."""
    inner = product.args[0].type.dims[1]
    return inner.op == "const" and int(inner.value) <= SHORT
