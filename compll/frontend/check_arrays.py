"""Checks of payload fields that are matrices, and of `rounds:`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compll.errors import Problems, RuleError, Span, nearest
from compll.frontend.rule_context import Context
from compll.frontend.spec import ANY, Binding, Declared, Spec
from compll.frontend.syntax import Name, Syntax
from compll.ir.expr import Expr, Type, walk
from compll.ir.module import Field, Selection
from compll.numerics.bits import FORMATS

HOW = ("mean", "max")
#: storages that a native all-reduce adds
ADDITIVE = ("float32", "float16", "bfloat16")
FLOATS = ("float32", *FORMATS)


def field(
    item: Declared, storage: str, bits: int, expr: Expr, dims: tuple[Expr, ...] | None, *,
    added: bool,
) -> Field:  # fmt: skip
    """The payload field of a matrix. Raises RuleError if it does not fit.

    added: the ranks add the field up.
    """
    matrix, allowed = expr.type.shape == "matrix", ADDITIVE if added else (*FLOATS, "uint")
    if matrix and storage not in allowed:
        types = f"{', '.join(FLOATS)} or uint of 1 to 15 bits"
        types = f"{', '.join(ADDITIVE)} where ranks add" if added else types
        message = f"{item.name!r}: a matrix is {types}, not {item.base}"
        raise RuleError(message, "other types travel by element: flat(m), and [n]")
    if not matrix or dims != expr.type.dims:
        declared = "no matrix" if dims is None else str(Type("float", "matrix", dims=dims))
        hint = "write the rows and columns as in encode, or store flat(m)"
        raise RuleError(
            f"{item.name!r} is declared {declared} but is {expr.type}",
            hint if matrix else "matrix(x, columns) makes a matrix",
        )
    return Field(item.name, storage, bits, "matrix", "", expr, dims)


def widened(spec: Spec, fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """The fields, with a whole byte for each code that ranks add up."""
    added = {b.name for b in spec.rounds}
    coded = {f.name for f in fields if f.storage == "uint" and f.bits <= 8} & added
    return tuple(
        replace(f, bits=8, most=(1 << f.bits) - 1) if f.name in coded else f for f in fields
    )


def combined(c: Context, spec: Spec, tree: Syntax, value: Expr) -> Expr:
    """The value that ranks combine a field to. Raises RuleError."""
    if not c.encoding:
        raise RuleError(
            "decode sees what the ranks combined already", "write the payload's name alone"
        )
    known = [b.name for b in spec.rounds]
    if not isinstance(tree, Name) or tree.name not in known:
        raise RuleError(
            "combined takes the name of a payload field of `rounds:`",
            nearest(tree.name, known) if isinstance(tree, Name) else "give the value a name",
        )
    if value.type.shape not in ("n", "matrix", "scalar", "static", "kept"):
        raise RuleError(f"combined takes elements, a matrix or one number, not {value.type}")
    shape = "scalar" if value.type.shape == "static" else value.type.shape
    return c.pool.make("combined", (), replace(value.type, dtype="float", shape=shape), tree.name)


def combinations(spec: Spec, problems: Problems) -> None:
    """Report entries of `rounds:` that do not name a payload field and a way to combine it."""
    declared = {d.name for d in spec.payload}
    for b in spec.rounds:
        if b.name not in declared and not spec.broken & {b.name, ANY}:
            hint = nearest(b.name, declared)
            problems.add(b.span, f"{b.name!r} in `rounds:` is no payload field", hint)
        if _how(b) not in HOW:
            problems.add(b.value.span, f"ranks combine by {', '.join(HOW)}", f"{b.name}: mean")


def _how(b: Binding) -> str:
    return b.value.name if isinstance(b.value, Name) else ""


def rounds(
    spec: Spec,
    fields: tuple[Field, ...],
    selections: Mapping[str, Selection],
    carried: bool,
    problems: Problems,
) -> tuple[tuple[str, str], ...]:
    """The rounds, in order: the field and the way it is combined."""
    if not spec.rounds:
        return ()
    by_name = {f.name: f for f in fields}
    found: list[tuple[str, str]] = []
    for b in spec.rounds:
        how = _how(b)
        if b.name not in by_name:
            continue
        one = by_name[b.name]
        _adds(one, how, selections, b.span, problems)
        _comes_after(one, [name for name, _ in found], b.span, problems)
        found.append((b.name, how))
    _whole(spec, fields, carried, problems)
    return tuple(found)


def _adds(
    one: Field, how: str, selections: Mapping[str, Selection], span: Span, problems: Problems
) -> None:
    """Report a field that cannot be added without decoding."""
    if one.shape == "kept" and selections[one.of].kind != "drawn":
        problems.add(
            span,
            f"{one.name!r}: ranks select different elements, so their values do not add up",
            "drawn(k) selects the same on all ranks",
        )
    elif one.shape not in ("n", "matrix", "scalar", "kept") or (
        one.storage not in ADDITIVE and not (one.most and how == "mean")
    ):
        problems.add(
            span,
            f"{one.name!r}: a round takes {', '.join(ADDITIVE)}: "
            "one number, elements, drawn elements or a matrix; "
            "or the mean of codes, uint1 to uint8",
        )


def _comes_after(one: Field, before: list[str], span: Span, problems: Problems) -> None:
    """Report a field that needs its own round or a later one."""
    assert one.expr is not None
    for e in walk(one.expr):
        if e.op == "combined" and e.value not in before:
            problems.add(
                span,
                f"{one.name!r} needs combined({e.value}), which is not in an earlier round",
                f"put {e.value!r} first",
            )


def _whole(spec: Spec, fields: tuple[Field, ...], carried: bool, problems: Problems) -> None:
    span = spec.spans["rounds"]
    named = {b.name for b in spec.rounds}
    for f in fields:
        if f.name not in named:
            problems.add(span, f"payload field {f.name!r} has no round", f"add `{f.name}: mean`")
    if spec.merge != "decode":
        problems.add(spec.spans["merge"], "`rounds:` says how payloads combine", "remove `merge:`")
    if spec.group is not None:
        problems.add(spec.group.span, "a grouped spec has no rounds", "remove `group:`")
    if not carried:
        problems.add(
            span,
            "the other ranks would not see that a gradient is not finite",
            "store a value in the first round that is not finite then, like mean(abs(g))",
        )
