"""Shapes of element expressions that take fewer instructions than operator by operator.

What they become is in cuda/text.py and cuda/values.py; bits of results are the same.
"""

from __future__ import annotations

import numpy as np

from compll.ir.expr import Expr
from compll.ir.static import depends, evaluate
from compll.passes.ranges import bounds


def constant(expr: Expr) -> float | int | None:
    """The number that an expression is for all parameters, or nothing."""
    while expr.op in ("float", "int", "lift") and expr.args:
        expr = expr.args[0]
    if expr.type.shape != "static" or expr.type.dtype not in ("float", "int") or depends(expr):
        return None
    value = evaluate(expr, {})
    return value if isinstance(value, int | float) and abs(value) < 1e30 else None


def comparable(expr: Expr) -> bool:
    """Whether an extreme is one with a constant that is no zero, or none below: the devices' own
    instruction takes any other value for larger than NaN, as we do, but -0 for less than 0."""
    first, second = expr.args
    if expr.op == "min" and first.op == "max" and constant(second) is None:
        # of what is neither NaN nor -0, with a whole number
        whole = second.op == "float" and second.args[0].type.dtype == "int"
        return whole and comparable(first)
    number = constant(second)
    return number is not None and (number > 0 if expr.op == "min" else number >= 0)


def clipped(expr: Expr) -> bool:
    """Whether a number is within constants that an int32 holds, and so is no NaN."""
    if expr.op != "min" or expr.args[0].op != "max":
        return False
    ends = (constant(expr.args[0].args[1]), constant(expr.args[1]))
    return all(end is not None and abs(end) < 1 << 31 for end in ends)


def shifted_power(expr: Expr) -> bool:
    """Whether a number is a power of two, shifted right by less than its bits."""
    if expr.op != "float" or expr.args[0].op != "shr" or expr.args[0].type.dtype != "int":
        return False
    power = constant(expr.args[0].args[0])
    return power is not None and int(power).bit_count() == 1 and bounds(expr.args[0])[0] > 0


def natural(expr: Expr) -> bool:
    """Whether a number that is not negative is divided by a positive constant."""
    by = constant(expr.args[1])
    return by is not None and by > 0 and bounds(expr.args[0])[0] >= 0


def own_power(expr: Expr) -> bool:
    """Whether a number is divided by the power of two of its own exponent."""
    if expr.op != "div" or expr.args[1].op != "exp2":
        return False
    (power,) = expr.args[1].args
    return power.op == "exponent" and unsigned(power.args[0]) is unsigned(expr.args[0])


def unsigned(expr: Expr) -> Expr:
    """An expression without what changes its sign alone."""
    while expr.op in ("abs", "neg"):
        (expr,) = expr.args
    return expr


def draw_below_less_one(expr: Expr) -> bool:
    """Whether a random draw is compared with an expression less 1."""
    if expr.op != "lt" or expr.args[0].op != "uniform" or expr.args[1].op != "sub":
        return False
    return constant(expr.args[1].args[1]) == 1


def counted(expr: Expr) -> list[tuple[Expr, float]]:
    """Of a sum of comparisons `x < bound` with numbers, each x and bound; none of anything else."""
    if expr.op == "add" and expr.type.dtype == "int":
        parts = [counted(a) for a in expr.args]
        return parts[0] + parts[1] if all(parts) else []
    if expr.op != "int" or expr.args[0].op != "lt":
        return []
    x, bound = expr.args[0].args
    known = constant(bound)
    if x.type.dtype != "float" or known is None or not 1e-15 < known < 1e9:
        return []
    return [(x, float(np.float32(known)))]


def opposite(expr: Expr) -> bool:
    """Whether an expression is `where(c, a - b, a + b)`."""
    if expr.op != "where" or (expr.type.dtype, expr.args[1].op, expr.args[2].op) != (
        "float",
        "sub",
        "add",
    ):
        return False
    return all(a is b for a, b in zip(expr.args[1].args, expr.args[2].args, strict=True))


def negative_bit(expr: Expr) -> int | None:
    """Of `where(x < 0, 2**bit, 0)` of whole numbers, the bit."""
    if expr.op != "where" or expr.type.dtype != "int" or expr.args[0].op != "lt":
        return None
    number, zero = (constant(a) for a in (expr.args[0].args[1], expr.args[2]))
    power = constant(expr.args[1])
    if (number, zero) != (0, 0) or not isinstance(power, int) or power <= 0 or power & (power - 1):
        return None
    return power.bit_length() - 1
