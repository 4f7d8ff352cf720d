"""Values known before any data: functions of n, step and the parameters, computed on the host.

Floats are float64; exp, log, log2 and powers are those of elementary.py. Integers are exact up to
EXACT, which float64 holds: larger ones stay there, and NaN is 0.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from compll.ir.expr import Expr, walk
from compll.numerics import elementary

Number = int | float | bool | str
#: the largest magnitude of an integer that is known before any data
EXACT = 1 << 53


def _in_numpy(function: Callable[..., Any]) -> Callable[..., float]:
    """The function of float64 numbers, without warnings."""

    def call(*args: float) -> float:
        with np.errstate(all="ignore"):
            return float(function(*map(np.float64, args)))

    return call


def _of_kind(wholes: Callable[[int, int], int], floats: Callable[..., Any]) -> Callable[..., Any]:
    """A quotient or remainder: of integers, 0 if the divisor is 0; of floats, by IEEE rules."""
    of_floats = _in_numpy(floats)

    def call(a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return wholes(a, b) if b else 0
        return of_floats(a, b)

    return call


def _exponent(a: float) -> int:
    with np.errstate(over="ignore"):
        (bits,) = np.array([a]).astype(np.float32).view(np.uint32)
    return (int(bits) >> 23 & 255) - 127


def _exp2(a: int) -> float:
    exact = max(-127, min(a, 128))
    return {-127: 0.0, 128: math.inf}.get(exact, math.ldexp(1.0, exact))


def _whole(a: Any) -> int:
    """An integer: truncated, at most EXACT; 0 for NaN."""
    return 0 if a != a else int(max(-EXACT, min(a, EXACT)))


_MEANING: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg,
    "div": _in_numpy(np.divide), "pow": _in_numpy(elementary.NUMPY.power),
    "floordiv": _of_kind(operator.floordiv, lambda a, b: np.floor(a / b)),
    "bitand": operator.and_, "bitor": operator.or_, "bitxor": operator.xor,
    "shl": lambda a, b: a << min(b, 64) if b >= 0 else 0,
    "shr": lambda a, b: a >> b if b >= 0 else -(a < 0),
    "abs": abs,
    "trunc": lambda a: a if math.isfinite(a) else 0,
    "floor": _in_numpy(np.floor), "ceil": _in_numpy(np.ceil), "round": _in_numpy(np.rint),
    "exponent": _exponent, "exp2": _exp2, "sqrt": _in_numpy(np.sqrt),
    "exp": _in_numpy(elementary.NUMPY.exp), "log": _in_numpy(elementary.NUMPY.log),
    "log2": _in_numpy(elementary.NUMPY.log2),
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "eq": operator.eq, "ne": operator.ne, "and": lambda a, b: bool(a) and bool(b),
    "or": lambda a, b: bool(a) or bool(b), "not": operator.not_,
    "min": lambda a, b: a if a < b else b, "max": lambda a, b: a if a > b else b,
    "choose": lambda c, a, b: a if c else b, "where": lambda c, a, b: a if c else b,
    "probit": elementary.probit,
    "isfinite": math.isfinite,
    "float": float, "int": lambda a: a, "lift": lambda a: a,
}  # fmt: skip


def evaluate(expr: Expr, env: Mapping[str, Number]) -> Number:
    """The value of a static expression; `env` gives n, step and the parameters."""
    done: dict[int, Number] = {}
    for e in walk(expr):
        done[id(e)] = apply(e, [done[id(a)] for a in e.args], env)
    return done[id(expr)]


def apply(e: Expr, args: Sequence[Number], env: Mapping[str, Number]) -> Number:
    """The value of a static expression whose arguments have these values."""
    value: Number
    if e.op in ("const", "param"):
        value = e.value if e.op == "const" else env[str(e.value)]
    else:
        value = _MEANING[e.op](*args)
    return _whole(value) if e.type.dtype == "int" else value


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
