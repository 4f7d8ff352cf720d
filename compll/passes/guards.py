"""Conditions under which a value is needed: `a if c else b` on numbers computes one branch."""

from __future__ import annotations

from compll.ir.expr import LIBRARY, TABLES, Expr, walk


def guards(roots: list[Expr]) -> dict[int, tuple[Expr, bool]]:
    """For each costly value, by its id, a condition that holds wherever the value is used, and its
    value there.

    A condition holds at a value if it holds at every use: at its user, or by the branch of a
    `choose`.
    """
    found: dict[int, tuple[Expr, bool]] = {}
    facts: dict[int, dict[tuple[int, bool], Expr]] = {id(e): {} for e in roots}
    for e in reversed(list(walk(*roots))):
        own = facts[id(e)]
        chooses = e.op == "choose" and e.type.shape == "scalar"
        for place, a in enumerate(e.args):
            there = dict(own)
            if chooses and place:
                there[id(e.args[0]), place == 1] = e.args[0]
            known = facts.get(id(a))
            both = there if known is None else {k: v for k, v in known.items() if k in there}
            facts[id(a)] = both
        if own and costly(e) and e.op not in TABLES:
            (_, wanted), condition = list(own.items())[-1]
            found[id(e)] = condition, wanted
    return found


def costly(expr: Expr) -> bool:
    """True if a value takes a walk over all elements (or a sample of them)."""
    total = expr.op.startswith("reduce_") and expr.type.shape == "scalar"
    return expr.op in LIBRARY or (total and expr.args[0].type.shape == "n")
