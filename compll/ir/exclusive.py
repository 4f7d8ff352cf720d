"""Selections that share no element: their sizes together are at most n.

A payload that stores one of several forms for every element (a tag tells which) therefore has the
bound of the largest form, not of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from compll.ir.expr import Expr
from compll.ir.module import POSITIONS, Module, Selection


def families(module: Module) -> list[list[str]]:
    """Names of selections, grouped into families whose members share no element.

    Selections with fields of positions are left out: their bytes vary from element to element.
    """
    coded = {f.of for f in module.fields if f.storage in POSITIONS}
    found: list[list[Selection]] = []
    for s in module.selections:
        home = next((f for f in found if all(apart(s.key, o.key) for o in f)), None)
        if not s.unlimited or s.name in coded:
            continue
        if home is None:
            found.append([s])
        else:
            home.append(s)
    return [[s.name for s in family] for family in found if len(family) > 1]


def apart(a: Expr, b: Expr) -> bool:
    """True if two conditions cannot both hold: a value equals two numbers, or one condition negates
    the other."""
    if any(x.op == "not" and x.args[0] is y for x, y in ((a, b), (b, a))):
        return True
    if not (a.op == b.op == "eq" and a.args[0] is b.args[0]):
        return False
    one, two = _number(a.args[1]), _number(b.args[1])
    return one is not None and two is not None and one != two


def _number(expr: Expr) -> float | None:
    while expr.op in ("lift", "float", "int"):
        (expr,) = expr.args
    return expr.value if expr.op == "const" and not isinstance(expr.value, str) else None


def corners(module: Module, most: Mapping[str, int]) -> list[dict[str, int]]:
    """Sizes of selections, a mapping for each case: in each family one selection has all elements.
    The longest payload is one of these, except for rounding to bytes."""
    found = [dict(most)]
    for family in families(module):
        found = [
            sizes | {name: most[name] if name == one else 0 for name in family}
            for sizes in found
            for one in family
        ]
    return found


def roundings(module: Module) -> int:
    """Bytes by which a payload may exceed the longest of the corners: one for each packed field."""
    names = {name for family in families(module) for name in family}
    return sum(f.of in names and f.item_bits < 8 for f in module.fields)
