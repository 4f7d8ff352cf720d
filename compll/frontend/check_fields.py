"""Stage 3, declarations: storage and shape of payload fields, and states with their updates.

`c` is the checker of expressions, which holds the spec and what was found so far.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace

from compll.errors import Problems, RuleError, Span, closest, nearest
from compll.frontend import check_arrays
from compll.frontend.check_arrays import values
from compll.frontend.check_exprs import ERROR, Expressions
from compll.frontend.rule_context import WHOLE_SIZES
from compll.frontend.rules import arithmetic, trit, where, whole_element, whole_number
from compll.frontend.spec import Declared, Name, Syntax, names
from compll.ir.expr import Expr, Type
from compll.ir.module import HALVES, PACKED, POSITIONS, TRITS, WHOLE, Field
from compll.ir.storage import STORAGES, WITH_BITS

#: a length in a declaration, and the names of encode in it that need data
Unsized = tuple[Span, set[str]]


def leaf(c: Expressions, op: str, item: Field) -> Expr:
    """A field or state as an expression."""
    codes = item.packed and item.name not in {b.name for b in c.spec.rounds}
    dtype = "int" if codes or item.storage in (*WHOLE, *POSITIONS) else "float"
    return c.pool.make(op, (), Type(dtype, item.shape, item.of, item.dims), item.name)


# states


def states(c: Expressions, unsized: list[Unsized]) -> tuple[Field, ...]:
    """The declared states without wrong ones, which become broken names. Parts of declarations
    that need data, which encode may explain, are added to `unsized`."""
    sizes = _sizes(c) if any(item.second for item in c.spec.state) else {}
    fields = {}
    for item in c.spec.state:
        try:
            fields[item.name] = _state(c, item, sizes, unsized)
        except RuleError as error:
            c.problems.add(item.span, str(error), error.hint)
    right = tuple(field for field in fields.values() if field is not None)
    c.broken |= {item.name for item in c.spec.state} - {field.name for field in right}
    return right


def _state(
    c: Expressions, item: Declared, sizes: Mapping[str, Expr], unsized: list[Unsized]
) -> Field | None:
    if item.second is not None and item.base == "float32":
        unknown = {b.name for b in c.spec.encode} - set(sizes)
        for tree in (item.dim, item.second):
            if tree is not None and (by_data := names(tree) & unknown):
                unsized.append((tree.span, by_data))
                return None
        dims = _dims(c, item, sizes)
        return None if dims is None else Field(item.name, "float32", 32, "matrix", dims=dims)
    per_element = isinstance(item.dim, Name) and item.dim.name == "n"
    half = item.base in HALVES and per_element
    if not half and not (item.base == "float32" and (item.dim is None or per_element)):
        message = f"state {item.name!r} is float32, float32[n] or float32[rows, columns]"
        raise RuleError(message, "bfloat16[n] and float16[n] keep 16 bits per element")
    if c.context.grouped and not per_element:
        raise RuleError("a grouped spec keeps states per element", "float32[n]")
    return Field(item.name, item.base, 32, "n" if per_element else "scalar")


def _sizes(c: Expressions) -> dict[str, Expr]:
    """Names that sizes of states may use: values that encode computes from n and parameters."""
    quiet = Expressions(c.spec, c.params, Problems("", most=math.inf), c.pool)
    env = quiet.globals()
    for b in c.spec.encode:
        if names(b.value) <= set(env):
            value = quiet.expr(b.value, quiet.scope(env, b.name))
            if value is not ERROR and quiet.constant_of_params(value):
                env[b.name] = value
    return env


def sized_by_data(c: Expressions, unsized: list[Unsized], env: Mapping[str, Expr]) -> None:
    """Refuse states whose size depends on data, unless a mistake in encode explains it: without one
    a wrong size depends on the state itself."""
    mistaken = bool(c.problems.diagnostics)
    for span, names_ in unsized:
        if not (mistaken and any(c.excused(name) or env.get(name) is ERROR for name in names_)):
            c.problems.add(span, WHOLE_SIZES, f"{min(names_)!r} depends on data")


def _dims(c: Expressions, item: Declared, env: Mapping[str, Expr]) -> tuple[Expr, ...] | None:
    """The rows and columns that a declaration gives to a matrix."""
    dims = []
    for tree in (item.dim, item.second):
        value = ERROR if tree is None else c.expr(tree, c.scope(env))
        if tree is None or value is ERROR:
            return None
        try:
            dims.append(c.context.dimension(value))
        except RuleError as error:
            c.problems.add(tree.span, str(error), error.hint)
    return tuple(dims) if len(dims) == 2 else None


def updates(c: Expressions, states: tuple[Field, ...], env: Mapping[str, Expr]) -> dict[str, Expr]:
    """The new values of states, of which each has one."""
    by_name = {s.name: s for s in states}
    named, meant = {b.name for b in c.spec.update}, set[str]()
    computed = {b.name for b in c.spec.encode} - {s.name for s in c.spec.state} - c.spec.broken
    for b in c.spec.update:
        if b.name not in by_name and (b.name in computed or not c.excused(b.name)):
            hint = nearest(b.name, by_name) or "states are declared in `state:`"
            c.problems.add(b.span, f"{b.name!r} is no state", hint)
            meant.add(closest(b.name, by_name) or "")
    for name in by_name:
        if name not in named | meant and not c.excused(name):
            span = c.spec.spans.get("update", c.spec.spans.get("state", Span()))
            hint = f"add `update: {{{name}: ...}}`"
            c.problems.add(span, f"state {name!r} is never updated", hint)
    pairs = [(b, c.expr(b.value, c.scope(env, b.name))) for b in c.spec.update]
    return {
        b.name: _fitted(c, b.value, by_name[b.name], e)
        for b, e in pairs
        if e is not ERROR and b.name in by_name
    }


def owed(c: Expressions, states: tuple[Field, ...]) -> tuple[Field, ...]:
    """The states, with the gradient that they hold back by `owed:`."""
    names = {s.name for s in states if s.shape == "n"}
    factors = dict.fromkeys(names, 0.0)
    for b in c.spec.owed:
        if b.name not in names and not c.excused(b.name):
            hint = nearest(b.name, names) or "like `state: {sum: float32[n]}`"
            message = f"{b.name!r} in `owed:` is no state with a value per element"
            c.problems.add(b.span, message, hint)
        value = c.constant(b.value)
        if isinstance(value, str) or (value is not None and not math.isfinite(value)):
            message = f"a unit of a state is a finite number of gradients, not {value}"
            c.problems.add(b.value.span, message, "like `owed: {sum: 1}`")
        elif value is not None:
            factors[b.name] = float(value)
    return tuple(replace(s, gradient=factors.get(s.name, 0.0)) for s in states)


def _fitted(c: Expressions, syntax: Syntax, state: Field, value: Expr) -> Expr:
    """A state's new value, lifted to the state's shape."""
    if state.shape == "matrix" and value.type.dims == state.dims:
        return value
    level, hint = value.type.shape, ""
    if level == "matrix" or state.shape == "matrix":
        hint = "rows and columns must be the declared ones"
    elif value.type.dtype not in ("selection", "str") and level in (
        "static", "scalar", state.shape
    ):  # fmt: skip
        return c.context.lift(_floats(c, value), state.shape)
    elif level == "n":
        hint = f"declare it as {state.storage}[n]"
    c.problems.add(syntax.span, f"state {state.name!r} cannot hold {value.type}", hint)
    return ERROR


def _floats(c: Expressions, value: Expr) -> Expr:
    """A state's value as floats. A `where` on selected elements stays outermost."""
    if value.op == "where" and value.args[0].op == "in":
        condition, *either = value.args
        value = where(c.context, "where", condition, *map(c.context.number, either))
    return c.context.number(value)


# payload fields


def payload(c: Expressions, env: Mapping[str, Expr]) -> tuple[Field, ...]:
    """The fields whose declaration and value fit."""
    fields = []
    for item in c.spec.payload:
        try:
            fields.append(_field(c, item, env))
        except RuleError as error:
            c.problems.add(error.span or item.span, str(error), error.hint)
    return tuple(field for field in fields if field is not None)


def _field(c: Expressions, item: Declared, env: Mapping[str, Expr]) -> Field | None:
    """A payload field; None if a mistake elsewhere explains that it is wrong. Raises RuleError."""
    storage, bits = _storage(c, item)
    expr = env.get(item.name, ERROR)
    if item.name not in env and not c.excused(item.name):
        _report_undefined(c, item)
    if expr is ERROR:
        names = {p.name for p in c.spec.params}  # a table's length may be a parameter
        named = item.dim.name if isinstance(item.dim, Name) else ""
        if named and named not in names and env.get(named) is not ERROR:
            _need_length(c, item)
        return None
    if item.second is not None or expr.type.shape == "matrix":
        dims = _dims(c, item, env) if item.second is not None else None
        if item.second is not None and dims is None:
            return None
        added = item.name in {b.name for b in c.spec.rounds}
        return check_arrays.field(item, storage, bits, expr, dims, added=added)
    if expr.type.dtype in ("selection", "str"):
        message = f"{item.name!r} is a {expr.type.dtype}, not numbers"
        raise RuleError(message, "store indices(selection) and x[selection]")
    level = _level(c, item, expr)
    if level is None:
        return None
    shape, of = level
    _need_room(c, item, storage, bits, shape, expr)
    if (storage, bits) == ("uint", 8) and shape in ("scalar", "group"):
        storage = "byte"
    value = _stored(c, c.context.lift(expr, shape, of), storage)
    return Field(item.name, storage, bits, shape, of, value)


def _stored(c: Expressions, expr: Expr, storage: str) -> Expr:
    """The value that a type stores for an expression; feedback must know it."""
    if storage in TRITS:
        return trit(c.context, expr)
    if storage in check_arrays.FLOATS:
        return c.context.number(expr)
    limits = STORAGES[storage].whole if storage in WHOLE and expr.op != "indices" else None
    if limits is None:
        return expr
    low, high = limits
    if storage in ("uint16", "byte") or expr.type.shape == "scalar":
        return whole_number(c.context, expr, low, high)
    expr = whole_element(c.context, expr)  # an int32, so uint32 has half its range
    if values(expr)[0] >= low:
        return expr
    return arithmetic(c.context, "max", expr, c.pool.const(low))


def _need_room(
    c: Expressions, item: Declared, storage: str, bits: int, shape: str, expr: Expr
) -> None:
    """Raise RuleError if a type cannot hold values of this shape."""
    if storage in PACKED and shape in ("scalar", "group") and (storage, bits) != ("uint", 8):
        each, floats = " per group" * (shape == "group"), check_arrays.FLOATS
        written = f"{item.base}[...]" if item.bits is not None else item.base
        raise RuleError(
            f"{item.name!r} is one number{each}, and {written} holds elements",
            f"use uint8, uint16, int32 or uint32 for a whole number, {', '.join(floats[:-1])} or "
            f"{floats[-1]} for another, or {written}[n] to repeat it for every element",
        )
    if storage in POSITIONS and expr.op != "indices":
        message = f"{item.name!r}: {storage} holds the positions of a selection"
        raise RuleError(message, "store indices(selection)")
    if storage == "uint" or storage not in PACKED:
        return
    codes, hint = storage, "use trit[n], or uint2 for selected elements"
    if storage not in TRITS:
        hint = "use uint[bits], of which a code has a fixed length"
        codes = f"{storage.capitalize()} codes"
    if shape != "n":
        raise RuleError(f"{item.name!r}: {storage} holds a value of every element", hint)
    if STORAGES[storage].varying and c.selections:
        raise RuleError(f"{item.name!r}: {codes} do not go together with selections", hint)


def _report_undefined(c: Expressions, item: Declared) -> None:
    """Report a payload field that encode does not define; decode may misspell its name."""
    defined = {b.name for b in c.spec.encode} | {"g"}
    used = set[str]().union(*(names(b.value) for b in c.spec.decode))
    lacking = (used & defined) - {d.name for d in c.spec.payload}
    message = f"{item.name!r} is in the payload but encode does not define it"
    c.problems.add(item.span, message, nearest(item.name, lacking or defined))
    # the misspelled name in decode is not a second error
    c.broken |= {closest(item.name, lacking) or min(lacking)} if lacking else set()


def _storage(c: Expressions, item: Declared) -> tuple[str, int]:
    """The storage and bits of a declared type."""
    base = item.base
    if base in ("float", "bfloat"):
        storages = {16: f"{base}16", 32: "float32"}
        bits = _bits(c, item, storages, 32, " or ".join(map(str, storages)))
        return storages.get(bits, "float32"), 32
    if base in WITH_BITS and base != "uint":
        return base, _bits(c, item, range(1, 9), 8, "1 to 8")
    if base == "uint":
        added = item.name in {b.name for b in c.spec.rounds}
        least = 0 if item.second is None and not added else 1
        return base, _bits(c, item, range(least, 16), 8, f"{least} to 15")
    if base.startswith("uint") and base not in WHOLE:
        return "uint", int(base[4:])
    return ("uint", 1) if base == "bool" else (base, 2 if base in TRITS else 32)


def _bits(
    c: Expressions, item: Declared, allowed: Container[object], instead: int, words: str
) -> int:
    """The bits in brackets; `instead` of wrong ones, which are reported."""
    assert item.bits is not None
    value = c.constant(item.bits)
    if isinstance(value, int | float) and value in allowed:
        return int(value)
    if value is not None:
        c.problems.add(item.span, f"{item.base} has {words} bits, not {value}")
    return instead


def _level(c: Expressions, item: Declared, expr: Expr) -> tuple[str, str] | None:
    """The level that a declaration gives a field, and its selection; None if a mistake elsewhere
    explains that it is wrong. Raises RuleError if they do not fit."""
    if expr.type.shape == "table":
        return _table_level(c, item, expr)
    if item.dim is None and expr.type.shape == "scalar":
        return "scalar", ""
    if not _need_length(c, item):
        return None
    name = item.dim.name if isinstance(item.dim, Name) else None
    shape = "group" if c.context.grouped else "scalar"
    shape = {None: shape, "n": "n", "groups": "group"}.get(name, "kept")
    of = str(name) if shape == "kept" else ""
    level = expr.type.shape
    repeated = level in ("scalar", "group") and shape in ("n", "group")
    if (level, expr.type.of) == (shape, of) or level == "static" or repeated:
        return shape, of
    is_ = _named(level, expr.type.of)
    message = f"{item.name!r} is declared {_named(shape, of)} but is {is_}"
    hint = {"n": "write [n] after the type", "kept": f"write [{expr.type.of}] after the type"}
    raise RuleError(message, hint.get(level, ""))


def _need_length(c: Expressions, item: Declared) -> bool:
    """True if a declaration has a known length or none; false if a mistake elsewhere explains that
    it is unknown. Raises RuleError."""
    name = item.dim.name if isinstance(item.dim, Name) else None
    lengths = ["n", "groups", *c.selections]
    if item.dim is None or item.second is not None or name in lengths:
        return True
    if c.excused(name or ""):
        return False
    if name is None:
        message = f"the length of {item.name!r} is no name"
        hint = f"{', '.join(lengths)}; a matrix has rows and columns, like float32[n, 1]"
    else:
        message, hint = f"{item.name!r} has an unknown length {name!r}", nearest(name, lengths)
    raise RuleError(message, hint, item.dim.span)


def _table_level(c: Expressions, item: Declared, expr: Expr) -> tuple[str, str] | None:
    """The level of a table, checked against its declared size."""
    if expr.op == "literal":
        raise RuleError(f"{item.name!r} does not depend on data", "decode knows it by its name")
    size = c.constant(item.dim) if item.dim is not None else 1
    if item.base == "float32" and size == int(expr.type.of):
        return "table", expr.type.of
    if size is None:
        return None
    message = f"{item.name!r} is a table of {expr.type.of} numbers"
    raise RuleError(message, f"write float32[{expr.type.of}] or its parameter")


def _named(shape: str, of: str) -> str:
    words = {
        "n": "[n], one per element",
        "group": "[groups], one per group",
        "kept": f"[{of}], one per selected element",
        "sample": "a sample",
    }
    return words.get(shape, "one number")
