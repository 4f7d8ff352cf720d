"""Stage 3, sizes: refuses expressions that would take later stages too long."""

from __future__ import annotations

from compll.errors import RuleError
from compll.ir.expr import Expr

#: limits of an expression whose names are replaced by their definitions
LIMIT_DEPTH, LIMIT_SIZE = 100, 50_000
#: limit of its depth, including reductions and rounds of `iterate`
LIMIT_CHAIN = 1000


class Sizes:
    """Sizes of the expressions of a spec, with names replaced by their definitions."""

    def __init__(self) -> None:
        self.measures: dict[int, tuple[int, int, int]] = {}

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
            chain = 1 + max(c for _, _, c in parts)
            if value.op.startswith("reduce_"):
                self.measures[id(value)] = 1, 1, chain
            else:
                depth = 1 + max(d for d, _, _ in parts)
                self.measures[id(value)] = depth, 1 + sum(s for _, s, _ in parts), chain
        return self.measures[id(value)]

    def begin_anew(self, value: Expr) -> None:
        """Start depth and parts again at `value`, as at a reduction. Raises RuleError."""
        self.bounded(value)
        self.measures[id(value)] = 1, 1, self.measure(value)[2]
