"""Stage 4: feedback, derived. Of errors: the input is gradient + residual, and the new residual
input - decode(encode(input)). Of differences: the input is gradient - reference, and the new
reference reference + decode(encode(input)).

`decoded` replaces each payload field in decode by the expression that encode stores in it. So the
decoded value becomes an expression of the input, and the pass that writes the payload computes it
too. Non-goal: decodes that mix elements (None is returned, and feedback refused).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from compll.errors import Problems, Span
from compll.frontend.operators import OPERATORS
from compll.frontend.spec import Param, Spec
from compll.ir.expr import Expr, Pool, Type, rebuild, walk
from compll.ir.module import MEAN, POSITIONS, REFERENCE, WHOLE, Field, Module, Selection

# ---- derived ------------------------------------------------------------------------------------
# Parameters that a spec has without declaring them.

#: for specs with derived error feedback
RESIDUAL = Param(
    "residual", "str", "float32", Span(), choices=("float32", "bfloat16"),
    about="the type of what error feedback keeps: bfloat16 halves its memory",
)  # fmt: skip


def accepted(spec: Spec) -> tuple[Param, ...]:
    """All parameters of a spec: its own, and the derived ones.

    A parameter of the spec's own hides the derived one of the same name.
    """
    declared = {p.name for p in spec.params}
    feeds = bool({spec.feedback.value, spec.feedback.other} & {"error", "own"})
    return (*spec.params, *((RESIDUAL,) if feeds and RESIDUAL.name not in declared else ()))


def kept_as(
    spec: Spec, arguments: Mapping[str, object], *, feeds: bool, problems: Problems
) -> dict[str, str]:
    """Derived parameters with other values than their defaults; `feeds`: the spec has feedback.

    They choose the type of states, not the meaning of payloads.
    """
    value = arguments.get(RESIDUAL.name, RESIDUAL.default)
    if RESIDUAL not in accepted(spec) or RESIDUAL.check(value) or value == RESIDUAL.default:
        return {}
    if not feeds:
        message = f"residual={value}: with these parameters {spec.name} has no error feedback"
        problems.add(spec.feedback.span, message, "leave it out")
    return {RESIDUAL.name: str(value)}


def feedback_states(kept: Mapping[str, str], *, differences: bool) -> tuple[Field, ...]:
    """The states of feedback."""
    if differences:
        return tuple(Field(name, "float32", 32, "n") for name in (REFERENCE, MEAN))
    return (Field(RESIDUAL.name, kept.get(RESIDUAL.name, str(RESIDUAL.default)), 32, "n"),)


# ---- feedback -----------------------------------------------------------------------------------


class _Mixed(Exception):
    """The decoded value of an element depends on more than that element and whole-tensor values."""


def decoded(pool: Pool, decode: Expr, fields: tuple[Field, ...]) -> Expr | None:
    """decode(encode(g)) as an elementwise expression; None if it is not elementwise."""
    by_name = {f.name: f for f in fields}
    try:
        return _substitute(pool, decode, by_name)
    except _Mixed:
        return None


def _substitute(pool: Pool, decode: Expr, fields: dict[str, Field]) -> Expr:
    if decode.op == "scatter":
        return _scattered(pool, decode, fields)

    def change(node: Expr) -> Expr | None:
        if node.op == "field":
            return _stored(pool, node, fields[str(node.value)])
        if node.op == "spread":
            inside, values = (_substitute(pool, a, fields) for a in node.args)
            return _where(pool, inside, _spread(pool, values))
        return None

    return rebuild(pool, decode, change)


def _where(pool: Pool, inside: Expr, value: Expr) -> Expr:
    """The value if `inside` holds, else zero."""
    zero = pool.make("float", (pool.const(0),), Type("float", "static"))
    lifted = pool.make("lift", (zero,), Type("float", "n"))
    return pool.make("where", (inside, value, lifted), Type("float", "n"))


def _stored(pool: Pool, node: Expr, field: Field) -> Expr:
    """The value that decode reads back from the field."""
    assert field.expr is not None
    if field.packed:
        return pool.make("code", (field.expr,), node.type, field.name)
    if field.storage in (*WHOLE, *POSITIONS):
        return (
            field.expr
            if field.expr.type.dtype == "int"
            else pool.make("trunc", (field.expr,), node.type)
        )
    if field.storage == "float32" and field.shape != "scalar":
        return field.expr
    return pool.make(field.storage, (field.expr,), node.type)


def _scattered(pool: Pool, decode: Expr, fields: dict[str, Field]) -> Expr:
    """scatter(indices(s), v[s]) as an elementwise expression: v if selected, else zero."""
    index, values = decode.args
    source = fields[str(index.value)].expr
    if source is None or source.op != "indices":
        raise _Mixed
    inside = pool.make("in", (), Type("bool", "n"), source.value)
    return _where(pool, inside, _spread(pool, _substitute(pool, values, fields)))


def _spread(pool: Pool, value: Expr) -> Expr:
    """An expression over selected elements, turned into one over all elements."""

    def change(node: Expr) -> Expr | None:
        if node.type.shape not in ("n", "kept"):
            return node  # one value and its operands stay unchanged
        if node.op == "gather":
            return node.args[0]
        if node.op == "indices":
            raise _Mixed
        if node.type.shape == "kept" and node.op != "field":
            args = tuple(rebuild(pool, a, change) for a in node.args)
            return pool.make(node.op, args, Type(node.type.dtype, "n"), node.value)
        return None

    return rebuild(pool, value, change)


def source(module: Module, g: Expr) -> Expr:
    """The input of encode: gradient plus residual, or gradient minus reference."""
    pool, held = module.pool, _held(module)
    if module.differences:
        return pool.make("sub", (g, held), g.type)
    return pool.make("add", (g, _times(pool, held, module.decay)), g.type)


def update(module: Module, x: Expr, value: Expr) -> Expr:
    """The new residual or reference, for an input x that decodes to `value`. It is written so that
    unselected elements need no arithmetic."""
    pool, kept, op = module.pool, x, "sub"
    if module.differences:
        kept, op = _held(module), "add"
    if value.op == "where" and value.args[0].op == "in":
        inside = pool.make(op, (kept, _part(module, value.args[1])), x.type)
        return pool.make("where", (value.args[0], inside, kept), x.type)
    return pool.make(op, (kept, _part(module, value)), x.type)


def _held(module: Module) -> Expr:
    return module.pool.make("state", (), Type("float", "n"), module.feedback_state)


def _part(module: Module, value: Expr) -> Expr:
    """The share of the decoded value that a reference takes up; all of it for a residual."""
    return _times(module.pool, value, module.decay) if module.differences else value


def _times(pool: Pool, value: Expr, number: float) -> Expr:
    if number == 1:
        return value
    factor = pool.make("lift", (pool.const(number),), Type("float", "n"))
    return pool.make("mul", (value, factor), value.type)


# ---- strict -------------------------------------------------------------------------------------
# Does a payload by itself carry a NaN or infinity of the gradient to the decoder?
# A field does if it is a float and its expression is *strict* in g: never finite when some
# element of g is not. If no field does, the compiler appends a status byte, and decode gives
# NaN everywhere when it is set. So a GradScaler on any rank sees a NaN of one rank.

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
        shows = field.expr is not None and _everywhere(field.expr)
        return shows and _shows(expr.args[0], field)
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
