"""Tile programs as text, to read and to tell kernels apart."""

from __future__ import annotations

from compll.ir.expr import Expr
from compll.ir.module import Field
from compll.ir.storage import Storage
from compll.ir.tile import (
    ELEMENTS,
    Array,
    Call,
    Compact,
    Domain,
    Kernel,
    Op,
    Store,
    Value,
    When,
    order,
)

#: the unit that has one value of an array, by its domain
UNITS = {"scalar": "piece", "group": "tile", "n": "lane"}


def text(kernel: Kernel) -> str:
    """A kernel as text; kernels of equal text are equal."""
    lines = [f"kernel {kernel.name}, tiles of {kernel.tile}"]
    lines += [f"  state {_declared(a)}" for a in kernel.states]
    names: dict[int, str] = {}
    for number, static in enumerate(kernel.statics):
        lines.append(f"  static {number} = {static}")
    for dims, one in kernel.extents.items():
        lines += [*_known([one.size], names), f"  matrix {_sides(dims)}: {names[id(one.size)]}"]
    lines += [f"  sum over ranks {_declared(a)}" for a in kernel.sums]
    lines += [f"  array {_declared(a)}" for a in kernel.scratch]
    for name, count in kernel.counts.items():
        lines += [*_known([count], names), f"  elements of {name or 'g'}: {names[id(count)]}"]
    for a, start in kernel.starts.items():
        lines += [*_known([start], names), f"  {a.role} {_declared(a)} at {names[id(start)]}"]
    for step in kernel.steps:
        lines += [f"  {line}" for line in _step(step, names)]
    return "\n".join(lines) + "\n"


def _step(step: Op, names: dict[int, str]) -> list[str]:
    if isinstance(step, When):
        inner = [f"  {line}" for one in step.steps for line in _step(one, names)]
        known = _known([step.condition], names)
        return [*known, f"when {'not ' * (not step.wanted)}{names[id(step.condition)]}:", *inner]
    if isinstance(step, Call):
        return _call(step, names)
    if isinstance(step, Store):
        return [*_known([step.value], names), f"  {_store(step, names)}"]
    limits = [one.limit for one in step.compacts if one.limit is not None]
    over = f" of {_set(step.domain)}" * (step.domain != ELEMENTS)
    lines = [f"for each tile{over}:", *_known([*step.roots, *limits], names)]
    lines += [f"  {_store(s, names)}" for s in step.stores]
    return lines + [line for one in step.compacts for line in _compact(one, names)]


def _call(call: Call, names: dict[int, str]) -> list[str]:
    """Lines for a call: its inputs, and the arrays and values that it makes."""
    lines: list[str] = []
    parts = [call.attr.name if isinstance(call.attr, Field) else str(call.attr)]
    for view in call.views:
        matrix = [] if view.matrix is None else [view.matrix.rows, view.matrix.cols]
        lines += _known([view.value, *matrix], names)
        sides = " x ".join(names[id(v)] for v in matrix)
        how = " turned" * view.turned + " ended by zeros" * view.ends
        how += f" of {view.of}" * bool(view.of)
        parts.append(f"{names[id(view.value)]}{f' as {sides}' * bool(matrix)}{how}")
    given = [*call.numbers, *([call.matrix.rows, call.matrix.cols] if call.matrix else [])]
    lines += _known(given, names)
    parts += [names[id(v)] for v in given]
    for value in call.results:
        names.setdefault(id(value), f"%{len(names)}")
    made = [*(a.name for a in call.made), *(names[id(v)] for v in call.results)]
    left = f"{', '.join(made)} = " * bool(made)
    return [*lines, f"{left}{call.routine} {', '.join(parts)}"]


def _set(domain: Domain) -> str:
    """A selection, a table or a matrix."""
    if domain.kind == "matrix":
        return f"matrix {_sides(domain.dims)}"
    return f"a table of {domain.of}" if domain.kind == "table" else domain.of


def _sides(dims: tuple[Expr, ...]) -> str:
    return f"[{', '.join(map(str, dims))}]"


def _known(roots: list[Value], names: dict[int, str]) -> list[str]:
    """Lines for the values that `roots` need and that have no name yet."""
    lines = []
    for value in order(roots):
        if id(value) not in names:
            names[id(value)] = f"%{len(names)}"
            lines.append(f"  {_line(value, names)}")
    return lines


def _line(value: Value, names: dict[int, str]) -> str:
    what = value.attr.name if isinstance(value.attr, Array) else value.attr
    shown = [] if what is None else [str(what)]
    parts = ", ".join([*shown, *(names[id(a)] for a in value.args)])
    return f"{names[id(value)]} = {value.op} {parts}".rstrip() + f" : {value.kind} {value.level}"


def _compact(one: Compact, names: dict[int, str]) -> list[str]:
    conditions = [f"where {names[id(one.always)]}"] if one.always is not None else []
    if one.first is not None and one.limit is not None:
        conditions.append(f"the first {names[id(one.limit)]} where {names[id(one.first)]}")
    parts = ", ".join(f"{f.name} = {names[id(v)]}" for f, v in one.parts)
    return [f"  compact {one.selection} {', '.join(conditions)}: {parts}"]


def _store(store: Store, names: dict[int, str]) -> str:
    array = store.array
    verb = "pack" if store.packed else "add" if store.adds else "store"
    where = "if back: " if store.back else ""
    to = "" if store.place is None else f" at {names[id(store.place)]}"
    kind = "" if array.role == "gradient" else f" as {_type(array.storage)}"
    return f"{where}{verb} {array.role} {array.name}{to}, {names[id(store.value)]}{kind}"


def _declared(a: Array) -> str:
    per = UNITS.get(a.domain.kind) or f"lane of {_set(a.domain)}"
    return f"{a.name}: {_type(a.storage)} per {per}"


def _type(storage: Storage) -> str:
    return storage.name + str(storage.bits) * (storage.name in ("uint", "huffman"))
