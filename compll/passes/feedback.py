"""Stage 4: feedback, derived. Of errors: the input is gradient + residual, and the new residual
input - decode(encode(input)). Of differences: the input is gradient - reference, and the new
reference reference + decode(encode(input)).

`decoded` replaces each payload field in decode by the expression that encode stores in it. So the
decoded value becomes an expression of the input, and the pass that writes the payload computes it
too. Non-goal: decodes that mix elements (None is returned, and feedback refused).
"""

from __future__ import annotations

from compll.ir.expr import Expr, Pool, Type, rebuild
from compll.ir.module import POSITIONS, WHOLE, Field, Module


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
    return module.pool.make("state", (), Type("float", "n"), module.fed_state)


def _part(module: Module, value: Expr) -> Expr:
    """The share of the decoded value that a reference takes up; all of it for a residual."""
    return _times(module.pool, value, module.decay) if module.differences else value


def _times(pool: Pool, value: Expr, number: float) -> Expr:
    if number == 1:
        return value
    factor = pool.make("lift", (pool.const(number),), Type("float", "n"))
    return pool.make("mul", (value, factor), value.type)
