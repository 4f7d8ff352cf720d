"""Elements divided by what is the same for many of them, without a division each.

[Note: quotients] r is 1 / b, as one step by Newton makes it of a device's approximation. Of q = a * r
and p = q - (b * q - a) * r, by fused multiply-add, p is a / b rounded: Markstein's correction (1990).
His theorem asks for a q within one unit in the last place of a / b; this one may be one and a half
away. But before the last rounding p is off by less than 2**-22 units, so that it can be wrong only
where a / b is that near to the middle of two floats. Of all pairs of significands these are 93 million
at most, and all of them are right (test_cuda_arithmetic.py), but for some divisors next to a power of
two, whose r may not be the nearest. Exponents must leave room for the remainder and the result. Where
a tile has other numbers, it is not taken for ready, and its elements are divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from compll.backends.cuda.patterns import constant, unsigned
from compll.backends.cuda.tiles import Tiles
from compll.ir.expr import Expr, walk
from compll.ir.program import Program


def quotients(*roots: Expr) -> Iterator[Expr]:
    """Divisions of elements by what is the same for a tile, and is no power of two, by which a
    compiler multiplies anyway."""
    for e in walk(*roots):
        if e.op == "div" and e.type.shape == "n" and e.args[1].op == "lift":
            known = constant(e.args[1])
            if known is None or math.frexp(known)[0] != 0.5:
                yield e


def safe(e: Expr) -> bool:
    """Whether a whole number is divided by a constant that leaves room for all of them."""
    by, dividend = constant(e.args[1]), unsigned(e.args[0])
    whole = dividend.op == "float" and dividend.args[0].type.dtype in ("int", "bool")
    if not whole or by is None or not 1e-25 < by < 1e6:
        return False
    return int(np.float32(by).view(np.uint32)) & 0x7FFFFF <= 0x7FFFF8


class Quotients(Tiles):
    """Tiles whose ready ones multiply and add instead of dividing."""

    def __init__(self, program: Program, feed: bool, prefix: str, threads: int = 256) -> None:
        super().__init__(program, feed, prefix, threads)
        #: the divisions of the walk at hand, and names of what they divide by
        self.divisions: list[Expr] = []
        self.divisors: dict[int, str] = {}

    def find_divisions(self, loops: list[Expr]) -> None:
        """The divisions of a walk; none of tiles that registers do not hold."""
        self.divisions = list(quotients(*loops)) if self.shape.chunks == 1 else []
        self.declare_divisors("static", "scalar")

    def forget_divisions(self) -> None:
        """After the walk."""
        self.divisions, self.divisors = [], {}

    def prepare_groups(self, *roots: Expr) -> None:
        super().prepare_groups(*roots)
        self.declare_divisors("group", below=roots)

    def declare_divisors(self, *levels: str, below: tuple[Expr, ...] | None = None) -> None:
        within = None if below is None else {id(e) for e in walk(*below)}
        for e in self.divisions:
            by = e.args[1]
            if by.args[0].type.shape not in levels or id(by) in self.divisors:
                continue
            if within is None or id(e) in within:
                name = self.divisors[id(by)] = self.name("by")
                self.add(f"const Divisor {name} = divisor({self.lifted(by)});")

    def written(self, expr: Expr) -> str:
        if expr.op == "div" and id(expr.args[1]) in self.divisors:
            by = self.divisors[id(expr.args[1])]
            return f"quotient<READY>({self.text(expr.args[0])}, {by})"
        return super().written(expr)

    def leave_hard(self, loops: list[Expr]) -> None:
        """Leave a ready tile whose numbers are beyond what quotients are right for."""
        self.prepare_groups(*loops)
        hard = self.hard_divisions()
        with self.block("if (READY)"):
            self.add("Hard hard;")
            for name in dict.fromkeys(self.divisors[id(e.args[1])] for e in hard):
                self.add(f"hard.by({name});")
            with self.each():
                for e in {id(e): e for e in (unsigned(q.args[0]) for q in hard)}.values():
                    self.add(f"hard.number({self.text(e)});")
            self.add("if (__any_sync(FULL, hard.found())) return false;")

    def hard_divisions(self) -> list[Expr]:
        """Those whose numbers may be beyond; whole ones by constants of common size are not."""
        return [e for e in self.divisions if not safe(e)]
