"""exp, log, log2 and powers: those of `numerics.elementary`, made of instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compll.backends.cpu.builder import F32, F64, I64, Builder, const, element, lanes
from compll.numerics.elementary import functions


class _Number:
    """A float64 value with Python's operators, for `numerics.elementary`."""

    def __init__(self, b: Builder, x: Any) -> None:
        self.b, self.x = b, x

    def of(self, other: Any) -> Any:
        """Another number's LLVM value."""
        return other.x if isinstance(other, _Number) else const(F64, self.x, float(other))

    def __add__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fadd(self.x, self.of(o)))

    def __sub__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fsub(self.x, self.of(o)))

    def __mul__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fmul(self.x, self.of(o)))

    def __truediv__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fdiv(self.x, self.of(o)))

    def __rmul__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fmul(self.x, self.of(o)))

    def __neg__(self) -> _Number:
        return _Number(self.b, self.b.fneg(self.x))

    def __lt__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fcmp_ordered("<", self.x, self.of(o)))

    def __gt__(self, o: Any) -> _Number:
        return _Number(self.b, self.b.fcmp_ordered(">", self.x, self.of(o)))

    def __eq__(self, o: object) -> _Number:  # type: ignore[override]
        return _Number(self.b, self.b.fcmp_ordered("==", self.x, self.of(o)))

    def __ne__(self, o: object) -> _Number:  # type: ignore[override]
        return _Number(self.b, self.b.fcmp_unordered("!=", self.x, self.of(o)))

    def __and__(self, o: _Number) -> _Number:
        return _Number(self.b, self.b.and_(self.x, o.x))

    def __or__(self, o: _Number) -> _Number:
        return _Number(self.b, self.b.or_(self.x, o.x))

    __hash__ = None  # type: ignore[assignment]


def _elementary(b: Builder) -> Any:
    """exp, log, log2 and power, made of this builder's instructions."""

    def call(name: str) -> Callable[[_Number], _Number]:
        return lambda v: _Number(b, b.intrinsic(name, v.x))

    def where(c: _Number, a: Any, o: Any) -> _Number:
        first, second = (
            v.x if isinstance(v, _Number) else const(F64, c.x, float(v)) for v in (a, o)
        )
        return _Number(b, b.select(c.x, first, second))

    def power_of_two(k: _Number) -> _Number:
        biased = b.add(b.fptosi(k.x, lanes(I64, k.x)), const(I64, k.x, 1023))
        return _Number(b, b.bitcast(b.shl(biased, const(I64, k.x, 52)), k.x.type))

    def split(v: _Number) -> tuple[_Number, _Number]:
        tiny = call("fabs")(v) < 2.2250738585072014e-308
        bits = b.bitcast(where(tiny, v * 18014398509481984.0, v).x, lanes(I64, v.x))
        kept = b.and_(bits, const(I64, v.x, (1 << 52) - 1))
        mantissa = b.bitcast(b.or_(kept, const(I64, v.x, 1022 << 52)), v.x.type)
        biased = b.and_(b.lshr(bits, const(I64, v.x, 52)), const(I64, v.x, 2047))
        exponent = b.sitofp(b.sub(biased, const(I64, v.x, 1022)), v.x.type)
        return _Number(b, mantissa), _Number(b, exponent) - where(tiny, 54.0, 0.0)

    return functions(where, split, power_of_two, call("rint"), call("floor"), call("fabs"))


def elementary(name: str) -> Any:
    """The row of one of these functions: float64, of a float32 rounded at the end."""

    def row(b: Builder, *args: Any) -> Any:
        single = element(args[0]) == F32
        wide = [b.fpext(x, lanes(F64, x)) if single else x for x in args]
        found = getattr(_elementary(b), name)(*(_Number(b, x) for x in wide)).x
        return b.fptrunc(found, lanes(F32, found)) if single else found

    return row


#: instructions that are long, and how many numbers they take
LONG = {"exp": 1, "log": 1, "log2": 1, "pow": 2}


def called(helpers: Any, name: str) -> Any:
    """One of these of float64 as a function, where its time does not matter."""
    row = elementary("power" if name == "pow" else name)
    return helpers.get(f"called_{name}", F64, [F64] * LONG[name], row)
