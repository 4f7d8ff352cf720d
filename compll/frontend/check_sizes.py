"""Stage 3, sizes: expressions that later stages would take too long for are refused."""

from __future__ import annotations

from compll.errors import RuleError
from compll.ir.expr import Expr

#: of an expression with the names in it replaced by what they stand for
LIMIT_DEPTH, LIMIT_SIZE = 100, 50_000
#: the same, also through reductions and rounds of `iterate`
LIMIT_CHAIN = 1000


class Sizes:
    """How large the expressions of one spec are, with the names in them replaced."""

    def __init__(self) -> None:
        self.measures: dict[int, tuple[int, int, int]] = {}

    def bounded(self, value: Expr) -> Expr:
        """`value`, unless names that stand for names have made it too large. Raises RuleError."""
        depth, size, chain = self.measure(value)
        if depth > LIMIT_DEPTH or size > LIMIT_SIZE or chain > LIMIT_CHAIN:
            most = LIMIT_DEPTH if depth > LIMIT_DEPTH or size > LIMIT_SIZE else LIMIT_CHAIN
            raise RuleError(
                f"with the names in it replaced this has {size} parts, "
                f"{chain if most == LIMIT_CHAIN else depth} deep; "
                f"allowed are {LIMIT_SIZE}, {most} deep",
                "use fewer names that stand for names",
            )
        return value

    def measure(self, value: Expr) -> tuple[int, int, int]:
        """How deep an expression is and how many parts it has, repeated ones counted again.

        A reduction's value is computed once, whoever uses it: both begin anew there. Third: how
        deep it is without that.
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
        """Count what is made of `value` from here on, as of a reduction. Raises RuleError."""
        self.bounded(value)
        self.measures[id(value)] = 1, 1, self.measure(value)[2]
