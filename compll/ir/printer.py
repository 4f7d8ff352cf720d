"""Typed expressions as text, with the names that a spec gives to their parts."""

from __future__ import annotations

from collections.abc import Mapping

from compll.ir.expr import Expr
from compll.ir.formulas import INFIX, formula
from compll.ir.program import TOTALS


class Printer:
    """Writes expressions as a person does, with the names that the spec gives to their parts."""

    def __init__(self, bindings: Mapping[str, Expr]) -> None:
        named = reversed(list(bindings.items()))
        self.names = {id(e): name for name, e in named if e.args}

    def __call__(self, expr: Expr) -> str:
        """The expression itself, with its parts by name."""
        return self.body(expr)

    def part(self, expr: Expr) -> str:
        return self.names.get(id(expr)) or self.body(expr)

    def body(self, expr: Expr) -> str:
        if expr.op == "const":
            return repr(expr.value)
        if expr.op in ("lift", "float", "int"):
            return self.part(expr.args[0])
        if not expr.args:
            return self.leaf(expr)
        args = [self.part(a) for a in expr.args]
        if expr.op in INFIX:
            return f"({args[0]} {INFIX[expr.op][0]} {args[1]})"
        if expr.op == "choose":
            return f"({args[1]} if {args[0]} else {args[2]})"
        if expr.op == "gather":
            return f"{args[0]}[{expr.value}]"
        if expr.op == "hadamard":
            return f"hadamard({args[0]}, {expr.value})"
        if expr.op == "sum_by":
            args.append(formula(expr.type.dims[1]))
        special = {"neg": "-", "trunc": "int", "code": f"stored.{expr.value}"}
        return f"{special.get(expr.op, expr.op.removeprefix('reduce_'))}({', '.join(args)})"

    def values(self, expr: Expr) -> set[str]:
        """Names of the values that a number is computed from: bindings, and totals over
        elements."""
        if id(expr) in self.names or expr.op in TOTALS:
            return {self.part(expr)}
        return {name for a in expr.args for name in self.values(a)}

    @staticmethod
    def leaf(expr: Expr) -> str:
        known = {
            "uniform": "random(0, 1)",
            "indices": f"indices({expr.value})",
            "count_kept": f"count({expr.value or expr.type.of})",
            "group_size": "size of the group",
            "combined": f"combined({expr.value})",
            "shared": "shared(0, 1)",
            "ones": f"ones({', '.join(map(formula, expr.type.dims))})",
            "random_matrix": f"random_matrix({', '.join(map(formula, expr.type.dims))})",
        }
        return known.get(expr.op, str(expr.value))
