"""Quantiles of gamma variables: functions that kernels call, as `numerics/quantiles.py` has them.

See [Note: gamma quantiles] there; each is the same arithmetic in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from compll.backends.cpu.builder import F64, I64, Builder, number
from compll.backends.cpu.transcendental import called
from compll.numerics.quantiles import HALF_LOG_2PI

#: Stirling's series, from the highest power of 1 / x**2 on
STIRLING = (1 / 156, -691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12)


def f(x: float) -> Any:
    """A float64 constant."""
    return number(F64, x)


def logarithm(helpers: Any) -> Any:
    """log as one function."""
    return called(helpers, "log")


def exponential(helpers: Any) -> Any:
    """exp as one function."""
    return called(helpers, "exp")


@contextmanager
def turns(b: Builder, most: int, start: int = 0) -> Iterator[tuple[Any, Any]]:
    """A loop over start, start + 1, ... below `most`: the number, and how to leave it where a
    condition holds."""
    index = b.room(I64)
    b.store(number(I64, start), index)
    go, leave = (b.append_basic_block(name) for name in ("turn", "over"))
    b.branch(go)
    b.position_at_end(go)
    now = b.load(index, typ=I64)

    def until(condition: Any) -> None:
        on = b.append_basic_block("on")
        b.cbranch(condition, leave, on)
        b.position_at_end(on)

    yield now, until
    after = b.add(now, number(I64, 1))
    b.store(after, index)
    b.cbranch(b.icmp_signed("<", after, number(I64, most)), go, leave)
    b.position_at_end(leave)


class Rooms:
    """Numbers that change: room[name] reads one, and assignment writes it."""

    def __init__(self, b: Builder) -> None:
        self.b = b
        self.places: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self.b.load(self.places[name], typ=F64)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.places:
            self.places[name] = self.b.room(F64)
        self.b.store(value, self.places[name])


def log_gamma(helpers: Any) -> Any:
    """The logarithm of the gamma function of x > 0."""

    def body(b: Builder, x: Any) -> Any:
        log, v = logarithm(helpers), Rooms(b)
        v["x"], v["product"] = x, f(1.0)
        with turns(b, 16) as (_, until):
            until(b.fcmp_unordered(">=", v["x"], f(12.0)))
            v["product"] = b.fmul(v["product"], v["x"])
            v["x"] = b.fadd(v["x"], f(1.0))
        x = v["x"]
        z = b.fdiv(f(1.0), b.fmul(x, x))
        p = f(STIRLING[0])
        for term in STIRLING[1:]:
            p = b.fadd(b.fmul(p, z), f(term))
        found = b.fmul(b.fsub(x, f(0.5)), b.call(log, [x]))
        found = b.fadd(b.fsub(found, x), f(HALF_LOG_2PI))
        return b.fsub(b.fadd(found, b.fdiv(p, x)), b.call(log, [v["product"]]))

    return helpers.get("log_gamma", F64, [F64], body)


def density(helpers: Any) -> Any:
    """Of the logarithm y of a gamma variable of scale 1."""

    def body(b: Builder, shape: Any, y: Any, log_of_gamma: Any) -> Any:
        exp = exponential(helpers)
        power = b.fsub(b.fmul(shape, y), b.call(exp, [y]))
        return b.call(exp, [b.fsub(power, log_of_gamma)])

    return helpers.get("gamma_density", F64, [F64] * 3, body)


def series(helpers: Any) -> Any:
    """The lower tail over density, for x < shape + 1."""

    def body(b: Builder, shape: Any, x: Any) -> Any:
        v = Rooms(b)
        v["term"] = v["total"] = b.fdiv(f(1.0), shape)
        with turns(b, 500, 1) as (k, until):
            term = b.fmul(v["term"], b.fdiv(x, b.fadd(shape, b.sitofp(k, F64))))
            total = b.fadd(v["total"], term)
            v["term"], v["total"] = term, total
            until(b.fcmp_ordered("<", term, b.fmul(total, f(1e-15))))
        return v["total"]

    return helpers.get("gamma_series", F64, [F64] * 2, body)


def fraction(helpers: Any) -> Any:
    """The upper tail over density, for x >= shape + 1: Lentz's continued fraction."""

    def body(b: Builder, shape: Any, x: Any) -> Any:
        v = Rooms(b)
        v["b"], v["c"] = b.fsub(b.fadd(x, f(1.0)), shape), f(1e300)
        v["d"] = v["h"] = b.fdiv(f(1.0), v["b"])
        with turns(b, 500, 1) as (k, until):
            number_of = b.sitofp(k, F64)
            a = b.fmul(b.fneg(number_of), b.fsub(number_of, shape))
            v["b"] = b.fadd(v["b"], f(2.0))
            v["d"] = b.fdiv(f(1.0), b.fadd(b.fmul(a, v["d"]), v["b"]))
            v["c"] = b.fadd(v["b"], b.fdiv(a, v["c"]))
            change = b.fmul(v["c"], v["d"])
            v["h"] = b.fmul(v["h"], change)
            off = b.intrinsic("fabs", b.fsub(change, f(1.0)))
            until(b.fcmp_ordered("<", off, f(1e-15)))
        return v["h"]

    return helpers.get("gamma_fraction", F64, [F64] * 2, body)


def above(helpers: Any) -> Any:
    """What a gamma variable of this shape and scale 1 exceeds with probability p."""
    parts = [get(helpers) for get in (logarithm, exponential, log_gamma, density, series, fraction)]

    def body(b: Builder, shape: Any, p: Any) -> Any:
        v = Rooms(b)
        inside = b.and_(
            b.and_(b.fcmp_ordered("<", f(0.0), shape), b.fcmp_ordered("<", shape, f(1e6))),
            b.and_(b.fcmp_ordered("<=", f(0.0), p), b.fcmp_ordered("<=", p, f(1.0))),
        )
        none, all_ = (b.fcmp_ordered("==", p, f(at)) for at in (0.0, 1.0))
        ends = b.select(none, f(float("inf")), f(0.0))
        v["found"] = b.select(inside, ends, f(float("nan")))
        with b.if_then(b.and_(inside, b.not_(b.or_(none, all_)))):
            v["found"] = _newton(b, v, shape, p, parts)
        return v["found"]

    return helpers.get("gamma_above", F64, [F64] * 2, body)


def _newton(b: Builder, v: Rooms, shape: Any, p: Any, parts: list[Any]) -> Any:
    """On the logarithms of the nearer tail and of the variable; halvings where a step leaves the
    interval known."""
    log, exp, log_of, *tails = parts
    root = b.fmul(f(40.0), b.intrinsic("sqrt", shape))
    v["low"] = f(-690.0)
    v["high"] = b.call(log, [b.fadd(b.fadd(shape, root), f(800.0))])
    log_of_gamma, y = b.call(log_of, [shape]), b.call(log, [shape])
    v["y"] = b.select(b.fcmp_ordered(">", y, f(-690.0)), y, f(-690.0))
    with turns(b, 80) as (_, until):
        y = v["y"]
        step, short = _step(b, v, (shape, p, y, b.call(exp, [y]), log_of_gamma), tails)
        v["low"] = b.select(short, y, v["low"])
        v["high"] = b.select(short, v["high"], y)
        to = b.fadd(y, step)
        within = b.and_(b.fcmp_ordered("<=", v["low"], to), b.fcmp_ordered("<=", to, v["high"]))
        half = b.fmul(f(0.5), b.fadd(v["low"], v["high"]))
        v["y"] = b.select(within, to, half)
        near = b.fcmp_ordered("<", b.intrinsic("fabs", step), f(1e-8))
        until(b.and_(within, near))
    return b.call(exp, [v["y"]])


def _step(b: Builder, v: Rooms, given: tuple[Any, ...], tails: list[Any]) -> tuple[Any, Any]:
    """Newton's step, and whether the answer lies above."""
    shape, p, y, x, log_of_gamma = given
    density_of, series_of, fraction_of = tails
    log = b.module.globals["called_log"]
    dense = b.call(density_of, [shape, y, log_of_gamma])
    lower = b.fcmp_ordered("<", x, b.fadd(shape, f(1.0)))
    with b.if_else(lower) as (then, otherwise):
        with then:
            part, rest = b.call(series_of, [shape, x]), b.fsub(f(1.0), p)
            tail = b.fmul(dense, part)
            v["short"] = b.uitofp(b.fcmp_ordered("<", tail, rest), F64)
            v["step"] = b.fmul(b.fneg(b.call(log, [b.fdiv(tail, rest)])), part)
        with otherwise:
            part = b.call(fraction_of, [shape, x])
            tail = b.fmul(dense, part)
            v["short"] = b.uitofp(b.fcmp_ordered(">", tail, p), F64)
            v["step"] = b.fmul(b.call(log, [b.fdiv(tail, p)]), part)
    return v["step"], b.fcmp_ordered("!=", v["short"], f(0.0))
