"""Checks of payload fields that are matrices, and of `rounds:`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from compll.errors import Problems, RuleError, Span, nearest
from compll.frontend.rule_context import Context
from compll.frontend.spec import ANY, Binding, Declared, Name, Spec, Syntax
from compll.ir.expr import Expr, Pool, Type, rebuild, walk
from compll.ir.module import POSITIONS, WHOLE, Field, Selection
from compll.ir.static import EXACT, Number, apply
from compll.numerics.bits import FORMATS

# ---- check sizes --------------------------------------------------------------------------------
# Stage 3, sizes: refuses expressions that would take later stages too long.

#: limits of an expression whose names are replaced by their definitions
LIMIT_DEPTH, LIMIT_SIZE = 100, 50_000
#: limit of its depth, including reductions and rounds of `iterate`
LIMIT_CHAIN = 1000


class Sizes:
    """Sizes of the expressions of a spec, with names replaced by their definitions; and of whole
    numbers that follow from the parameters."""

    def __init__(self, params: Mapping[str, Number]) -> None:
        self.params = params
        self.measures: dict[Expr, tuple[int, int, int]] = {}
        self.numbers: dict[Expr, Number] = {}

    def bounded(self, value: Expr) -> Expr:
        """`value`. Raises RuleError if it is too large once definitions replace its names."""
        depth, size, chain = self.measure(value)
        if depth > LIMIT_DEPTH or size > LIMIT_SIZE or chain > LIMIT_CHAIN:
            most = LIMIT_DEPTH if depth > LIMIT_DEPTH or size > LIMIT_SIZE else LIMIT_CHAIN
            raise RuleError(
                f"with the names in it replaced this has {size} parts, "
                f"{chain if most == LIMIT_CHAIN else depth} deep; "
                f"allowed are {LIMIT_SIZE}, {most} deep",
                "use fewer definitions made of other definitions",
            )
        return value

    def measure(self, value: Expr) -> tuple[int, int, int]:
        """Depth and number of parts of an expression, with repeated parts counted again; and its
        whole depth.

        A reduction's value is computed once for all uses, so depth and parts start again at it. The
        whole depth does not.
        """
        if value not in self.measures:
            parts = [self.measure(a) for a in value.args] or [(0, 0, 0)]
            self.refuse_inexact(value)
            chain = 1 + max(c for _, _, c in parts)
            if value.op.startswith("reduce_"):
                self.measures[value] = 1, 1, chain
            else:
                depth = 1 + max(d for d, _, _ in parts)
                self.measures[value] = depth, 1 + sum(s for _, s, _ in parts), chain
        return self.measures[value]

    def refuse_inexact(self, value: Expr) -> None:
        """Raise RuleError for a whole number that is not exact before any data."""
        args = [self.numbers[a] for a in value.args if a in self.numbers]
        lacking = value.op == "param" and value.value not in self.params
        if value.type.shape != "static" or lacking or len(args) < len(value.args):
            return
        result = self.numbers[value] = apply(value, args, self.params)
        if type(result) is int and abs(result) >= EXACT:
            raise RuleError(
                f"a whole number known before any data is below 2**53, and {value.op} exceeds it",
                "compute with floats, or with bits of elements, which are int32",
            )

    def begin_anew(self, value: Expr) -> None:
        """Start depth and parts again at `value`, as at a reduction. Raises RuleError."""
        self.bounded(value)
        self.measures[value] = 1, 1, self.measure(value)[2]


# ---- check spread -------------------------------------------------------------------------------
# Checks that decode's `spread(c, values)` and `scatter(indices, values)` place values
# correctly.
# A spread is correct if its condition c, with payload fields replaced by the values that encode
# stores in them, is the condition of the values' `filter`, and the fields hold those values
# unchanged. Then only a damaged payload can have another number of values, and decode reports
# it.

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
    ranges: dict[Expr, Range] = {}
    for e in walk(expr):
        ranges[e] = _range(e, [ranges[a] for a in e.args])
    return ranges[expr]


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


# ---- check arrays -------------------------------------------------------------------------------

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
    names = [b.name for b in spec.rounds]
    if not isinstance(tree, Name) or tree.name not in names:
        raise RuleError(
            "combined takes the name of a payload field of `rounds:`",
            nearest(tree.name, names) if isinstance(tree, Name) else "give the value a name",
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
    result: list[tuple[str, str]] = []
    for b in spec.rounds:
        how = _how(b)
        if b.name not in by_name:
            continue
        field = by_name[b.name]
        _adds(field, how, selections, b.span, problems)
        _comes_after(field, [name for name, _ in result], b.span, problems)
        result.append((b.name, how))
    _whole(spec, fields, carried, problems)
    return tuple(result)


def _adds(
    field: Field, how: str, selections: Mapping[str, Selection], span: Span, problems: Problems
) -> None:
    """Report a field that cannot be added without decoding."""
    if field.shape == "kept" and selections[field.of].kind != "drawn":
        problems.add(
            span,
            f"{field.name!r}: ranks select different elements, so their values do not add up",
            "drawn(k) selects the same on all ranks",
        )
    elif field.shape not in ("n", "matrix", "scalar", "kept") or (
        field.storage not in ADDITIVE and not (field.most and how == "mean")
    ):
        problems.add(
            span,
            f"{field.name!r}: a round takes {', '.join(ADDITIVE)}: "
            "one number, elements, drawn elements or a matrix; "
            "or the mean of codes, uint1 to uint8",
        )


def _comes_after(field: Field, before: list[str], span: Span, problems: Problems) -> None:
    """Report a field that needs its own round or a later one."""
    assert field.expr is not None
    for e in walk(field.expr):
        if e.op == "combined" and e.value not in before:
            problems.add(
                span,
                f"{field.name!r} needs combined({e.value}), which is not in an earlier round",
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
