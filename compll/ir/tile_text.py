"""Tile programs as text, to read and to tell kernels apart."""

from __future__ import annotations

from compll.ir.module import Field
from compll.ir.tile import (
    Ascending,
    Call,
    Compact,
    Kernel,
    Op,
    Search,
    Store,
    Stream,
    Value,
    When,
    order,
    walk_of,
)

#: the unit that has one value of a field or state, by its shape
PER = {"scalar": "piece", "table": "piece", "group": "tile", "n": "lane", "kept": "selected lane",
       "matrix": "element"}  # fmt: skip


def text(kernel: Kernel) -> str:
    """A kernel as text; kernels of equal text are equal."""
    lines = [f"kernel {kernel.name}, tiles of {kernel.tile}"]
    status = ["status"] * kernel.module.status
    lines.append(f"  payload {', '.join([*map(_declared, kernel.module.fields), *status])}")
    lines += [f"  state {_declared(s)}" for s in kernel.states]
    names: dict[int, str] = {}
    for number, static in enumerate(kernel.statics):
        lines.append(f"  static {number} = {static}")
    for name, one in kernel.sizes.items():
        lines += [*_known([one.size], names), f"  size {name}: {names[id(one.size)]}"]
    lines += [f"  sum over ranks {_declared(f)}" for f in kernel.added]
    lines += [f"  array {f.name}: {f.storage} {_of(f)}" for f in kernel.own]
    for name, limit in kernel.limits.items():
        lines += _known([limit], names)
        lines.append(f"  limit {name}: {names[id(limit)]}")
    for step in kernel.steps:
        lines += [f"  {line}" for line in _step(step, names)]
    return "\n".join(lines) + "\n"


def _step(step: Op, names: dict[int, str]) -> list[str]:
    if isinstance(step, Stream):
        return [f"stream {step.field.name}, {step.array.name} as {step.field.storage}"]
    if isinstance(step, Ascending):
        return [f"ascending {step.field.name}"]
    if isinstance(step, When):
        inner = [f"  {line}" for one in step.steps for line in _step(one, names)]
        known = _known([step.condition], names)
        return [*known, f"when {'not ' * (not step.wanted)}{names[id(step.condition)]}:", *inner]
    if isinstance(step, Call):
        return _call(step, names)
    if isinstance(step, Store):
        return [*_known([step.value], names), f"  {_store(step, names)}"]
    walk = walk_of(step)
    assert walk is not None
    limits = [one.limit for one in walk.compacts if one.limit is not None]
    roots = [*walk.roots, *limits, *(step.numbers if isinstance(step, Search) else ())]
    size, over = [], f" of {walk.of}" * bool(walk.of)
    if walk.matrix is not None:
        size = _known([walk.matrix.size], names)
        over = f" of a matrix, {names[id(walk.matrix.size)]}"
    lines = [*size, f"for each tile{over}:", *_known(roots, names)]
    lines += [f"  {_store(s, names)}" for s in walk.stores]
    lines += [line for one in walk.compacts for line in _compact(one, names)]
    return lines + _searched(step, names)


def _call(call: Call, names: dict[int, str]) -> list[str]:
    """Lines for a call: its inputs, and the arrays that it makes."""
    lines, parts = [], []
    for view in call.views:
        matrix = [] if view.matrix is None else [view.matrix.rows, view.matrix.cols]
        lines += _known([view.value, *matrix], names)
        sides = " x ".join(names[id(v)] for v in matrix)
        how = " turned" * view.turned + " ended by zeros" * view.ends
        parts.append(f"{names[id(view.value)]}{f' as {sides}' * bool(matrix)}{how}")
    given = [*call.numbers, *([call.matrix.rows, call.matrix.cols] if call.matrix else [])]
    lines += _known(given, names)
    parts += [names[id(v)] for v in given]
    made = ", ".join(f.name for f in call.made)
    return [*lines, f"{made} = {call.routine} {call.attr}, {', '.join(parts)}"]


def _of(f: Field) -> str:
    """The unit that has an element of the array."""
    return f"[{', '.join(map(str, f.dims))}]" if f.dims else f"per {f.of or 'lane'}"


def _known(roots: list[Value], names: dict[int, str]) -> list[str]:
    """Lines for the values that `roots` need and that have no name yet."""
    lines = []
    for value in order(roots):
        if id(value) not in names:
            names[id(value)] = f"%{len(names)}"
            lines.append(f"  {_line(value, names)}")
    return lines


def _searched(step: Op, names: dict[int, str]) -> list[str]:
    """A line for the results of a search."""
    if not isinstance(step, Search):
        return []
    for value in step.made:
        names[id(value)] = f"%{len(names)}"
    how = step.how.replace("_", " ") + " of a sample" * (step.sample is not None)
    given = ", ".join([*(names[id(v)] for v in step.numbers), *[str(step.attr)] * bool(step.attr)])
    return [f"{', '.join(names[id(v)] for v in step.made)} = {how}, {given}"]


def _line(value: Value, names: dict[int, str]) -> str:
    what = value.attr.name if isinstance(value.attr, Field) else value.attr
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
    kind = "" if store.field is None else f" as {_type(store.field)}"
    verb = "pack" if store.packed else "store"
    where = "if back: " if store.back else ""
    to = "" if store.place is None else f" at {names[id(store.place)]}"
    return f"{where}{verb} {store.target} {store.name}{to}, {names[id(store.value)]}{kind}"


def _declared(f: Field) -> str:
    return f"{f.name}: {_type(f)} per {PER[f.shape]}"


def _type(f: Field) -> str:
    return f"{f.storage}{f.bits}" if f.packed and not f.trits else f.storage
