"""Stage 3, declarations: storage and shape of payload fields, and states with their updates.

`c` is the checker of expressions, which holds the spec and what was found so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from compll.errors import Problems, RuleError, Span, closest, nearest
from compll.frontend import check_arrays
from compll.frontend.check_exprs import ERROR, Expressions
from compll.frontend.check_spread import values
from compll.frontend.spec import Declared
from compll.frontend.syntax import Name, Syntax, names
from compll.ir import matrices
from compll.ir.expr import Expr, Type
from compll.ir.module import HALVES, PACKED, POSITIONS, WHOLE, Field
from compll.ir.storage import STORAGES

#: a length in a declaration, and the names of encode in it that need data
Unsized = tuple[Span, set[str]]


def leaf(c: Expressions, op: str, item: Field) -> Expr:
    """A field or state as an expression."""
    codes = item.packed and item.name not in {b.name for b in c.spec.rounds}
    dtype = "int" if codes or item.storage in (*WHOLE, *POSITIONS) else "float"
    return c.pool.make(op, (), Type(dtype, item.shape, item.of, item.dims), item.name)


# states


def states(c: Expressions, group: int, unsized: list[Unsized]) -> tuple[Field, ...]:
    """The declared states without wrong ones, which become broken names. Parts of declarations
    that need data, which encode may explain, are added to `unsized`."""
    sizes = _sizes(c) if any(item.second for item in c.spec.state) else {}
    made = [_state(c, item, group, sizes, unsized) for item in c.spec.state]
    c.broken |= {item.name for item, one in zip(c.spec.state, made, strict=True) if one is None}
    return tuple(state for state in made if state is not None)


def _state(
    c: Expressions, item: Declared, group: int, sizes: Mapping[str, Expr], unsized: list[Unsized]
) -> Field | None:
    if item.second is not None and item.base == "float32":
        unknown = {b.name for b in c.spec.encode} - set(sizes)
        for tree in (item.dim, item.second):
            if tree is not None and (taken := names(tree) & unknown):
                unsized.append((tree.span, taken))
                return None
        dims = _dims(c, item, sizes)
        return None if dims is None else Field(item.name, "float32", 32, "matrix", dims=dims)
    per_element = isinstance(item.dim, Name) and item.dim.name == "n"
    half = item.base in HALVES and per_element
    if not half and not (item.base == "float32" and (item.dim is None or per_element)):
        message = f"state {item.name!r} is float32, float32[n] or float32[rows, columns]"
        hint = "bfloat16[n] and float16[n] keep 16 bits per element"
        c.problems.add(item.span, message, hint)
        return None
    if group and not per_element:
        c.problems.add(item.span, "a grouped spec keeps states per element", "float32[n]")
        return None
    return Field(item.name, item.base, 32, "n" if per_element else "scalar")


def _sizes(c: Expressions) -> dict[str, Expr]:
    """Names that sizes of states may use: values that encode computes from n and parameters."""
    quiet = Expressions(c.spec, c.params, Problems("", most=math.inf), c.pool)
    env = quiet.globals()
    for b in c.spec.encode:
        if names(b.value) <= set(env):
            value = quiet.expr(b.value, env, b.name)
            if value is not ERROR and quiet.constant_of_params(value):
                env[b.name] = value
    return env


def sized_by_data(c: Expressions, unsized: list[Unsized], env: Mapping[str, Expr]) -> None:
    """Refuse states whose size depends on data, unless a mistake in encode explains it: without one
    a wrong size depends on the state itself."""
    mistaken = bool(c.problems.found)
    for span, taken in unsized:
        if not (mistaken and any(c.excused(name) or env.get(name) is ERROR for name in taken)):
            c.problems.add(span, matrices.WHOLE_SIZES, f"{min(taken)!r} depends on data")


def _dims(c: Expressions, item: Declared, env: Mapping[str, Expr]) -> tuple[Expr, ...] | None:
    """The rows and columns that a declaration gives to a matrix."""
    found = []
    for tree in (item.dim, item.second):
        value = ERROR if tree is None else c.expr(tree, env, "")
        if tree is None or value is ERROR:
            return None
        try:
            found.append(matrices.dimension(c.settled(value)))
        except RuleError as error:
            c.problems.add(tree.span, str(error), error.hint)
    return tuple(found) if len(found) == 2 else None


def updates(c: Expressions, states: tuple[Field, ...], env: Mapping[str, Expr]) -> dict[str, Expr]:
    """The new values of states, of which each has one."""
    known = {s.name: s for s in states}
    c.rules.encoding = True
    named, meant = {b.name for b in c.spec.update}, set[str]()
    computed = {b.name for b in c.spec.encode} - {s.name for s in c.spec.state} - c.spec.broken
    for b in c.spec.update:
        if b.name not in known and (b.name in computed or not c.excused(b.name)):
            hint = nearest(b.name, known) or "states are declared in `state:`"
            c.problems.add(b.span, f"{b.name!r} is no state", hint)
            meant.add(closest(b.name, known) or "")
    for name in known:
        if name not in named | meant and not c.excused(name):
            span = c.spec.spans.get("update", c.spec.spans.get("state", Span()))
            hint = f"add `update: {{{name}: ...}}`"
            c.problems.add(span, f"state {name!r} is never updated", hint)
    pairs = [(b, c.expr(b.value, env, b.name)) for b in c.spec.update]
    return {
        b.name: _fitted(c, b.value, known[b.name], e)
        for b, e in pairs
        if e is not ERROR and b.name in known
    }


def owed(c: Expressions, states: tuple[Field, ...]) -> tuple[Field, ...]:
    """The states, with the gradient that they hold back by `owed:`."""
    known = {s.name for s in states if s.shape == "n"}
    factors = dict.fromkeys(known, 0.0)
    for b in c.spec.owed:
        if b.name not in known and not c.excused(b.name):
            hint = nearest(b.name, known) or "like `state: {sum: float32[n]}`"
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
        return c.rules.lift(_floats(c, value), state.shape)
    elif level == "n":
        hint = f"declare it as {state.storage}[n]"
    c.problems.add(syntax.span, f"state {state.name!r} cannot hold {value.type}", hint)
    return ERROR


def _floats(c: Expressions, value: Expr) -> Expr:
    """A state's value as floats. A `where` on selected elements stays outermost."""
    if value.op == "where" and value.args[0].op == "in":
        condition, *either = value.args
        value = c.rules.where("where", (condition, *(c.rules.number(a, "float") for a in either)))
    return c.rules.number(value, "float")


# payload fields


def payload(c: Expressions, env: Mapping[str, Expr], group: int) -> tuple[Field, ...]:
    """The fields whose declaration and value fit."""
    made = [_field(c, item, env, group) for item in c.spec.payload]
    return tuple(field for field in made if field is not None)


def _field(c: Expressions, item: Declared, env: Mapping[str, Expr], group: int) -> Field | None:
    storage, bits = _storage(c, item)
    expr = env.get(item.name, ERROR)
    if item.name not in env and not c.excused(item.name):
        _undefined(c, item)
    if expr is ERROR:
        known = {p.name for p in c.spec.params}  # a table's length may be a parameter
        named = item.dim.name if isinstance(item.dim, Name) else ""
        if named and named not in known and env.get(named) is not ERROR:
            _length(c, item)
        return None
    if item.second is not None or expr.type.shape == "matrix":
        dims = _dims(c, item, env) if item.second is not None else None
        if item.second is not None and dims is None:
            return None
        added = item.name in {b.name for b in c.spec.rounds}
        return check_arrays.field(item, storage, bits, expr, dims, c.problems, added=added)
    shape, of = _dimension(c, item, expr, group)
    if expr.type.dtype in ("selection", "str"):
        message = f"{item.name!r} is a {expr.type.dtype}, not numbers"
        c.problems.add(item.span, message, "store indices(selection) and x[selection]")
        return None
    if shape == "" or not _holds(c, item, storage, bits, shape, expr):
        return None
    if (storage, bits) == ("uint", 8) and shape in ("scalar", "group"):
        storage = "byte"
    return Field(
        item.name, storage, bits, shape, of, _stored(c, c.rules.lift(expr, shape, of), storage)
    )


def _stored(c: Expressions, expr: Expr, storage: str) -> Expr:
    """The value that a type stores for an expression; feedback must know it."""
    if storage in ("trit", "runs"):
        return c.rules.trit(expr)
    if storage in check_arrays.FLOATS:
        return c.rules.number(expr, "float")
    held = STORAGES[storage].whole if storage in WHOLE and expr.op != "indices" else None
    if held is None:
        return expr
    low, high = held
    if storage in ("uint16", "byte") or expr.type.shape == "scalar":
        return c.rules.whole_number(expr, low, high)
    expr = c.rules.whole_element(expr)  # an int32, so uint32 has half its range
    if values(expr)[0] >= low:
        return expr
    return c.rules.arithmetic("max", (expr, c.pool.const(low)))


def _holds(c: Expressions, item: Declared, storage: str, bits: int, shape: str, expr: Expr) -> bool:
    """True if a type can hold values of this shape; else reports it."""
    if storage in PACKED and shape in ("scalar", "group") and (storage, bits) != ("uint", 8):
        each = " per group" * (shape == "group")
        written = f"{item.base}[...]" if item.bits is not None else item.base
        message = f"{item.name!r} is one number{each}, and {written} holds elements"
        hint = (
            "use uint8, uint16, int32 or uint32 for a whole number, float32, float16, bfloat16 or "
            f"float8_e4m3 for another, or {written}[n] to repeat it for every element"
        )
    elif storage in POSITIONS and expr.op != "indices":
        message = f"{item.name!r}: {storage} holds the positions of a selection"
        hint = "store indices(selection)"
    elif storage not in ("trit", "runs", "huffman") or (
        shape == "n" and (storage == "trit" or not c.selections)
    ):
        return True
    else:
        what, hint = storage, "use trit[n], or uint2 for selected elements"
        if storage == "huffman":
            what, hint = "Huffman codes", "use uint[bits], of which a code has a fixed length"
        message = f"{item.name!r}: {storage} holds a value of every element"
        if shape == "n":
            message = f"{item.name!r}: {what} do not go together with selections"
    c.problems.add(item.span, message, hint)
    return False


def _undefined(c: Expressions, item: Declared) -> None:
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
    if item.base == "bool":
        return "uint", 1
    if item.base in ("float", "bfloat"):
        known = {16: f"{item.base}16", 32: "float32"}
        return _sized(c, item, known), 32
    if item.base in ("trit", "runs"):
        return item.base, 2
    if item.base == "huffman":
        return item.base, _bits(c, item, 8)
    if not item.base.startswith("uint") or item.base in WHOLE:
        return item.base, 32
    bits = int(item.base[4:]) if item.bits is None and item.base != "uint" else None
    return "uint", bits or _bits(c, item, 15)


def _bits(c: Expressions, item: Declared, most: int) -> int:
    """The bits in brackets, up to `most`, of a uint from 0 on; 8 in place of wrong ones."""
    value = None if item.bits is None else c.constant(item.bits)
    added = item.name in {b.name for b in c.spec.rounds}
    least = 0 if item.base == "uint" and item.second is None and not added else 1
    if isinstance(value, int | float) and value in range(least, most + 1):
        return int(value)
    if value is not None:
        c.problems.add(item.span, f"{item.base} has {least} to {most} bits, not {value}")
    return 8


def _sized(c: Expressions, item: Declared, known: Mapping[int, str]) -> str:
    """The storage for a width in brackets; float32 in place of a wrong one."""
    assert item.bits is not None
    value = c.constant(item.bits)
    storage = next((s for bits, s in known.items() if bits == value), None)
    if storage is None and value is not None:
        widths = " or ".join(map(str, known))
        c.problems.add(item.span, f"{item.base} has {widths} bits, not {value}")
    return storage or "float32"


def _dimension(c: Expressions, item: Declared, expr: Expr, group: int) -> tuple[str, str]:
    """The level that a declaration gives a field, checked against its expression; ("", "") if they
    do not fit."""
    if expr.type.shape == "table":
        return _table_dimension(c, item, expr)
    if item.dim is None and expr.type.shape == "scalar":
        return "scalar", ""
    if not _length(c, item):
        return "", ""
    name = item.dim.name if isinstance(item.dim, Name) else None
    declared = {None: ("group" if group else "scalar", ""), "n": ("n", ""), "groups": ("group", "")}
    shape, of = declared.get(name, ("kept", name or ""))
    level = expr.type.shape
    repeated = level in ("scalar", "group") and shape in ("n", "group")
    if (level, expr.type.of) == (shape, of) or level == "static" or repeated:
        return shape, of
    is_ = _named(level, expr.type.of)
    message = f"{item.name!r} is declared {_named(shape, of)} but is {is_}"
    hint = {"n": "write [n] after the type", "kept": f"write [{expr.type.of}] after the type"}
    c.problems.add(item.span, message, hint.get(level, ""))
    return "", ""


def _length(c: Expressions, item: Declared) -> bool:
    """True if a declaration has a known length or none; else reports it."""
    name = item.dim.name if isinstance(item.dim, Name) else None
    lengths = ["n", "groups", *c.selections]
    if item.dim is None or item.second is not None or name in lengths:
        return True
    if name is None:
        message = f"the length of {item.name!r} is no name"
        hint = f"{', '.join(lengths)}; a matrix has rows and columns, like float32[n, 1]"
    else:
        message, hint = f"{item.name!r} has an unknown length {name!r}", nearest(name, lengths)
    if not c.excused(name or ""):
        c.problems.add(item.dim.span, message, hint)
    return False


def _table_dimension(c: Expressions, item: Declared, expr: Expr) -> tuple[str, str]:
    """The level of a table, checked against its declared size."""
    if expr.op == "literal":
        hint = "decode knows it by its name"
        c.problems.add(item.span, f"{item.name!r} does not depend on data", hint)
        return "", ""
    size = c.constant(item.dim) if item.dim is not None else 1
    if item.base == "float32" and size == int(expr.type.of):
        return "table", expr.type.of
    if size is not None:
        message = f"{item.name!r} is a table of {expr.type.of} numbers"
        c.problems.add(item.span, message, f"write float32[{expr.type.of}] or its parameter")
    return "", ""


def _named(shape: str, of: str) -> str:
    words = {
        "n": "[n], one per element",
        "group": "[groups], one per group",
        "kept": f"[{of}], one per selected element",
        "sample": "a sample",
    }
    return words.get(shape, "one number")
