"""[Note: elementary functions] for the generated CPU kernels: float64 scalars that vectorize."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from compll.backends.cpu.ops import _primitive
from compll.numerics.elementary import functions

I64, F64 = ir.IntType(64), ir.DoubleType()
f64, b1 = types.float64, types.boolean
BIAS, MANTISSA = 1023, (1 << 52) - 1


def _llvm(name: str) -> Any:
    def emit(context: Any, b: Any, v: Any) -> Any:
        return b.call(b.module.declare_intrinsic(f"llvm.{name}", [F64]), v)

    return _primitive(f64, (f64,), emit)


def _c(value: int) -> Any:
    return ir.Constant(I64, value)


def _power_of_two(context: Any, b: Any, v: Any) -> Any:
    return b.bitcast(b.shl(b.add(b.fptosi(v[0], I64), _c(BIAS)), _c(52)), F64)


def _mantissa(context: Any, b: Any, v: Any) -> Any:
    kept = b.and_(b.bitcast(v[0], I64), _c(MANTISSA))
    return b.bitcast(b.or_(kept, _c((BIAS - 1) << 52)), F64)


def _exponent(context: Any, b: Any, v: Any) -> Any:
    field = b.and_(b.lshr(b.bitcast(v[0], I64), _c(52)), _c(2047))
    return b.sitofp(b.sub(field, _c(BIAS - 1)), F64)


where = _primitive(f64, (b1, f64, f64), lambda c, b, v: b.select(*v))
mantissa, exponent = _primitive(f64, (f64,), _mantissa), _primitive(f64, (f64,), _exponent)
power_of_two = _primitive(f64, (f64,), _power_of_two)
nearest, floor, magnitude = _llvm("rint"), _llvm("floor"), _llvm("fabs")


@njit(nogil=True, inline="always")
def split(x):  # type: ignore[no-untyped-def]
    """Mantissa and exponent; those of 0, infinity and NaN are not used."""
    tiny = magnitude(x) < 2.2250738585072014e-308
    y = where(tiny, x * 18014398509481984.0, x)
    return mantissa(y), exponent(y) - where(tiny, 54.0, 0.0)


exp, log, log2, power = functions(
    where, split, power_of_two, nearest, floor, magnitude, njit(nogil=True, inline="always")
)
__all__ = ["exp", "log", "log2", "power"]
