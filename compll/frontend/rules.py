"""Typing rules, which turn an operator and typed arguments into a typed expression.

Each rule is a method named after the `rule` column of operators.py. Rules of elements, reductions,
selections and arrays have a file each.
"""

from __future__ import annotations

from compll.frontend.operators import OPERATORS
from compll.frontend.rule_arrays import ArrayRules
from compll.frontend.rule_elements import Rules
from compll.frontend.rule_reductions import ReductionRules
from compll.frontend.rule_selections import SelectionRules
from compll.ir.expr import Expr


def apply(rules: Rules, op: str, args: tuple[Expr, ...], name: str) -> Expr:
    """The typed expression `op(args)`; `name` is the binding it stands in."""
    selections = SelectionRules(rules)
    if op in ("top", "filter"):
        return selections.selection(op, args, name)
    if op not in ("where", "and", "or", "not", "count", "gather", "indices"):
        rules.no_selection(op, args)
    wanted, known = (
        OPERATORS[op].rule,
        (rules, ReductionRules(rules), selections, ArrayRules(rules)),
    )
    rule = next(getattr(one, wanted) for one in known if hasattr(one, wanted))
    return rule(op, args)  # type: ignore[no-any-return]
