"""Operators on single numbers that are not one instruction everywhere: MEANINGS and FORMATS.

NumPy runs these functions for the reference and for numbers known before any data; both printers
write them as instructions (see traced.py). A printer may have an instruction of its own for one.

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
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from compll.numerics.traced import (
    bits,
    convert,
    floor,
    kind_of,
    magnitude,
    nearest,
    quotient,
    remainder,
    unsigned_right,
    where,
)
from compll.numerics.traced import floor as floor_

# ---- elementary ---------------------------------------------------------------------------------
# exp, log, log2 and powers, the same to the last bit in every backend.

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


# ---- bits ---------------------------------------------------------------------------------------

SIGN_LESS, INFINITE = 0x7FFFFFFF, 0x7F800000
#: key of every NaN, which processors make with either sign: the one above that of infinity
NAN_KEY = 0x7F800001
#: bits of the NaN with that key, which conversions leave as they are
QUIET = 0x7FC00000
FLOATS, WHOLES = ("f32", "f64"), ("i32", "i64")


def minimum(a: Any, b: Any) -> Any:
    """The smaller number; b if they do not compare."""
    return where(a < b, a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger number; b if they do not compare."""
    return where(a > b, a, b)


def clamp(x: Any, low: float, high: float) -> Any:
    """x, at least `low` and at most `high`; `low` for NaN."""
    return minimum(maximum(x, low), high)


def absolute(x: Any) -> Any:
    """The magnitude; the smallest integer stays as it is."""
    return magnitude(x) if kind_of(x) in FLOATS else where(x < 0, -x, x)


def isfinite(x: Any) -> Any:
    """True if a float is neither infinite nor NaN."""
    return magnitude_bits(x) < INFINITE if kind_of(x) == "f32" else magnitude(x) < INF


#: states take up smaller magnitudes only: sums of them over a tensor, and of their squares, are
#: finite, so that one huge gradient does not spoil those after it
HUGE = 2.0**48


def floordiv(a: Any, b: Any) -> Any:
    """The quotient, rounded down; of integers, 0 if b is 0."""
    if kind_of(a) in FLOATS:
        return floor_(a / b)
    # no processor traps at a divisor of 1, in place of 0 and -1
    safe = where((b == 0) | (b == -1), 1, b)
    rest = remainder(a, safe)
    below = ((rest ^ safe) < 0) & (rest != 0)
    result = quotient(a, safe) - convert(below, kind_of(a))
    return where(b == 0, 0, where(b == -1, -a, result))


def _width(x: Any) -> int:
    return 32 if kind_of(x) == "i32" else 64


def _few(x: Any, by: Any) -> Any:
    return (by >= 0) & (by < _width(x))


def shl(x: Any, by: Any) -> Any:
    """x shifted left; 0 by a negative number of bits or all of them."""
    return where(_few(x, by), x << (by & (_width(x) - 1)), 0)


def shr(x: Any, by: Any) -> Any:
    """x shifted right, with copies of the sign; by all bits if their number is negative."""
    return x >> where(_few(x, by), by, _width(x) - 1)


def float_bits(x: Any) -> Any:
    """The bits of x as a float32, as an integer of as many bits as x has."""
    return convert(bits(convert(x, "f32")), "i32" if kind_of(x) == "f32" else "i64")


def from_float_bits(i: Any) -> Any:
    """The float32 that has the lower 32 bits of an integer, in as many bits as that has."""
    return convert(bits(convert(i, "i32")), "f32" if kind_of(i) == "i32" else "f64")


def exponent(x: Any) -> Any:
    """The exponent in the bits of a float32: floor(log2(abs(x))) for a normal number."""
    return (float_bits(x) >> 23 & 255) - 127


def exp2(i: Any) -> Any:
    """2**i as float32, exactly: 0 below -126, infinity above 127."""
    return exp2_inside(clamp(i, -127, 128))


def exp2_inside(i: Any) -> Any:
    """2**i for i from -127 to 128, as exp2 has it."""
    return from_float_bits((i + 127) << 23)


def magnitude_bits(x: Any) -> Any:
    """The bits of a float32 without the sign; they order as magnitudes do."""
    return bits(x) & SIGN_LESS


def _folded(raw: Any) -> Any:
    """Bits of floats as integers of their order, and back."""
    return raw ^ (raw >> 31 & SIGN_LESS)


def order_key(x: Any) -> Any:
    """An int32 that orders as float32 does, NaN largest."""
    return where(x != x, NAN_KEY, _folded(bits(x)))


def magnitude_key(x: Any) -> Any:
    """The key of a float32 that is not below zero, and has no sign if it is NaN."""
    return minimum(bits(x), NAN_KEY)


def from_key(key: Any) -> Any:
    """Inverse of order_key."""
    return bits(where(key == NAN_KEY, QUIET, _folded(key)))


def trunc(x: Any) -> Any:
    """float32 as an int32, 0 for infinity and NaN; float64, which must fit, as an int64."""
    if kind_of(x) == "f64":
        return convert(x, "i64")
    return where(isfinite(x), convert(clamp(x, -(2.0**31), 2.0**31 - 128), "i32"), 0)


def code(x: Any, most: int) -> Any:
    """An int32 from 0 to `most`: truncated; NaN becomes 0."""
    return convert(x if kind_of(x) == "bool" else clamp(x, 0, most), "i32")


def trit(x: Any) -> Any:
    """0, 1 or 2: truncated; NaN becomes 0."""
    return code(x, 2)


def as_count(x: Any, n: Any) -> Any:
    """x as a number of elements, 0 to n; NaN is 0."""
    x, most = convert(x, "f64"), convert(n, "f64")
    inside = (x > 0.0) & (x < most)
    return where(x >= most, n, convert(where(inside, x, 0.0), "i64"))


# formats of at most 16 bits: from float32 to bits in an int32, and back


def bfloat16_bits(x: Any) -> Any:
    """Rounded to nearest even; NaN stays NaN."""
    raw = bits(x)
    near = raw + 0x7FFF + (unsigned_right(raw, 16) & 1)
    return unsigned_right(where(x != x, raw | 0x400000, near), 16)


def of_bfloat16(raw: Any) -> Any:
    """Inverse of bfloat16_bits."""
    return bits(raw << 16)


def float16_bits(x: Any) -> Any:
    """Rounded to nearest even; NaN stays NaN, with its upper bits."""
    size = magnitude_bits(x)
    normal = unsigned_right(size + (0xFFF - 0x38000000) + (size >> 13 & 1), 13)
    # a float32 in [.5, 1) has the last bit of a float16 below 2**-14
    tiny = bits(bits(size) + 0.5) - 0x3F000000
    result = where(size < 0x38800000, tiny, normal)
    result = where(size >= 0x477FF000, 0x7C00, result)
    result = where(size > INFINITE, size >> 13 & 0x3FF | 0x7E00, result)
    return result | (unsigned_right(bits(x), 16) & 0x8000)


def of_float16(raw: Any) -> Any:
    """Inverse of float16_bits."""
    size = raw & 0x7FFF
    normal = (size << 13) + 0x38000000
    large = normal + 0x38000000
    large = where(size > 0x7C00, large | 0x400000, large)
    tiny = bits(convert(size, "f32") * 2.0**-24)
    result = where(size >= 0x7C00, large, where(size < 0x400, tiny, normal))
    return bits(result | (raw & 0x8000) << 16)


def float8_e4m3_bits(x: Any) -> Any:
    """OCP's E4M3: nearest even; 448 where finite x is larger, NaN where x is not finite."""
    size = magnitude_bits(x)
    normal = unsigned_right(size + (0x7FFFF - (120 << 23)) + (size >> 20 & 1), 20)
    # the unit of a float in [2**14, 2**15) is that of the numbers below 2**-6
    tiny = bits(bits(size) + 2.0**14) - 0x46800000
    result = where(size < 0x3C800000, tiny, normal)
    result = where(size >= 0x43E00000, 0x7E, result)
    result = where(size >= INFINITE, 0x7F, result)
    return result | (unsigned_right(bits(x), 24) & 0x80)


def of_float8_e4m3(raw: Any) -> Any:
    """Inverse of float8_e4m3_bits."""
    size = raw & 0x7F
    normal, tiny = (size << 20) + (120 << 23), bits(convert(size, "f32") * 2.0**-9)
    result = where(size == 0x7F, QUIET, where(size < 8, tiny, normal))
    return bits(result | (raw & 0x80) << 24)


class Format(NamedTuple):
    """A float of `width` bits: functions from float32 to its bits, in an int32, and back."""

    width: int
    bits: Callable[[Any], Any]
    value: Callable[[Any], Any]


FORMATS = {
    "float16": Format(16, float16_bits, of_float16),
    "bfloat16": Format(16, bfloat16_bits, of_bfloat16),
    "float8_e4m3": Format(8, float8_e4m3_bits, of_float8_e4m3),
}


def _rounded(form: Format) -> Callable[[Any], Any]:
    return _single(lambda x: form.value(form.bits(x)))


def _single(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of float32 for float64, too, which is rounded first."""
    return lambda x: convert(function(convert(x, "f32")), kind_of(x))


@_single
def bfloat16_up(x: Any) -> Any:
    """Rounded to bfloat16 away from zero."""
    raw = bits(x)
    return bits(where(isfinite(x), raw + 0xFFFF & -0x10000, raw))


def _wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of float64 for float32, too, which is rounded at the end."""
    return lambda *args: convert(function(*(convert(a, "f64") for a in args)), kind_of(args[0]))


class Meaning(NamedTuple):
    """A function of `arity` numbers, all of the same kind, one of `kinds`."""

    of: Callable[..., Any]
    kinds: tuple[str, ...]
    arity: int = 1


MEANINGS = {
    "abs": Meaning(absolute, (*FLOATS, *WHOLES)),
    "min": Meaning(minimum, (*FLOATS, *WHOLES), 2),
    "max": Meaning(maximum, (*FLOATS, *WHOLES), 2),
    "floordiv": Meaning(floordiv, (*FLOATS, *WHOLES), 2),
    "shl": Meaning(shl, WHOLES, 2),
    "shr": Meaning(shr, WHOLES, 2),
    "trunc": Meaning(trunc, FLOATS),
    "trit": Meaning(trit, ("f32", "i32", "bool")),
    "isfinite": Meaning(isfinite, FLOATS),
    "exp": Meaning(_wide(exp), FLOATS),
    "log": Meaning(_wide(log), FLOATS),
    "log2": Meaning(_wide(log2), FLOATS),
    "pow": Meaning(_wide(power), FLOATS, 2),
    "exponent": Meaning(exponent, FLOATS),
    "exp2": Meaning(exp2, WHOLES),
    "float_bits": Meaning(float_bits, FLOATS),
    "from_float_bits": Meaning(from_float_bits, WHOLES),
    "magnitude_bits": Meaning(magnitude_bits, ("f32",)),
    "order_key": Meaning(order_key, ("f32",)),
    "from_key": Meaning(from_key, ("i32",)),
    "bfloat16_up": Meaning(bfloat16_up, FLOATS),
    "float32": Meaning(_single(lambda x: x), FLOATS),
    **{name: Meaning(_rounded(form), FLOATS) for name, form in FORMATS.items()},
}
#: instructions as functions of NumPy's arrays
IN_NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
    "floor": np.floor, "ceil": np.ceil, "round": np.rint, "sqrt": np.sqrt,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq": np.equal, "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or,
    "not": np.logical_not, "where": np.where,
    **{name: meaning.of for name, meaning in MEANINGS.items()},
}  # fmt: skip
