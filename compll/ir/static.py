"""Values known before any data: functions of n, step and the parameters, computed on the host."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from compll.ir.expr import Expr, walk
from compll.numerics import quantiles

Number = int | float | bool | str


def _pow(a: float, b: float) -> float:
    """a ** b as a float, inf or nan instead of an error or a giant integer."""
    try:
        return math.pow(a, b)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


def _guard(function: Callable[..., Any], failed: float = math.nan) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except (ValueError, OverflowError, ZeroDivisionError):
            return failed

    return call


def _div(a: float, b: float) -> float:
    if b == 0:
        return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a)
    return a / b


def _parted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a result of 0 for integers divided by 0, as elementwise operators have
    it."""
    guarded = _guard(function)
    return lambda a, b: 0 if b == 0 and isinstance(a, int) and isinstance(b, int) else guarded(a, b)


def _float(a: float) -> float:
    try:
        return float(a)
    except OverflowError:
        return math.inf if a > 0 else -math.inf


def _exponent(a: float) -> int:
    (bits,) = np.array([a]).astype(np.float32).view(np.uint32)
    return (int(bits) >> 23 & 255) - 127


def _whole(a: float) -> int:
    """The floor as an int; 0 for infinity and NaN, for operators on bits."""
    return int(a) if isinstance(a, int) or math.isfinite(a) else 0


def _of_bits(function: Callable[[int, int], int]) -> Callable[..., int]:
    return lambda a, b: function(_whole(a), _whole(b))


def _exp2(a: float) -> float:
    exact = max(-127, min(_whole(a), 128))
    return {-127: 0.0, 128: math.inf}.get(exact, math.ldexp(1.0, exact))


_MEANING: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _div, "pow": _pow,
    "floordiv": _parted(operator.floordiv), "mod": _parted(operator.mod), "neg": operator.neg,
    "bitand": _of_bits(operator.and_), "bitor": _of_bits(operator.or_),
    "bitxor": _of_bits(operator.xor),
    "shl": _of_bits(lambda a, b: a << min(b, 62) if b >= 0 else 0),
    "shr": _of_bits(lambda a, b: a >> b if b >= 0 else -(a < 0)),
    "abs": abs, "sign": lambda a: -1 if a < 0 else 1,
    "floor": _guard(math.floor), "ceil": _guard(math.ceil), "round": _guard(round),
    "trunc": _guard(math.trunc, 0),
    "exponent": _exponent, "exp2": _exp2,
    "sqrt": _guard(math.sqrt), "exp": _guard(math.exp, math.inf),
    "log": lambda a: -math.inf if a == 0 else _guard(math.log)(a),
    "log2": lambda a: -math.inf if a == 0 else _guard(math.log2)(a),
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "eq": operator.eq, "ne": operator.ne, "and": lambda a, b: bool(a) and bool(b),
    "or": lambda a, b: bool(a) or bool(b), "not": operator.not_,
    "min": lambda a, b: a if a < b else b, "max": lambda a, b: a if a > b else b,
    "probit": quantiles.probit, "gamma_above": quantiles.gamma_above,
    "isfinite": math.isfinite, "isnan": math.isnan, "isinf": math.isinf,
    "float": _float, "int": int, "lift": lambda a: a,
}  # fmt: skip


def evaluate(expr: Expr, env: Mapping[str, Number]) -> Number:
    """The value of a static expression; `env` gives n, step and the parameters."""
    done: dict[int, Number] = {}

    def value(e: Expr) -> Number:
        if id(e) not in done:
            done[id(e)] = compute(e)
        return done[id(e)]

    def compute(e: Expr) -> Number:
        if e.op == "const":
            return e.value  # type: ignore[no-any-return]
        if e.op == "param":
            return env[e.value]
        if e.op in ("choose", "where"):
            return value(e.args[1 if value(e.args[0]) else 2])
        return _MEANING[e.op](*map(value, e.args))  # type: ignore[no-any-return]

    return value(expr)


def as_count(value: Number, n: int) -> int:
    """A static value as a number of elements, 0..n (NaN is 0)."""
    number = float(value)
    return 0 if math.isnan(number) else int(min(max(number, 0.0), float(n)))


def covers(op: str) -> bool:
    """True if the host can compute the operator."""
    return op in _MEANING or op in ("choose", "where")


def depends(expr: Expr) -> set[str]:
    """Names (n, step, parameters) that a static expression depends on."""
    return {str(e.value) for e in walk(expr) if e.op == "param"}
