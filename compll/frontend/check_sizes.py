"""Stage 3, sizes: refuses expressions that would take later stages too long."""

from __future__ import annotations

from collections.abc import Mapping

from compll.errors import RuleError
from compll.ir.expr import Expr
from compll.ir.static import EXACT, Number, apply

#: limits of an expression whose names are replaced by their definitions
LIMIT_DEPTH, LIMIT_SIZE = 100, 50_000
#: limit of its depth, including reductions and rounds of `iterate`
LIMIT_CHAIN = 1000


class Sizes:
    """Sizes of the expressions of a spec, with names replaced by their definitions; and of whole
    numbers that follow from the parameters."""

    def __init__(self, params: Mapping[str, Number]) -> None:
        self.params = params
        self.measures: dict[int, tuple[int, int, int]] = {}
        self.known: dict[int, Number] = {}

    def bounded(self, value: Expr) -> Expr:
        """`value`. Raises RuleError if it is too large once definitions replace its names."""
        depth, size, chain = self.measure(value)
        if depth > LIMIT_DEPTH or size > LIMIT_SIZE or chain > LIMIT_CHAIN:
            most = LIMIT_DEPTH if depth > LIMIT_DEPTH or size > LIMIT_SIZE else LIMIT_CHAIN
            raise RuleError(
                f"with the names in it replaced this has {size} parts, "
                f"{chain if most == LIMIT_CHAIN else depth} deep; "
                f"allowed are {LIMIT_SIZE}, {most} deep",
                "use fewer definitions made of other definitions",
            )
        return value

    def measure(self, value: Expr) -> tuple[int, int, int]:
        """Depth and number of parts of an expression, with repeated parts counted again; and its
        whole depth.

        A reduction's value is computed once for all uses, so depth and parts start again at it. The
        whole depth does not.
        """
        if id(value) not in self.measures:
            parts = [self.measure(a) for a in value.args] or [(0, 0, 0)]
            self.refuse_inexact(value)
            chain = 1 + max(c for _, _, c in parts)
            if value.op.startswith("reduce_"):
                self.measures[id(value)] = 1, 1, chain
            else:
                depth = 1 + max(d for d, _, _ in parts)
                self.measures[id(value)] = depth, 1 + sum(s for _, s, _ in parts), chain
        return self.measures[id(value)]

    def refuse_inexact(self, value: Expr) -> None:
        """Raise RuleError for a whole number that is not exact before any data."""
        args = [self.known[id(a)] for a in value.args if id(a) in self.known]
        lacking = value.op == "param" and value.value not in self.params
        if value.type.shape != "static" or lacking or len(args) < len(value.args):
            return
        found = self.known[id(value)] = apply(value, args, self.params)
        if type(found) is int and abs(found) >= EXACT:
            raise RuleError(
                f"a whole number known before any data is below 2**53, and {value.op} exceeds it",
                "compute with floats, or with bits of elements, which are int32",
            )

    def begin_anew(self, value: Expr) -> None:
        """Start depth and parts again at `value`, as at a reduction. Raises RuleError."""
        self.bounded(value)
        self.measures[id(value)] = 1, 1, self.measure(value)[2]
