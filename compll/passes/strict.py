"""Does a payload by itself carry a NaN or infinity of the gradient to the decoder?

A field does if it is a float and its expression is *strict* in g: never finite when some element of
g is not. If no field does, the compiler appends a status byte, and decode gives NaN everywhere when
it is set. So a GradScaler on any rank sees a NaN of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from compll.frontend.operators import OPERATORS
from compll.ir.expr import Expr, walk
from compll.ir.module import Field, Selection

_STRICT_IN_ALL = ("lift", "float32", *(o.name for o in OPERATORS.values() if o.strict == "first"))
_STRICT_IN_ANY = tuple(o.name for o in OPERATORS.values() if o.strict == "any")
_EITHER = ("where", "choose")  # arguments: a condition, and two values


def carries(fields: Iterable[Field], selections: Mapping[str, Selection], decode: Expr) -> bool:
    """True if a field of the payload, and so the decoded gradient, is never finite when the
    gradient is not."""
    floats = [f for f in fields if f.storage.startswith(("float", "bfloat")) and f.expr is not None]
    floats = [f for f in floats if _shows(decode, f)]
    return any(
        _kept_shows(f.expr, selections[f.of]) if f.shape == "kept" else _reaches(f.expr)
        for f in floats
        if f.expr is not None
    )


def _shows(expr: Expr, field: Field) -> bool:
    """True if a value is never finite when this field is not."""
    if expr.op == "field":
        return bool(expr.value == field.name)
    if expr.op in _EITHER:
        return all(_shows(a, field) for a in expr.args[1:])
    if expr.op == "max":  # if it is not -infinity: max(a, NaN) is NaN, max(NaN, a) is a
        return _magnitude(expr.args[1]) and _shows(expr.args[1], field)
    if expr.op == "scatter":
        # If no element is selected, one value for all of them is not visible.
        return _kept(expr.args[1], field.name) and _shows(expr.args[1], field)
    if expr.op == "lookup":
        # An element reads one number of a row: all must show it.
        own = field.expr is not None and _everywhere(field.expr)
        return own and _shows(expr.args[0], field)
    if expr.op in _STRICT_IN_ALL:
        return _shows(expr.args[0], field)
    if expr.op in _STRICT_IN_ANY:
        return any(_shows(a, field) for a in expr.args)
    return expr.op in ("div", "orthonormal") and _shows(expr.args[0], field)


def _kept(expr: Expr, field: str) -> bool:
    """True if the value contains the field with one number for every selected element."""
    return any(e.op == "field" and e.value == field and e.type.shape == "kept" for e in walk(expr))


def _kept_shows(expr: Expr, selection: Selection) -> bool:
    """True if the values of selected elements are never all finite when the gradient is not."""
    return _everywhere(expr) if selection.kind == "drawn" else _picks(expr, selection)


def _everywhere(expr: Expr) -> bool:
    """True if all elements are not finite when the gradient is not, and there is at least one."""
    if expr.op == "lift":
        return _reaches(expr.args[0])
    if expr.op == "sum_by":
        return _strict(expr.args[1])
    if expr.op in _STRICT_IN_ALL or expr.op == "div":
        return _everywhere(expr.args[0])
    return expr.op in _STRICT_IN_ANY and any(map(_everywhere, expr.args))


def _picks(expr: Expr, selection: Selection) -> bool:
    """True if these are the largest magnitudes themselves: NaN counts as the largest, so it is
    among them."""
    if expr.op != "gather" or not _strict(expr.args[0]):
        return False
    return (
        selection.kind == "top"
        and selection.key.op == "abs"
        and selection.key.args[0] is expr.args[0]
    )


def _reaches(expr: Expr) -> bool:
    if expr.type.shape == "n":
        return _strict(expr)
    if expr.op in ("reduce_sum", "reduce_max", "reduce_min"):
        magnitude = expr.op == "reduce_sum" or (
            expr.op == "reduce_max" and expr.args[0].op == "abs"
        )
        return magnitude and _strict(expr.args[0])
    if expr.op in _STRICT_IN_ALL or expr.op in ("sqrt",):
        return _reaches(expr.args[0])
    if expr.op in _STRICT_IN_ANY:
        return any(map(_reaches, expr.args))
    if expr.op in _EITHER:
        return all(map(_reaches, expr.args[1:]))
    if expr.op == "max":
        return _magnitude(expr.args[1]) and _reaches(expr.args[1])
    if expr.op in ("matrix", "sum_by"):
        return _strict(expr.args[-1])
    return expr.op == "div" and _reaches(expr.args[0])


def _magnitude(expr: Expr) -> bool:
    """True if a value is never below 0."""
    if expr.op in ("abs", "sqrt", "norm2", "group_size", "count_kept"):
        return True
    if expr.op == "const":
        return bool(expr.value >= 0)
    if expr.op in _EITHER:
        return all(map(_magnitude, expr.args[1:]))
    if expr.op == "max":
        return any(map(_magnitude, expr.args))
    sound = (
        "lift",
        "float",
        "float32",
        "bfloat16_up",
        "add",
        "mul",
        "div",
        "reduce_max",
        "reduce_sum",
    )
    return expr.op in sound and all(map(_magnitude, expr.args))


def _strict(expr: Expr) -> bool:
    if expr.op == "input":
        return True
    if expr.op in _STRICT_IN_ALL:
        return _strict(expr.args[0])
    if expr.op in _STRICT_IN_ANY:
        return any(map(_strict, expr.args))
    if expr.op == "where":  # another value in place of a finite one
        condition, _, other = expr.args
        kept = condition.op == "isfinite" and condition.args[0] is other
        return kept and _strict(other)
    return expr.op == "div" and _strict(expr.args[0])
