"""Bits of floats: as keys of the same order, and as floats of 16 bits."""

from __future__ import annotations

from typing import Any

from compll.backends.cpu.builder import F32, F64, HALF, I16, I32, Builder, const, element, lanes
from compll.backends.cpu.processor import FEATURES
from compll.numerics.numbers import NAN_KEY, QUIET

#: true if this processor has no conversions of float16; LLVM would call a library for them
SOFT_HALVES = FEATURES.get("f16c") is False
MAGNITUDE, INFINITE = 0x7FFFFFFF, 0x7F800000


def bits(b: Builder, x: Any) -> Any:
    """The bits of a float32."""
    return b.bitcast(x, lanes(I32, x))


def magnitude_bits(b: Builder, x: Any) -> Any:
    """The bits of a float32 without the sign; they order as magnitudes do."""
    return b.and_(bits(b, x), const(I32, x, MAGNITUDE))


def key(b: Builder, x: Any) -> Any:
    """An int32 that orders as floats do (see order_key in numbers.py)."""
    nan = b.fcmp_unordered("uno", x, x)
    return b.select(nan, const(I32, bits(b, x), NAN_KEY), _folded(b, bits(b, x)))


def magnitude_key(b: Builder, x: Any) -> Any:
    """The key of a float that is not below zero, and has no sign if it is NaN."""
    raw, nan = bits(b, x), const(I32, bits(b, x), NAN_KEY)
    return b.select(b.icmp_signed("<", raw, nan), raw, nan)


def unkey(b: Builder, x: Any) -> Any:
    """Inverse of key."""
    nan = b.icmp_signed("==", x, const(I32, x, NAN_KEY))
    return b.bitcast(b.select(nan, const(I32, x, QUIET), _folded(b, x)), lanes(F32, x))


def _folded(b: Builder, x: Any) -> Any:
    """Bits of floats as integers of their order, and back."""
    return b.xor(x, b.and_(b.ashr(x, const(I32, x, 31)), const(I32, x, MAGNITUDE)))


def is_finite(b: Builder, x: Any) -> Any:
    """True if a float is neither infinite nor NaN."""
    if element(x) == F64:
        size = b.intrinsic("fabs", x)
        return b.fcmp_ordered("<", size, const(F64, x, float("inf")))
    return b.icmp_signed("<", magnitude_bits(b, x), const(I32, x, INFINITE))


def bfloat16_bits(b: Builder, x: Any) -> Any:
    """bfloat16 bits as int32, rounded to nearest even; NaN stays NaN."""
    raw = bits(b, x)
    odd = b.and_(b.lshr(raw, const(I32, x, 16)), const(I32, x, 1))
    near = b.add(b.add(raw, const(I32, x, 0x7FFF)), odd)
    quiet = b.or_(raw, const(I32, x, 0x400000))
    return b.lshr(b.select(b.fcmp_unordered("uno", x, x), quiet, near), const(I32, x, 16))


def of_bfloat16(b: Builder, x: Any) -> Any:
    """float32 of bfloat16 bits, which are int32."""
    return b.bitcast(b.shl(x, const(I32, x, 16)), lanes(F32, x))


def bfloat16_up(b: Builder, x: Any) -> Any:
    raw = bits(b, x)
    up = b.and_(b.add(raw, const(I32, x, 0xFFFF)), const(I32, x, -65536))
    return b.bitcast(b.select(is_finite(b, x), up, raw), lanes(F32, x))


def float8_bits(b: Builder, x: Any) -> Any:
    """E4M3 bits as int32, nearest even; 448 where finite x is larger, NaN where x is not finite."""
    raw, size = bits(b, x), magnitude_bits(b, x)

    def c(value: int) -> Any:
        return const(I32, x, value)

    odd = b.and_(b.lshr(size, c(20)), c(1))
    normal = b.lshr(b.add(b.add(size, c(0x7FFFF - (120 << 23))), odd), c(20))
    # the unit of a float in [2**14, 2**15) is that of the numbers below 2**-6
    near_zero = b.fadd(b.bitcast(size, x.type), const(F32, x, 2.0**14))
    tiny = b.sub(bits(b, near_zero), c(0x46800000))
    found = b.select(b.icmp_signed("<", size, c(0x3C800000)), tiny, normal)
    found = b.select(b.icmp_signed(">=", size, c(0x43E00000)), c(0x7E), found)
    found = b.select(b.icmp_signed(">=", size, c(INFINITE)), c(0x7F), found)
    return b.or_(found, b.and_(b.lshr(raw, c(24)), c(0x80)))


def of_float8(b: Builder, x: Any) -> Any:
    """float32 of E4M3 bits as int32."""

    def c(value: int) -> Any:
        return const(I32, x, value)

    size = b.and_(x, c(0x7F))
    normal = b.add(b.shl(size, c(20)), c(120 << 23))
    single_lanes = lanes(F32, x)
    tiny = b.bitcast(b.fmul(b.sitofp(size, single_lanes), const(F32, x, 2.0**-9)), x.type)
    found = b.select(b.icmp_signed("<", size, c(8)), tiny, normal)
    found = b.select(b.icmp_signed("==", size, c(0x7F)), c(0x7FC00000), found)
    return b.bitcast(b.or_(found, b.shl(b.and_(x, c(0x80)), c(24))), single_lanes)


def float16_bits(b: Builder, x: Any) -> Any:
    """float16 bits as int32, rounded to nearest even."""
    if not SOFT_HALVES:
        found = b.bitcast(b.fptrunc(x, lanes(HALF, x)), lanes(I16, x))
        return b.zext(found, lanes(I32, x))
    raw, size = bits(b, x), magnitude_bits(b, x)

    def c(value: int) -> Any:
        return const(I32, x, value)

    odd = b.and_(b.lshr(size, c(13)), c(1))
    normal = b.lshr(b.add(b.add(size, c(0xFFF - 0x38000000)), odd), c(13))
    # a float32 in [.5, 1) has the last bit of a float16 below 2**-14
    near_zero = b.fadd(b.bitcast(size, x.type), const(F32, x, 0.5))
    tiny = b.sub(bits(b, near_zero), c(0x3F000000))
    found = b.select(b.icmp_signed("<", size, c(0x38800000)), tiny, normal)
    found = b.select(b.icmp_signed(">=", size, c(0x477FF000)), c(0x7C00), found)
    nan = b.or_(c(0x7E00), b.and_(b.lshr(size, c(13)), c(0x3FF)))
    found = b.select(b.icmp_signed(">", size, c(INFINITE)), nan, found)
    return b.or_(found, b.and_(b.lshr(raw, c(16)), c(0x8000)))


def of_float16(b: Builder, x: Any) -> Any:
    """float32 of float16 bits, which are int32."""
    single_lanes = lanes(F32, x)
    if not SOFT_HALVES:
        return b.fpext(b.bitcast(b.trunc(x, lanes(I16, x)), lanes(HALF, x)), single_lanes)

    def c(value: int) -> Any:
        return const(I32, x, value)

    size = b.and_(x, c(0x7FFF))
    normal = b.add(b.shl(size, c(13)), c(0x38000000))
    large = b.add(normal, c(0x38000000))
    large = b.select(b.icmp_signed(">", size, c(0x7C00)), b.or_(large, c(0x400000)), large)
    tiny = b.bitcast(b.fmul(b.sitofp(size, single_lanes), const(F32, x, 2.0**-24)), x.type)
    found = b.select(b.icmp_signed("<", size, c(0x400)), tiny, normal)
    found = b.select(b.icmp_signed(">=", size, c(0x7C00)), large, found)
    return b.bitcast(b.or_(found, b.shl(b.and_(x, c(0x8000)), c(16))), single_lanes)
