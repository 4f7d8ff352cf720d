"""Quantiles of distributions on numbers of the whole tensor, in plain float64 arithmetic.

The reference backend runs these functions as they stand and the CPU backend compiles them, so both
give the same bits.
"""

from __future__ import annotations

import math
from statistics import NormalDist

STANDARD = NormalDist()


def probit(p: float) -> float:
    """What a standard normal variable stays below with probability p (NaN outside 0..1)."""
    if p in (0.0, 1.0):
        return math.copysign(math.inf, p - 0.5)
    return STANDARD.inv_cdf(p) if 0 < p < 1 else math.nan


def gamma_below(shape: float, x: float) -> float:
    """The regularized lower incomplete gamma function P(shape, x), to about 1e-14.

    A series up to shape + 1, beyond it a continued fraction (Lentz), as in Numerical Recipes 6.2.
    """
    if x <= 0.0:
        return 0.0
    weight = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1.0:
        term = total = 1.0 / shape
        for k in range(1, 500):
            term *= x / (shape + k)
            total += term
            if term < total * 1e-15:
                break
        return min(1.0, weight * total)
    b = x + 1.0 - shape
    c, d = 1e300, 1.0 / b
    h = d
    for k in range(1, 500):
        a = -k * (k - shape)
        b += 2.0
        d = 1.0 / (a * d + b)
        c = b + a / c
        h *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return max(0.0, 1.0 - weight * h)


def gamma_above(shape: float, p: float) -> float:
    """What a gamma variable of this shape and scale 1 exceeds with probability p.

    Halves an interval of the logarithm, where the answer lies also for shapes far below 1. NaN for
    a shape that is not positive, or a p outside 0..1.
    """
    if not (0.0 < shape < 1e6 and 0.0 <= p <= 1.0):
        return math.nan
    if p == 0.0:
        return math.inf
    low, high = -690.0, math.log(shape + 40.0 * math.sqrt(shape) + 800.0)
    for _ in range(70):
        middle = 0.5 * (low + high)
        if gamma_below(shape, math.exp(middle)) < 1.0 - p:
            low = middle
        else:
            high = middle
    return math.exp(0.5 * (low + high))
