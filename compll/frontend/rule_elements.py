"""Typing rules of elementwise operators: numbers, conditions, draws, one value per element."""

from __future__ import annotations

import math
from dataclasses import replace

from compll.errors import RuleError
from compll.frontend.operators import OPERATORS
from compll.frontend.rule_conversions import LARGEST, LEAST, Conversions
from compll.ir.expr import Expr, Type

WHOLE = "of floats, take x // 2**b and x % 2**b"


class Rules(Conversions):
    """Rules of operators that look at one element at a time."""

    # numbers

    def real(self, op: str, args: tuple[Expr, ...]) -> Expr:
        return self.elementwise(op, tuple(self.number(a, "float") for a in args))

    def power(self, op: str, args: tuple[Expr, ...]) -> Expr:
        """A power of data: small integer powers are products, and the power 0.5 is the root."""
        a, b = (self.number(x, "float") for x in args)
        exponent = args[1].value if args[1].op == "const" else None
        if a.type.shape == "static" or exponent not in (1, 2, 3, 4, 0.5):
            return self.elementwise(op, (a, b))
        if exponent == 0.5:
            return self.elementwise("sqrt", (a,))
        square = self.elementwise("mul", (a, a)) if exponent > 1 else a
        other = {1: None, 2: None, 3: a, 4: square}[exponent]
        return square if other is None else self.elementwise("mul", (square, other))

    def arithmetic(self, op: str, args: tuple[Expr, ...]) -> Expr:
        return self.elementwise(op, self.same(args))

    def integer(self, op: str, args: tuple[Expr, ...]) -> Expr:
        for a in args:
            if a.type.dtype not in ("int", "bool"):
                hint = "a power is written **" if op == "bitxor" else WHOLE
                raise RuleError(f"{OPERATORS[op].infix or op} takes integers, not {a.type}", hint)
        return self.elementwise(op, tuple(self.number(a, "int") for a in args))

    def rounding(self, op: str, args: tuple[Expr, ...]) -> Expr:
        (x,) = args
        if x.type.dtype in ("int", "bool"):
            return self.number(x, "int")
        out = self.elementwise(op, (x,))
        return self.retyped(out, "int") if out.type.shape == "static" else out

    def retyped(self, x: Expr, dtype: str) -> Expr:
        return self.pool.make(x.op, x.args, replace(x.type, dtype=dtype), x.value)

    def cast(self, op: str, args: tuple[Expr, ...]) -> Expr:
        (x,) = (self.number(a, "float") for a in args)
        if x.type.shape == "static":
            x = self.lift(x, self.whole)
        return self.elementwise(op, (x,))

    def exponent(self, op: str, args: tuple[Expr, ...]) -> Expr:
        """The exponent of a float32. A number known before any data is rounded to float32 first."""
        return self.elementwise(op, (self.number(args[0], "float"),), "int")

    def float_bits(self, op: str, args: tuple[Expr, ...]) -> Expr:
        return self.elementwise(op, (self.number(args[0], "float"),), "int")

    def from_float_bits(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if args[0].type.dtype != "int":
            raise RuleError(f"{op} takes an integer, not {args[0].type}", "float_bits(x) makes one")
        return self.elementwise(op, args, "float")

    def exp2(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if args[0].type.dtype not in ("int", "bool"):
            raise RuleError(f"exp2 takes an integer, not {args[0].type}", "2**x takes any number")
        return self.elementwise(op, (self.number(args[0], "int"),), "float")

    # definitions, of which no backend knows

    def mod(self, op: str, args: tuple[Expr, ...]) -> Expr:
        a, b = self.same(args)
        whole = self.elementwise("floordiv", (a, b))
        return self.elementwise("sub", (a, self.elementwise("mul", (b, whole))))

    def sign(self, op: str, args: tuple[Expr, ...]) -> Expr:
        (x,) = self.same(args)
        zero, below, above = (self.number(self.pool.const(c), x.type.dtype) for c in (0, -1, 1))
        return self.elementwise("where", (self.compare("lt", (x, zero)), below, above))

    def isnan(self, op: str, args: tuple[Expr, ...]) -> Expr:
        x = self.number(args[0], "float")
        return self.compare("ne", (x, x))

    def isinf(self, op: str, args: tuple[Expr, ...]) -> Expr:
        size = self.elementwise("abs", (self.number(args[0], "float"),))
        return self.compare("eq", (size, self.pool.const(math.inf)))

    def clip(self, op: str, args: tuple[Expr, ...]) -> Expr:
        x, low, high = args
        return self.arithmetic("min", (self.arithmetic("max", (x, low)), high))

    def whole_number(self, x: Expr, low: int, high: int) -> Expr:
        """x as an integer from low to high: clamped, then truncated; NaN becomes `low`."""
        low_, high_ = self.pool.const(low), self.pool.const(high)
        inside = self.arithmetic("min", (self.arithmetic("max", (x, low_)), high_))
        if inside.type.dtype != "float":
            return inside
        return self.pool.make("trunc", (inside,), replace(inside.type, dtype="int"))

    def whole_element(self, x: Expr) -> Expr:
        """x as int32: truncated to the nearest number that float32 has; NaN becomes 0."""
        if x.type.dtype != "float":
            return x
        return self.pool.make("trunc", (x,), replace(x.type, dtype="int"))

    def truncated(self, op: str, args: tuple[Expr, ...]) -> Expr:
        """x as an integer, clamped to int32; 0 if it is not finite."""
        (x,) = args
        if x.type.dtype != "float":
            return self.number(x, "int")
        if x.type.shape != "scalar":
            return self.whole_element(x)
        inside = self.whole_number(x, LEAST, LARGEST)
        return self.choose("choose", (self.test("isfinite", args), inside, self.pool.const(0)))

    def trit(self, x: Expr) -> Expr:
        """x, an element, as 0, 1 or 2: truncated; NaN becomes 0."""
        return self.pool.make("trit", (self.number(x, "float"),), Type("int", "n"))

    # conditions

    def compare(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if all(a.type.dtype == "str" for a in args):
            return self.elementwise(op, args, "bool")
        return self.elementwise(op, self.same(args), "bool")

    def logic(self, op: str, args: tuple[Expr, ...]) -> Expr:
        return self.elementwise(op, tuple(self.condition(a) for a in args), "bool")

    def test(self, op: str, args: tuple[Expr, ...]) -> Expr:
        return self.elementwise(op, (self.number(args[0], "float"),), "bool")

    def where(self, op: str, args: tuple[Expr, ...]) -> Expr:
        c, (a, b) = self.condition(args[0]), self.same(args[1:])
        self.no_selection(op, args[1:])
        return self.elementwise("where", (c, a, b))

    def choose(self, op: str, args: tuple[Expr, ...]) -> Expr:
        c = self.condition(args[0])
        a, b = self.same(args[1:])
        shape, _ = self.shape((c, a, b))
        if shape not in ("static", "scalar"):
            return self.elementwise("where", (c, a, b))
        return self.elementwise("choose", (c, a, b))

    # quantiles of distributions

    def probit(self, op: str, args: tuple[Expr, ...]) -> Expr:
        return self.real(op, (self.static(op, args[0], "its number"),))

    def pareto_above(self, op: str, args: tuple[Expr, ...]) -> Expr:
        """The value that a generalized Pareto variable exceeds with probability p.

        With q = (mean / std)**2: shape (q - 1) / 2, scale mean * (q + 1) / 2 by moments.
        """
        self.need_one_number(op, args)
        mean, std, p = (self.number(a, "float") for a in args)
        ratio = self.real("div", (mean, std))
        q = self.real("mul", (ratio, ratio))
        one, two = (self.pool.const(c) for c in (1.0, 2.0))
        less, more = self.real("sub", (q, one)), self.real("add", (q, one))
        rest = self.real("sub", (one, self.real("pow", (p, self.real("div", (less, two))))))
        return self.real("mul", (mean, self.real("mul", (rest, self.real("div", (more, less))))))

    # draws

    def random(self, op: str, args: tuple[Expr, ...]) -> Expr:
        low, high = (self.number(a, "float") for a in args)
        if not self.encoding:
            raise RuleError(
                "random numbers are drawn in encode", "put what was drawn into the payload"
            )
        u = self.pool.make("uniform", (), Type("float", "n"), self.draws)
        self.draws += 1
        return self.stretched(u, low, high)

    def shared(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if not self.encoding:
            raise RuleError("shared draws are made in encode", "decode knows them by their names")
        low, high = (self.number(a, "float") for a in args)
        u = self.pool.make("shared", (), Type("float", "n"), self.alike)
        self.alike += 1
        return self.stretched(u, low, high)

    def stretched(self, u: Expr, low: Expr, high: Expr) -> Expr:
        """A draw in [low, high), from one in [0, 1)."""
        if (
            low.op == "float"
            and low.args[0].value == 0
            and high.op == "float"
            and high.args[0].value == 1
        ):
            return u
        width = self.elementwise("sub", (high, low))
        return self.elementwise("add", (low, self.elementwise("mul", (width, u))))
