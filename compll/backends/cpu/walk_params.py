"""Arrays, values of the piece and accumulators of a walk's function, by name."""

from __future__ import annotations

from dataclasses import dataclass

from compll.ir.module import Field
from compll.ir.tile import SCRATCH, Store, Value, Walk


@dataclass
class Arrays:
    """Parameters of a walk's function, by name. arrays: pointers to elements of the first tile."""

    arrays: list[str]
    pieces: list[Value]
    sums: list[Value]


def given(walk: Walk) -> Arrays:
    """The arrays, values of the piece and accumulators that a walk needs, as parameters."""
    found = walk.values
    names = [array_of(v) for v in found if v.op in ("load", "unpack") and v.level != "piece"]
    names += [f"at {array_of(v)}" for v in found if v.op == "at"]
    names += [store_name(s) for s in walk.stores]
    names += [how + v.attr.name for v in walk.spreads for how in ("spread ", "count spread ")]
    for one in walk.compacts:
        names += [f"kept {f.name}" for f, _ in one.parts] + [f"count {one.selection}"]
    pieces = [v for v in found if v.level == "piece" and v.op != "const"]
    return Arrays(list(dict.fromkeys(names)), pieces, list(dict.fromkeys(walk.folds)))


def signature_of(walk: Walk) -> str:
    """A text that is equal for walks that can share a function: only values of the piece differ."""
    names: dict[int, str] = {}
    lines = [f"of {bool(walk.of)}"]
    for v in walk.values:
        names[id(v)] = f"%{len(names)}"
        made = v.level == "piece" and v.op != "const"
        attr = array_of(v) if isinstance(v.attr, Field) else v.attr
        parts = [] if made else [v.op, repr(attr), *(names[id(a)] for a in v.args)]
        lines.append(" ".join([v.kind, v.level, *parts]))
    for s in walk.stores:
        place = "" if s.place is None else names[id(s.place)]
        lines.append(f"{s.target} {s.name} {s.back} {names[id(s.value)]} {place}")
    for one in walk.compacts:
        found = [str(v and names[id(v)]) for v in (one.always, one.first)]
        parts = [f"{f.name} {names[id(v)]}" for f, v in one.parts]
        lines.append(" ".join([one.selection, *found, *parts]))
    return "\n".join([*lines, *(names[id(f)] for f in walk.folds)])


def array_of(v: Value) -> str:
    """The array that a load reads: the gradient, a state, or an incoming payload's field."""
    if v.attr == "g":
        return "g"
    assert isinstance(v.attr, Field)
    if v.attr.shape in ("kept", SCRATCH) and v.attr.expr is None:
        return f"{v.attr.shape} {v.attr.name}"
    return f"state {v.attr.name}" if v.attr.expr is None else f"in {v.attr.name}"


def store_name(s: Store) -> str:
    """The array that a store writes."""
    own = {"state": "state", "payload": "out", SCRATCH: SCRATCH, "kept": "kept"}
    prefix = own.get(s.target)
    return "at " * s.placed + (f"{prefix} {s.name}" if prefix else "g")


def trit_arrays(walk: Walk) -> tuple[list[str], list[str]]:
    """Arrays of trits that a walk reads, and arrays of trits that it writes."""
    read = [v for v in walk.values if v.op == "unpack" and v.attr.trits]
    written = [s for s in walk.stores if s.packed and s.field and s.field.trits]
    return list(map(array_of, read)), list(map(store_name, written))


def streamed(walk: Walk) -> list[Store]:
    """Stores of floats per lane to arrays that the walk does not read: these may bypass the
    cache."""
    read = {array_of(v) for v in walk.values if v.op == "load" and v.level == "lane"}
    return [
        s
        for s in walk.stores
        if not walk.of and s.target in ("gradient", "payload") and not s.packed
        and s.value.level == "lane" and store_name(s) not in read
    ]  # fmt: skip
