"""Checks that decode's `spread(c, values)` and `scatter(indices, values)` place values correctly.

A spread is correct if its condition c, with payload fields replaced by the values that encode
stores in them, is the condition of the values' `filter`, and the fields hold those values
unchanged. Then only a damaged payload can have another number of values, and decode reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from compll.errors import RuleError
from compll.ir.expr import Expr, Pool, rebuild, walk
from compll.ir.module import POSITIONS, WHOLE, Field, Selection

Range = tuple[float, float]
#: storages that hold every position of any n
PLACES = ("int32", "uint32", *POSITIONS)
ANY_INT: Range = (-(2.0**31), 2.0**31 - 1)


def fits(
    pool: Pool, spread: Expr, fields: Mapping[str, Field], selections: Mapping[str, Selection]
) -> None:
    """Raise RuleError unless the condition is that of the values' selection."""
    condition, selection = spread.args[0], selections[str(spread.value)]
    name = selection.name
    used = sorted({str(e.value) for e in walk(condition) if e.op == "field"})
    if selection.key.op == "error":
        return
    if selection.unlimited:
        for f in (fields[u] for u in used):
            if not _exact(f):
                raise RuleError(
                    f"{f.name!r} may not hold the value that encode computed, so spread could find "
                    "other elements than filter",
                    "clip it to its type, or build it by where() of numbers",
                )
        if _encoded(pool, condition, fields) is selection.key:
            return
        raise RuleError(
            f"spread must have the condition by which `filter` selected {name!r}",
            "`kept: filter(tag == 3)` with `tag` in the payload, then `spread(tag == 3, value)`",
        )
    raise RuleError(
        f"spread puts back all elements where a condition holds, and {name!r} is limited",
        "use filter(c) without a limit, or scatter",
    )


def places(scatter: Expr, fields: Mapping[str, Field]) -> None:
    """Raise RuleError unless the positions are all those of a selection, each once."""
    index = scatter.args[0]
    if index.op != "field":
        return
    field = fields[str(index.value)]
    if field.storage not in PLACES or (field.expr is not None and field.expr.op != "indices"):
        raise RuleError(
            f"{field.name!r} does not hold the positions of a selection as they are",
            f"`{field.name}: indices(selection)`, in the payload as {', '.join(PLACES)}",
        )


def _exact(field: Field) -> bool:
    """True if the field's type holds every value that its expression can have."""
    if field.expr is None or field.storage not in ("float32", "uint", *WHOLE):
        return False
    kind = field.expr.type.dtype
    if field.storage == "float32":
        return kind == "float" and field.shape != "scalar"
    if field.storage == "uint16":
        return True  # the expression is clamped to its range: see Rules.whole_number
    if kind != "int" or field.shape == "scalar":
        return kind == "bool" and field.storage == "uint"
    least, most = values(field.expr)
    return field.storage == "int32" or (least >= 0 and most < 2.0**field.item_bits)


def values(expr: Expr) -> Range:
    """The range of an integer, within that of int32."""
    known: dict[int, Range] = {}
    for e in walk(expr):
        known[id(e)] = _range(e, [known[id(a)] for a in e.args])
    return known[id(expr)]


def _range(expr: Expr, args: list[Range]) -> Range:
    if expr.type.dtype == "bool":
        return 0, 1
    if expr.type.dtype != "int":
        return ANY_INT
    if expr.op == "const":
        return expr.value, expr.value
    if expr.op not in _RANGES:
        return ANY_INT
    low, high = _RANGES[expr.op](args)
    return (low, high) if ANY_INT[0] <= low and high <= ANY_INT[1] else ANY_INT


def _masked(args: list[Range]) -> Range:
    whole = [high for low, high in args if low >= 0]
    return (0, min(whole)) if whole else ANY_INT


_RANGES: dict[str, Callable[[list[Range]], Range]] = {
    "lift": lambda args: args[0],
    "int": lambda args: args[0],
    "where": lambda args: (min(args[1][0], args[2][0]), max(args[1][1], args[2][1])),
    "min": lambda args: (min(a[0] for a in args), min(a[1] for a in args)),
    "max": lambda args: (max(a[0] for a in args), max(a[1] for a in args)),
    "add": lambda args: (args[0][0] + args[1][0], args[0][1] + args[1][1]),
    "sub": lambda args: (args[0][0] - args[1][1], args[0][1] - args[1][0]),
    "bitand": _masked,
}


def _encoded(pool: Pool, condition: Expr, fields: Mapping[str, Field]) -> Expr:
    """A condition of decode, with payload fields replaced by the expressions of encode."""

    def change(node: Expr) -> Expr | None:
        if node.op == "field":
            return fields[str(node.value)].expr
        if node.op == "ne" and node.args[0].op == "field":
            source = fields[str(node.args[0].value)].expr
            if source is not None and source.type.dtype == "bool":
                return source
        return None

    return rebuild(pool, condition, change)
