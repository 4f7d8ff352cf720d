"""exp, log, log2 and powers, the same to the last bit in every backend.

[Note: elementary functions] A processor's library, NumPy's vector code and a GPU each round these
functions in their own way, so payloads would differ. Here they consist of float64 additions,
multiplications, one division and exact operations on exponents, in a fixed order, without fused
multiply-add: IEEE 754 defines all of these to the bit. Errors are below 4 units in the last place
of float64 (for a power: relative 1e-16 times the exponent), so a float32 result is nearly always
the rounded true value. The polynomials are those of Taylor and of 2 artanh(s), s = (m - 1) / (m +
1).

Functions take and give float64, NumPy's or a printer's (see traced.py).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from compll.numerics.traced import bits, convert, floor, magnitude, nearest, where

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
#: LN2 in two parts; the first has 21 bits of zeros at its end, so that k times it is exact
LN2_HIGH, LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
INF, NAN = float("inf"), float("nan")
#: float64: the smallest normal number, bits of the fraction, and the exponent's bias
NORMAL, FRACTION, BIAS = 2.2250738585072014e-308, 52, 1023


def power_of_two(k: Any) -> Any:
    """2 to the power of an integral k, for -1022 <= k <= 1023."""
    return bits((convert(k, "i64") + BIAS) << FRACTION)


def split(x: Any) -> tuple[Any, Any]:
    """The mantissa in [0.5, 1) and the exponent of a positive, finite x."""
    tiny = magnitude(x) < NORMAL
    raw = bits(where(tiny, x * 2.0**54, x))
    mantissa = bits(raw & ((1 << FRACTION) - 1) | ((BIAS - 1) << FRACTION))
    exponent = ((raw >> FRACTION) & 2047) - (BIAS - 1)
    return mantissa, convert(exponent, "f64") - where(tiny, 54.0, 0.0)


def _polynomial(x: Any, first: float, *others: float) -> Any:
    """A polynomial by Horner's rule; coefficients from the highest power to the constant."""
    second, *rest = others
    value = x * first + second
    for each in rest:
        value = value * x + each
    return value


def _exp_small(r: Any) -> Any:
    """e to the r, for |r| <= 0.35."""
    return _polynomial(r, *(1 / math.factorial(k) for k in range(13, -1, -1)))


def _scaled(value: Any, k: Any) -> Any:
    """value times 2 to the k, for |k| < 2000, rounded once."""
    half = floor(k * 0.5)
    return value * power_of_two(half) * power_of_two(k - half)


def _log_parts(x: Any) -> Any:
    """The logarithm of the mantissa, brought near to 1, and the exponent."""
    m, e = split(x)
    low = m < 0.7071067811865476
    m, e = where(low, m + m, m), where(low, e - 1.0, e)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = _polynomial(z, *(1 / k for k in range(21, 2, -2)))
    return (s + s) + (s + s) * z * p, e


def _at_the_ends(x: Any, value: Any) -> Any:
    """A logarithm, also of zero, infinity, NaN and negative numbers."""
    value = where(x == INF, INF, value)
    return where(x > 0.0, value, where(x == 0.0, -INF, NAN))


def exp(x: Any) -> Any:
    """e to the x."""
    y = where(x > -760.0, x, -760.0)
    y = where(y < 720.0, y, 720.0)
    k = nearest(y * LOG2E)
    r = (y - k * LN2_HIGH) - k * LN2_LOW
    return where(x == x, _scaled(_exp_small(r), k), x)


def log(x: Any) -> Any:
    """The natural logarithm."""
    m, e = _log_parts(x)
    return _at_the_ends(x, e * LN2_HIGH + (m + e * LN2_LOW))


def log2(x: Any) -> Any:
    """The logarithm to base 2."""
    m, e = _log_parts(x)
    return _at_the_ends(x, e + m * LOG2E)


def power(a: Any, b: Any) -> Any:
    """a to the power b."""
    size = magnitude(a)
    t = b * log2(size)
    y = where(t > -1100.0, t, -1100.0)
    y = where(y < 1100.0, y, 1100.0)
    k = nearest(y)
    v = where(t == t, _scaled(_exp_small((y - k) * LN2), k), t)
    v = where((size == 1.0) & (magnitude(b) == INF), 1.0, v)
    half = b * 0.5
    whole = floor(b) == b
    odd = whole & (floor(half) != half)
    v = where(a < 0.0, where(odd, -v, where(whole | (size == INF), v, NAN)), v)
    return where((b == 0.0) | (a == 1.0), 1.0, v)


def probit(p: float) -> float:
    """The quantile p of a standard normal variable (NaN outside 0..1)."""
    if p in (0.0, 1.0):
        return math.copysign(math.inf, p - 0.5)
    return NormalDist().inv_cdf(p) if 0 < p < 1 else math.nan
