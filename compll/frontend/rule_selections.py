"""Typing rules of selections: thresholds, selections, and uses of selected elements. The size of a
selection may depend on data."""

from __future__ import annotations

from dataclasses import replace

from compll.errors import RuleError
from compll.frontend.rule_context import ROWS, Context
from compll.frontend.rule_elements import arithmetic
from compll.ir.expr import Expr, Type, walk
from compll.ir.static import depends

# thresholds


def sample(c: Context, op: str, x: Expr, size: Expr) -> Expr:
    c.refuse_share(op, size)
    c.whole_tensor(op)
    x = c.number(x)
    if x.type.shape != "n":
        raise RuleError(f"sample takes elements, not {x.type}")
    return c.pool.make("sample", (x, c.static(op, size)), Type("float", "sample"))


def kth_largest(c: Context, op: str, x: Expr, k: Expr) -> Expr:
    c.refuse_share(op, k)
    c.whole_tensor(op)
    x, k = c.number(x), c.number(k)
    if x.type.shape not in ("n", "sample"):
        raise RuleError(f"kth_largest takes elements or a sample, not {x.type}")
    if k.type.shape not in ("static", "scalar"):
        raise RuleError(f"k is one number, not {k.type}")
    return c.pool.make(op, (x, k), Type("float", "scalar"))


def search(c: Context, op: str, *args: Expr) -> Expr:
    """adjust and bisect: elements first, then the numbers of the search."""
    c.whole_tensor(op)
    x, *rest = map(c.number, args)
    if x.type.shape != "n" or any(a.type.shape not in ("static", "scalar") for a in rest):
        raise RuleError(f"{op} takes elements first, then {len(rest)} numbers")
    return c.pool.make(op, (x, *rest), Type("float", "scalar"))


# selections


def selection(c: Context, op: str, key: Expr, limit: Expr | None = None) -> Expr:
    """top and filter."""
    if limit is not None:
        c.refuse_share(op, limit)
    if op == "top" or not c.encoding:
        c.whole_tensor(op, ROWS)
    limit = c.static(op, c.n if limit is None else limit)
    if "step" in depends(limit):
        raise RuleError(
            f"{op}: the bound must hold at every step",
            "what varies is the threshold: filter(x >= kth_largest(x, k), bound)",
        )
    given, key = key, c.number(key) if op == "top" else c.condition(key)
    if key.type.shape == "kept" and c.is_drawn(key.type.of):
        limit = arithmetic(c, "min", limit, c.selections[key.type.of].limit)
    elif key.type.shape != "n":
        raise RuleError(*_no_elements(op, given))
    if any(e.op == "in" for e in walk(key)):
        raise RuleError("a selection cannot depend on another selection")
    return c.pool.make(op, (key, limit), replace(key.type, dtype="selection"))


def _no_elements(op: str, x: Expr) -> tuple[str, str]:
    """Message and hint for a value that a selection cannot choose from."""
    if x.type.shape == "kept":
        own = f"this has those of {x.type.of!r}"
        message = f"{op} selects among all elements or drawn ones, and {own} alone"
        hint = f"one filter with both conditions: what selects {x.type.of!r} and ..."
        return message, hint if op == "filter" else f"{hint}, of x >= kth_largest(x, k)"
    if x.type.shape == "matrix":
        return f"{op} selects among elements, not those of a matrix", ROWS
    kinds = {"group": "one number of a group", "table": "a table", "sample": "a sample"}
    message = f"{op} selects among elements, and this is {kinds.get(x.type.shape, 'one number')}"
    return message, "x >= kth_largest(x, k) has one truth value for each" * (op == "filter")


def drawn(c: Context, op: str, size: Expr) -> Expr:
    """A selection of at least one element, so that a payload of them can show a NaN."""
    size = c.settled(size)
    c.refuse_share(op, size)
    c.whole_tensor(op)
    limit = arithmetic(c, "max", c.pool.const(1), c.static(op, size))
    if "step" in depends(limit):
        hint = "compute it from n and parameters"
        raise RuleError(f"{op}: the number must hold at every step", hint)
    return c.pool.make(op, (limit, limit), Type("selection", "n"))


# selected elements


def _selected(op: str, x: Expr) -> str:
    """The name of a selection."""
    if x.type.dtype != "selection":
        raise RuleError(f"{op} takes a selection, not {x.type}", "made by top() or filter()")
    return str(x.value)


def indices(c: Context, op: str, selection: Expr) -> Expr:
    name = _selected(op, selection)
    return c.pool.make(op, (), Type("int", "kept", name), name)


def gather(c: Context, op: str, x: Expr, selection: Expr) -> Expr:
    name, of = _selected("x[...]", selection), selection.type
    if (x.type.shape, x.type.of) != (of.shape, of.of) or x.type.dtype == "selection":
        hint = f"of those of {of.of!r}: x[{of.of}][{name}]" if of.of else ""
        raise RuleError(f"{x.type} has no elements to select", hint)
    return c.pool.make(op, (x,), Type(x.type.dtype, "kept", name), name)


def scatter(c: Context, op: str, index: Expr, value: Expr) -> Expr:
    if c.encoding:
        hint = "where(selection, a, b) changes a state's elements"
        raise RuleError("scatter belongs in decode", hint)
    value, of = c.number(value), index.type.of
    whole = (index.type.dtype, index.type.shape) == ("int", "kept")
    if index.op not in ("field", "indices") or not whole:
        raise RuleError(
            "scatter takes a payload field of indices first, or those of a drawn selection"
        )
    if value.type.shape == "kept" and value.type.of != of:
        raise RuleError("indices and values belong to different selections")
    within = c.selections[of].of if of in c.selections else ""
    result = Type("float", "kept" if within else "n", within)
    return c.pool.make(op, (index, c.lift(value, "kept", of)), result)


def spread(c: Context, op: str, condition: Expr, values: Expr) -> Expr:
    """A spread. check_spread.py checks that the condition is that of the values' selection."""
    if c.encoding:
        raise RuleError("spread belongs in decode")
    inside, chosen = c.condition(condition), c.number(values)
    if inside.type.shape != "n":
        raise RuleError(f"spread takes a condition of every element first, not {condition.type}")
    if chosen.type.shape != "kept":
        raise RuleError(
            f"spread takes values of selected elements, not {values.type}",
            "where(c, a, b) takes values of all elements",
        )
    return c.pool.make(op, (inside, chosen), Type("float", "n"), chosen.type.of)
