"""Typing rules, which turn an operator and typed arguments into a typed expression.

Each rule is a method named after the `rule` column of operators.py. Rules of elements, reductions
and selections have a file each; those of matrices and transforms, which need an array as a whole,
are here.
"""

from __future__ import annotations

from compll.errors import RuleError
from compll.frontend.operators import OPERATORS
from compll.frontend.rule_elements import Rules
from compll.frontend.rule_reductions import ReductionRules
from compll.frontend.rule_selections import SelectionRules
from compll.ir import matrices
from compll.ir.expr import Expr, Type

#: advice for grouped specs that would mix their groups
RUNS = "without `group:`, hadamard(x, 64) mixes runs of 64 elements"
#: elements of a run that hadamard mixes
MOST_BLOCK = 1 << 20


class ArrayRules:
    """Rules of matrices and transforms."""

    def __init__(self, rules: Rules) -> None:
        self.rules, self.pool = rules, rules.pool

    def matrices(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if self.rules.grouped:
            raise RuleError("a grouped spec has no matrices", "remove `group:`")
        if op == "matrix":
            x, cols = self.rules.number(args[0], "float"), args[1]
            size = self.pool.make("param", (), Type("int", "static"), "n")
            rows = self.rules.rounding("ceil", (self.rules.real("div", (size, cols)),))
            return matrices.matrix(self.pool, x, rows, cols)
        if op == "top_columns":
            return matrices.top(self.pool, self.rules.number(args[0], "float"), args[1])
        if op == "place_columns":
            return matrices.place(self.pool, args[0], self.rules.number(args[1], "float"), args[2])
        whole = [self.rules.number(a, "float") if a.type.shape == "matrix" else a for a in args]
        if op == "take_columns":
            whole[1] = args[1]
        return matrices.RULES[op](self.pool, *whole)

    def chosen(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if not self.rules.encoding:
            raise RuleError("positions are chosen in encode", "put the columns into the payload")
        self.rules.draws += 1
        return matrices.chosen(self.pool, args[0], args[1], self.rules.draws - 1)

    def hadamard(self, op: str, args: tuple[Expr, ...]) -> Expr:
        if self.rules.grouped:
            raise RuleError("a grouped spec has no transforms", RUNS)
        x, block = self.rules.number(args[0], "float"), args[1].value
        if x.type.shape != "n":
            raise RuleError(f"hadamard takes elements, not {x.type}")
        if type(block) is not int or block & (block - 1) or not 2 <= block <= MOST_BLOCK:
            raise RuleError(
                f"hadamard: a block is a power of two from 2 to {MOST_BLOCK}",
                "it must follow from the parameters alone, not from n: hadamard(x, 1024)",
            )
        return self.pool.make(op, (x,), Type("float", "n"), block)


#: classes of rules by the names of their rules; Rules has the others
OWNERS = {
    rule: owner for owner in (ReductionRules, SelectionRules, ArrayRules) for rule in vars(owner)
}


def apply(rules: Rules, op: str, args: tuple[Expr, ...], name: str) -> Expr:
    """The typed expression `op(args)`; `name` is the binding it stands in."""
    if op in ("top", "filter"):
        return SelectionRules(rules).selection(op, args, name)
    if op not in ("where", "and", "or", "not", "count", "gather", "indices"):
        rules.no_selection(op, args)
    rule = OPERATORS[op].rule
    owner = OWNERS[rule](rules) if rule in OWNERS else rules
    return getattr(owner, rule)(op, args)  # type: ignore[no-any-return]
