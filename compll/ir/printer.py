"""Typed expressions as text, with the names that a spec gives to their parts."""

from __future__ import annotations

from collections.abc import Mapping

from compll.ir.expr import TOTALS, Expr
from compll.ir.formulas import formula


class Printer:
    """Writes expressions as a person does, with the names that the spec gives to their parts."""

    def __init__(self, bindings: Mapping[str, Expr]) -> None:
        named = reversed(list(bindings.items()))
        self.names = {id(e): name for name, e in named if e.args}

    def __call__(self, expr: Expr) -> str:
        """The expression itself, with its parts by name."""
        return formula(expr, names=self.names)

    def part(self, expr: Expr) -> str:
        """The expression's name, or the expression itself."""
        return self.names.get(id(expr)) or self(expr)

    def values(self, expr: Expr) -> set[str]:
        """Names of the values that a number is computed from: bindings, and totals over
        elements."""
        if id(expr) in self.names or expr.op in TOTALS:
            return {self.part(expr)}
        return {name for a in expr.args for name in self.values(a)}
