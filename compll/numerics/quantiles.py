"""Quantiles of distributions on numbers of the whole tensor, in plain float64 arithmetic.

[Note: gamma quantiles] They take exp and log of elementary.py; the rest is additions,
multiplications, divisions and square roots in a fixed order, without fused multiply-add, so that
every backend gives the same bits. gamma.cuh says the same in CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

from compll.numerics import elementary

STANDARD = NormalDist()
EXP: Callable[[float], float] = elementary.PLAIN.exp
LOG: Callable[[float], float] = elementary.PLAIN.log
HALF_LOG_2PI = 0.9189385332046727


def probit(p: float) -> float:
    """What a standard normal variable stays below with probability p (NaN outside 0..1)."""
    if p in (0.0, 1.0):
        return math.copysign(math.inf, p - 0.5)
    return STANDARD.inv_cdf(p) if 0 < p < 1 else math.nan


def log_gamma(x: float) -> float:
    """The logarithm of the gamma function of x > 0: Stirling's series from 12 on."""
    product = 1.0
    while x < 12.0:
        product *= x
        x += 1.0
    z = 1.0 / (x * x)
    p = z * (1 / 156) - 691 / 360360
    p = p * z + 1 / 1188
    p = p * z - 1 / 1680
    p = p * z + 1 / 1260
    p = p * z - 1 / 360
    p = p * z + 1 / 12
    return (x - 0.5) * LOG(x) - x + HALF_LOG_2PI + p / x - LOG(product)


def density(shape: float, y: float, log_of_gamma: float) -> float:
    """Of the logarithm y of a gamma variable of scale 1."""
    return EXP(shape * y - EXP(y) - log_of_gamma)


def series(shape: float, x: float) -> float:
    """P(shape, x), the regularized lower incomplete gamma function, over density, to 1e-15.

    For x < shape + 1. As in Numerical Recipes 6.2.
    """
    term = 1.0 / shape
    total = term
    for k in range(1, 500):
        term *= x / (shape + k)
        total += term
        if term < total * 1e-15:
            break
    return total


def fraction(shape: float, x: float) -> float:
    """1 - P(shape, x), over density, for x >= shape + 1: Lentz's continued fraction."""
    b = x + 1.0 - shape
    c = 1e300
    d = 1.0 / b
    h = d
    for k in range(1, 500):
        a = -k * (k - shape)
        b += 2.0
        d = 1.0 / (a * d + b)
        c = b + a / c
        h *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return h


def gamma_above(shape: float, p: float) -> float:
    """What a gamma variable of this shape and scale 1 exceeds with probability p.

    Newton's method on the logarithms of the nearer tail and of the variable, where the answer
    lies also for shapes far below 1; a step that leaves the interval known becomes a halving.
    NaN for a shape that is not positive, or a p outside 0..1.
    """
    if not (0.0 < shape < 1e6 and 0.0 <= p <= 1.0):
        return elementary.NAN
    if p == 0.0 or p == 1.0:
        return elementary.INF if p == 0.0 else 0.0
    low, high = -690.0, LOG(shape + 40.0 * math.sqrt(shape) + 800.0)
    log_of_gamma = log_gamma(shape)
    y = LOG(shape)
    y = y if y > low else low
    for _ in range(80):
        x = EXP(y)
        if x < shape + 1.0:
            part = series(shape, x)
            tail = density(shape, y, log_of_gamma) * part
            short = tail < 1.0 - p
            step = -LOG(tail / (1.0 - p)) * part
        else:
            part = fraction(shape, x)
            tail = density(shape, y, log_of_gamma) * part
            short = tail > p
            step = LOG(tail / p) * part
        if short:
            low = y
        else:
            high = y
        if low <= y + step <= high:
            y += step
            if abs(step) < 1e-8:
                break
        else:
            y = 0.5 * (low + high)
    return EXP(y)
