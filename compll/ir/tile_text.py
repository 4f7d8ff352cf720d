"""Tile programs as text, to read and to tell kernels apart."""

from __future__ import annotations

from compll.ir.module import Field
from compll.ir.tile import (
    Ascending,
    Call,
    Compact,
    Kernel,
    KthLargest,
    Op,
    Quantiles,
    Store,
    Stream,
    ThresholdSearch,
    Value,
    When,
    made,
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
    if kernel.bad is not None:
        if kernel.bad.op != "total":
            lines += _known([kernel.bad], names)
        lines.append(f"  status {names.get(id(kernel.bad.args[0]), '')} not finite")
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
    roots = [*walk.roots, *limits, *_numbers(step)]
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


def _numbers(step: Op) -> list[Value]:
    """Numbers that a search takes besides its walk."""
    if isinstance(step, KthLargest):
        return [step.k] if step.sample is None else [step.k, step.sample]
    return step.given if isinstance(step, ThresholdSearch) else []


def _searched(step: Op, names: dict[int, str]) -> list[str]:
    """A line for the results of a search."""
    if isinstance(step, Quantiles):
        names[id(step.found)] = f"%{len(names)}"
        return [f"{names[id(step.found)]} = quantiles of them, {step.parts}"]
    if not isinstance(step, KthLargest | ThresholdSearch):
        return []
    for value in made(step):
        names[id(value)] = f"%{len(names)}"
    how = "kth largest" if isinstance(step, KthLargest) else step.how
    numbers = ", ".join(names[id(v)] for v in _numbers(step))
    sample = " of a sample" * (isinstance(step, KthLargest) and step.sample is not None)
    return [f"{', '.join(names[id(v)] for v in made(step))} = {how}{sample}, {numbers}"]


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
