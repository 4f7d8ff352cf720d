"""exp, log, log2 and powers, made of instructions as in `numerics`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from compll.backends.cpu.builder import (
    F32,
    F64,
    I64,
    Builder,
    const,
    element,
    lanes,
)
from compll.numerics import traced
from compll.numerics.traced import Number

Rows = Mapping[str, Callable[..., Any]]
#: instructions that take many others, with their number of arguments
LONG = {"exp": 1, "log": 1, "log2": 1, "pow": 2}


class Primitives(traced.Primitives):
    """Primitives that a builder emits, by `rows`."""

    def __init__(self, b: Builder, rows: Rows) -> None:
        self.b, self.rows = b, rows

    def emit(self, op: str, *args: Any) -> Any:
        """An instruction; constants get as many lanes as the other arguments."""
        like = next(x.value for x in args if isinstance(x, Number))
        return self.rows[op](self.b, *(self.value(x, like) for x in args))

    def value(self, x: Any, like: Any) -> Any:
        return x.value if isinstance(x, Number) else const(F64, like, float(x))

    def split(self, v: Number) -> tuple[Number, Number]:
        b, x, where = self.b, v.value, self.row("where")
        tiny = self.row("abs")(v) < 2.2250738585072014e-308
        bits = b.bitcast(where(tiny, v * 18014398509481984.0, v).value, lanes(I64, x))
        kept = b.and_(bits, const(I64, x, (1 << 52) - 1))
        mantissa = b.bitcast(b.or_(kept, const(I64, x, 1022 << 52)), x.type)
        biased = b.and_(b.lshr(bits, const(I64, x, 52)), const(I64, x, 2047))
        exponent = self.number(b.sitofp(b.sub(biased, const(I64, x, 1022)), x.type))
        return self.number(mantissa), exponent - where(tiny, 54.0, 0.0)

    def power_of_two(self, k: Number) -> Number:
        b, x = self.b, k.value
        biased = b.add(b.fptosi(x, lanes(I64, x)), const(I64, x, 1023))
        return self.number(b.bitcast(b.shl(biased, const(I64, x, 52)), x.type))


def elementary(name: str, rows: Rows) -> Any:
    """The row of exp, log, log2 or power: computed in float64; for float32 rounded at the end."""

    def row(b: Builder, *args: Any) -> Any:
        single, p = element(args[0]) == F32, Primitives(b, rows)
        wide = [b.fpext(x, lanes(F64, x)) if single else x for x in args]
        found = getattr(p.elementary(), name)(*map(p.number, wide)).value
        return b.fptrunc(found, lanes(F32, found)) if single else found

    return row


def called(helpers: Any, name: str, rows: Rows) -> Any:
    """A float64 instruction of LONG as a function, for uses whose time does not matter."""
    return helpers.get(f"called_{name}", F64, [F64] * LONG[name], rows[name])
