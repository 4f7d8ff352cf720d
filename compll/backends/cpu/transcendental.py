"""exp, log, log2, powers and gamma quantiles, made of instructions as in `numerics`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from compll.backends.cpu.builder import (
    F32,
    F64,
    I1,
    I64,
    Builder,
    Variable,
    const,
    element,
    lanes,
    number,
    repeat_while,
)
from compll.numerics import traced
from compll.numerics.traced import Number

Rows = Mapping[str, Callable[..., Any]]
#: instructions that take many others, with their number of arguments
LONG = {"exp": 1, "log": 1, "log2": 1, "pow": 2, "gamma_above": 2}


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

    def choose(
        self, c: Number, then: Callable[[], Number], otherwise: Callable[[], Number]
    ) -> Number:
        found = Variable(self.b, number(F64, 0.0))
        with self.b.if_else(c.value) as cases:
            for case, make in zip(cases, (then, otherwise), strict=True):
                with case:
                    found.set(make().value)
        return self.number(found.get())

    def repeat(
        self, times: int, state: tuple[Any, ...], step: Callable[..., Any]
    ) -> tuple[Number, ...]:
        b, one = self.b, number(F64, 1.0)
        turn, goes_on = Variable(b, one), Variable(b, number(I1, 1))
        held = [Variable(b, self.value(x, one)) for x in state]

        def more() -> Any:
            return b.and_(goes_on.get(), b.fcmp_ordered("<=", turn.get(), number(F64, times)))

        with repeat_while(b, more):
            found, last = step(*(self.number(v.get()) for v in (turn, *held)))
            for variable, x in zip(held, found, strict=True):
                variable.set(self.value(x, one))
            goes_on.set(b.not_(last.value))
            turn.set(b.fadd(turn.get(), one))
        return tuple(self.number(v.get()) for v in held)


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
    body = rows[name] if name != "gamma_above" else partial(_gamma_above, helpers, rows)
    return helpers.get(f"called_{name}", F64, [F64] * LONG[name], body)


def _gamma_above(helpers: Any, rows: Rows, b: Builder, shape: Any, p: Any) -> Any:
    made = Primitives(b, rows)

    def call(name: str) -> Callable[[Number], Number]:
        function = called(helpers, name, rows)
        return lambda x: made.number(b.call(function, [x.value]))

    above = made.gamma(call("exp"), call("log")).above
    return above(made.number(shape), made.number(p)).value
