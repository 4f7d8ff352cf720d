"""Selections that share no element: their sizes together are at most n.

A payload that stores one of several forms for every element (a tag tells which) therefore has the
bound of the largest form, not of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from compll.ir.expr import Expr, walk
from compll.ir.module import POSITIONS, Module, Selection
from compll.ir.static import Number, evaluate


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


def _number(expr: Expr) -> Number | None:
    """A constant as elements are compared with it; None if it is none."""
    if any(e.op not in ("const", "lift", "float", "int") for e in walk(expr)):
        return None
    value = evaluate(expr, {})
    narrow = expr.type.dtype == "float" and expr.type.shape not in ("static", "scalar")
    return float(np.float32(value)) if narrow else value


def longest(
    module: Module, most: Mapping[str, int], total: Callable[[Mapping[str, int]], int]
) -> int:
    """The largest total of payload bytes if selections have at most these sizes, except for
    rounding to bytes: in each family one selection has all elements. A family's share of the total
    does not depend on the others, so each has its own largest."""
    exclusive = families(module)
    none = {**most, **{name: 0 for family in exclusive for name in family}}
    least = total(none)
    shares = (max(total({**none, name: most[name]}) for name in f) - least for f in exclusive)
    return least + sum(shares)


def roundings(module: Module) -> int:
    """Bytes by which a payload may exceed `longest`: one for each packed field."""
    names = {name for family in families(module) for name in family}
    return sum(f.of in names and f.item_bits < 8 for f in module.fields)
