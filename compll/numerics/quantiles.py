"""Quantiles of distributions for numbers of the whole tensor, in plain float64 arithmetic.

[Note: gamma quantiles] They use exp and log of elementary.py; the rest is additions,
multiplications, divisions and square roots in a fixed order, without fused multiply-add, so that
every backend gives the same bits. `gamma` builds them from a backend's primitives: those of
elementary.py, and root(x); choose(c, then, otherwise), which calls one of two functions;
repeat(times, state, step), where step(k, *state) returns the next state and true for the last one,
for k = 1, 2, ... as a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

from compll.numerics import elementary
from compll.numerics.elementary import INF, NAN

STANDARD = NormalDist()
HALF_LOG_2PI = 0.9189385332046727


def probit(p: float) -> float:
    """The quantile p of a standard normal variable (NaN outside 0..1)."""
    if p in (0.0, 1.0):
        return math.copysign(math.inf, p - 0.5)
    return STANDARD.inv_cdf(p) if 0 < p < 1 else math.nan


class Gamma(NamedTuple):
    """Quantiles of gamma variables of scale 1; float64 in, float64 out."""

    log_gamma: Callable[..., Any]
    density: Callable[..., Any]
    series: Callable[..., Any]
    fraction: Callable[..., Any]
    above: Callable[..., Any]


def gamma(
    where: Any, magnitude: Any, root: Any, exp: Any, log: Any, choose: Any, repeat: Any
) -> Gamma:
    """The functions, built from these primitives."""

    def log_gamma(x: Any) -> Any:
        """The logarithm of the gamma function of x > 0: Stirling's series from 12 on."""

        def step(_: Any, product: Any, x: Any) -> Any:
            small = x < 12.0
            return (where(small, x * product, product), where(small, x + 1.0, x)), x >= 12.0

        product, x = repeat(12, (1.0, x), step)
        z = 1.0 / (x * x)
        p = z * (1 / 156) - 691 / 360360
        p = p * z + 1 / 1188
        p = p * z - 1 / 1680
        p = p * z + 1 / 1260
        p = p * z - 1 / 360
        p = p * z + 1 / 12
        return (x - 0.5) * log(x) - x + HALF_LOG_2PI + p / x - log(product)

    def density(shape: Any, y: Any, log_of_gamma: Any) -> Any:
        """The density of the logarithm y of a gamma variable."""
        return exp(shape * y - exp(y) - log_of_gamma)

    def series(shape: Any, x: Any) -> Any:
        """P(shape, x), the regularized lower incomplete gamma function, over density, to 1e-15.

        For x < shape + 1. As in Numerical Recipes 6.2.
        """

        def step(k: Any, term: Any, total: Any) -> Any:
            term = term * (x / (shape + k))
            total = total + term
            return (term, total), term < total * 1e-15

        first = 1.0 / shape
        return repeat(499, (first, first), step)[1]

    def fraction(shape: Any, x: Any) -> Any:
        """1 - P(shape, x), over density, for x >= shape + 1: Lentz's continued fraction."""

        def step(k: Any, b: Any, c: Any, d: Any, h: Any) -> Any:
            a = -k * (k - shape)
            b = b + 2.0
            d = 1.0 / (a * d + b)
            c = b + a / c
            return (b, c, d, h * (c * d)), magnitude(c * d - 1.0) < 1e-15

        b = x + 1.0 - shape
        return repeat(499, (b, 1e300, 1.0 / b, 1.0 / b), step)[3]

    def newton(shape: Any, p: Any) -> Any:
        """Newton's method on the logarithms of the nearer tail and of the variable, which works
        also for shapes far below 1. A step that leaves the known interval becomes a halving."""
        log_of_gamma, first = log_gamma(shape), log(shape)

        def step(_: Any, y: Any, low: Any, high: Any) -> Any:
            x = exp(y)
            below = x < shape + 1.0
            part = choose(below, lambda: series(shape, x), lambda: fraction(shape, x))
            tail, wanted = density(shape, y, log_of_gamma) * part, where(below, 1.0 - p, p)
            away = log(tail / wanted) * part
            by = where(below, -away, away)
            short = where(below, tail < wanted, tail > wanted)
            low, high, to = where(short, y, low), where(short, high, y), y + by
            inside = (low <= to) & (to <= high)
            near = inside & (magnitude(by) < 1e-8)
            return (where(inside, to, (low + high) * 0.5), low, high), near

        high = log(shape + root(shape) * 40.0 + 800.0)
        return exp(repeat(80, (where(first > -690.0, first, -690.0), -690.0, high), step)[0])

    def above(shape: Any, p: Any) -> Any:
        """The value that a variable of this shape exceeds with probability p.

        NaN for a shape that is not positive, or a p outside 0..1.
        """
        good = (shape > 0.0) & (shape < 1e6) & (p >= 0.0) & (p <= 1.0)
        ends = where(good, where(p == 0.0, INF, 0.0), NAN)
        inside = good & (p != 0.0) & (p != 1.0)
        return choose(inside, lambda: newton(shape, p), lambda: ends)

    return Gamma(log_gamma, density, series, fraction, above)


def _repeat(times: int, state: tuple[float, ...], step: Callable[..., Any]) -> tuple[float, ...]:
    for k in range(1, times + 1):
        state, last = step(float(k), *state)
        if last:
            break
    return state


#: quantiles for Python's numbers
PLAIN = gamma(
    lambda c, a, b: a if c else b, abs, math.sqrt, elementary.PLAIN.exp, elementary.PLAIN.log,
    lambda c, then, otherwise: then() if c else otherwise(), _repeat,
)  # fmt: skip
gamma_above: Callable[[float, float], float] = PLAIN.above
