"""Typing rules of elementwise operators: numbers, conditions, draws, one value per element.

A rule takes the context, the operator and its arguments, and returns the typed expression.
"""

from __future__ import annotations

import math
from dataclasses import replace

from compll.errors import RuleError
from compll.frontend.rule_context import LARGEST, LEAST, Context
from compll.ir.expr import INFIX, Expr, Type

# numbers


def real(c: Context, op: str, *args: Expr) -> Expr:
    return c.elementwise(op, tuple(map(c.number, args)))


def power(c: Context, op: str, base: Expr, exponent: Expr) -> Expr:
    """A power of data: small integer powers are products, and the power 0.5 is the root."""
    a, b = c.number(base), c.number(exponent)
    power = exponent.value if exponent.op == "const" else None
    if a.type.shape == "static" or power not in (1, 2, 3, 4, 0.5):
        return c.elementwise(op, (a, b))
    if power == 0.5:
        return c.elementwise("sqrt", (a,))
    square = c.elementwise("mul", (a, a)) if power > 1 else a
    other = {1: None, 2: None, 3: a, 4: square}[power]
    return square if other is None else c.elementwise("mul", (square, other))


def arithmetic(c: Context, op: str, *args: Expr) -> Expr:
    return c.elementwise(op, c.same(args))


def integer(c: Context, op: str, *args: Expr) -> Expr:
    args = tuple(map(c.exact, args))
    for a in args:
        if a.type.dtype not in ("int", "bool"):
            hint = "of floats, take x // 2**b and x % 2**b"
            if op in ("bitand", "bitor"):
                hint = f"conditions are joined by `{op.removeprefix('bit')}`; {hint}"
            hint = "a power is written **" if op == "bitxor" else hint
            raise RuleError(f"{INFIX[op][0]} takes integers, not {a.type}", hint)
    return c.elementwise(op, tuple(c.number(a, "int") for a in args))


def rounding(c: Context, op: str, x: Expr) -> Expr:
    if x.type.dtype in ("int", "bool"):
        return c.number(x, "int")
    out = c.elementwise(op, (x,))
    if out.type.shape != "static":
        return out
    return c.pool.make(op, out.args, replace(out.type, dtype="int"))


def cast(c: Context, op: str, x: Expr) -> Expr:
    x = c.number(x)
    return c.elementwise(op, (c.lift(x, c.reduced) if x.type.shape == "static" else x,))


def of_bits(c: Context, op: str, x: Expr) -> Expr:
    """An integer from the bits of a float32. A number known before any data is rounded first."""
    return c.elementwise(op, (c.number(x),), "int")


def from_float_bits(c: Context, op: str, x: Expr) -> Expr:
    if x.type.dtype != "int":
        raise RuleError(f"{op} takes an integer, not {x.type}", "float_bits(x) makes one")
    return c.elementwise(op, (x,), "float")


def exp2(c: Context, op: str, x: Expr) -> Expr:
    x = c.exact(x)
    if x.type.dtype not in ("int", "bool"):
        raise RuleError(f"exp2 takes an integer, not {x.type}", "2**x takes any number")
    return c.elementwise(op, (c.number(x, "int"),), "float")


# definitions, of which no backend knows


def mod(c: Context, op: str, *args: Expr) -> Expr:
    a, b = c.same(args)
    whole = c.elementwise("floordiv", (a, b))
    return c.elementwise("sub", (a, c.elementwise("mul", (b, whole))))


def sign(c: Context, op: str, x: Expr) -> Expr:
    (x,) = c.same((x,))
    zero, below, above = (c.number(c.pool.const(i), x.type.dtype) for i in (0, -1, 1))
    return c.elementwise("where", (compare(c, "lt", x, zero), below, above))


def isnan(c: Context, op: str, x: Expr) -> Expr:
    return compare(c, "ne", c.number(x), c.number(x))


def isinf(c: Context, op: str, x: Expr) -> Expr:
    return compare(c, "eq", c.elementwise("abs", (c.number(x),)), c.pool.const(math.inf))


def clip(c: Context, op: str, x: Expr, low: Expr, high: Expr) -> Expr:
    return arithmetic(c, "min", arithmetic(c, "max", x, low), high)


def whole_number(c: Context, x: Expr, low: int, high: int) -> Expr:
    """x as an integer from low to high: clamped, then truncated; NaN becomes `low`."""
    inside = clip(c, "clip", x, c.pool.const(low), c.pool.const(high))
    return whole_element(c, inside)


def whole_element(c: Context, x: Expr) -> Expr:
    """x as int32: truncated to the nearest number that float32 has; NaN becomes 0."""
    if x.type.dtype != "float":
        return x
    return c.pool.make("trunc", (x,), replace(x.type, dtype="int"))


def truncated(c: Context, op: str, x: Expr) -> Expr:
    """x as an integer, clamped to int32; 0 if it is not finite."""
    if x.type.dtype != "float":
        return c.number(x, "int")
    if x.type.shape != "scalar":
        return whole_element(c, x)
    inside = whole_number(c, x, LEAST, LARGEST)
    return choose(c, "choose", test(c, "isfinite", x), inside, c.pool.const(0))


def trit(c: Context, x: Expr) -> Expr:
    """x, an element, as 0, 1 or 2: truncated; NaN becomes 0."""
    return c.pool.make("trit", (c.number(x),), Type("int", "n"))


# conditions


def compare(c: Context, op: str, *args: Expr) -> Expr:
    texts = all(a.type.dtype == "str" for a in args)
    return c.elementwise(op, args if texts else c.same(args), "bool")


def logic(c: Context, op: str, *args: Expr) -> Expr:
    return c.elementwise(op, tuple(map(c.condition, args)), "bool")


def test(c: Context, op: str, x: Expr) -> Expr:
    return c.elementwise(op, (c.number(x),), "bool")


def where(c: Context, op: str, condition: Expr, *either: Expr) -> Expr:
    condition, (a, b) = c.condition(condition), c.same(either)
    return c.elementwise("where", (condition, a, b))


def choose(c: Context, op: str, condition: Expr, *either: Expr) -> Expr:
    condition, (a, b) = c.condition(condition), c.same(either)
    shape, _ = c.shape((condition, a, b))
    op = "choose" if shape in ("static", "scalar") else "where"
    return c.elementwise(op, (condition, a, b))


# quantiles of distributions


def probit(c: Context, op: str, p: Expr) -> Expr:
    return real(c, op, c.static(op, p, "its number"))


def pareto_above(c: Context, op: str, *args: Expr) -> Expr:
    """The value that a generalized Pareto variable exceeds with probability p.

    With q = (mean / std)**2: shape (q - 1) / 2, scale mean * (q + 1) / 2 by moments.
    """
    c.need_one_number(op, args)
    mean, std, p = map(c.number, args)
    ratio = real(c, "div", mean, std)
    q, one, two = real(c, "mul", ratio, ratio), c.pool.const(1.0), c.pool.const(2.0)
    less, more = real(c, "sub", q, one), real(c, "add", q, one)
    rest = real(c, "sub", one, real(c, "pow", p, real(c, "div", less, two)))
    return real(c, "mul", mean, real(c, "mul", rest, real(c, "div", more, less)))


# draws


def random(c: Context, op: str, low: Expr, high: Expr) -> Expr:
    if not c.encoding:
        raise RuleError("random numbers are drawn in encode", "put what was drawn into the payload")
    return _drawn_between(c, "uniform", next(c.draws), low, high)


def shared(c: Context, op: str, low: Expr, high: Expr) -> Expr:
    if not c.encoding:
        raise RuleError("shared draws are made in encode", "decode knows them by their names")
    return _drawn_between(c, "shared", next(c.shared_draws), low, high)


def _drawn_between(c: Context, op: str, draw: int, low: Expr, high: Expr) -> Expr:
    """A draw in [low, high)."""
    u = c.pool.make(op, (), Type("float", "n"), draw)
    low, high = c.number(low), c.number(high)
    if all(x.op == "float" and x.args[0].value == i for i, x in enumerate((low, high))):
        return u
    width = c.elementwise("sub", (high, low))
    return c.elementwise("add", (low, c.elementwise("mul", (width, u))))
