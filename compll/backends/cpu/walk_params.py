"""Parameters of a walk's function: arrays, counts, values of the piece and accumulators."""

from __future__ import annotations

from dataclasses import dataclass

from compll.ir.tile import Array, Store, Value, Walk


@dataclass
class Params:
    """Parameters of a walk's function, in order.

    lanes: arrays with values of the walk's own items, as pointers to those of the first tile.
    whole: arrays of which any item may be read or stored. counts: selections, of which elements are
    counted, and arrays, of which elements are spread.
    """

    lanes: list[Array]
    whole: list[Array]
    counts: list[str | Array]
    sums: list[Value]
    pieces: list[Value]


def given(walk: Walk) -> Params:
    """The parameters of a walk's function."""
    found = walk.values
    lanes = [v.attr for v in found if v.op in ("load", "unpack") and v.level != "piece"]
    lanes += [s.array for s in walk.stores if s.place is None]
    whole = [v.attr for v in found if v.op in ("at", "spread")]
    whole += [s.array for s in walk.stores if s.place is not None]
    whole += [array for one in walk.compacts for array, _ in one.parts]
    counts = [*(v.attr for v in walk.spreads), *(one.selection for one in walk.compacts)]
    pieces = [v for v in found if v.level == "piece" and v.op != "const"]
    lanes, whole, counts, sums = (
        list(dict.fromkeys(each)) for each in (lanes, whole, counts, walk.folds)
    )
    return Params(lanes, whole, counts, sums, pieces)


def signature_of(walk: Walk) -> str:
    """A text that is equal for walks that can share a function: only values of the piece differ."""
    names: dict[int, str] = {}
    lines = [f"of {bool(walk.domain.of)}"]
    for v in walk.values:
        names[id(v)] = f"%{len(names)}"
        made = v.level == "piece" and v.op != "const"
        attr = f"{v.attr.role} {v.attr.name}" if isinstance(v.attr, Array) else repr(v.attr)
        parts = [] if made else [v.op, attr, *(names[id(a)] for a in v.args)]
        lines.append(" ".join([v.kind, v.level, *parts]))
    for s in walk.stores:
        place = "" if s.place is None else names[id(s.place)]
        lines.append(
            f"{s.array.role} {s.array.name} {s.back} {s.adds} {names[id(s.value)]} {place}"
        )
    for one in walk.compacts:
        found = [str(v and names[id(v)]) for v in (one.always, one.first)]
        parts = [f"{array.name} {names[id(v)]}" for array, v in one.parts]
        lines.append(" ".join([one.selection, *found, *parts]))
    return "\n".join([*lines, *(names[id(f)] for f in walk.folds)])


def streamed(walk: Walk) -> list[Store]:
    """Stores of floats per lane to arrays that the walk does not read: these may bypass the
    cache."""
    read = {v.attr for v in walk.values if v.op == "load" and v.level == "lane"}
    return [
        s
        for s in walk.stores
        if not walk.domain.of and s.array.role in ("gradient", "payload") and not s.packed
        and s.value.level == "lane" and s.place is None and s.array not in read
    ]  # fmt: skip
