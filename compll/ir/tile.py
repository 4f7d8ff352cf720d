"""Tile programs: what a backend prints as machine code. See docs/tile-ir.md.

A kernel works on pieces of a gradient, a piece on its tiles: TILE elements, or a group. Values are
instructions without side effects; their level says how often they change: once per `lane` (element
of a tile), per `tile`, or per `piece`. What a walk over the tiles leaves behind are its stores.
Lanes beyond the end of a last, shorter tile read zeros, take no part in folds and are not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from compll.ir.expr import Expr
from compll.ir.module import Field, Module

LEVELS = ("piece", "tile", "lane")
#: what a field or state has a value for, by its shape
PER = {"scalar": "piece", "group": "tile", "n": "lane", "kept": "selected lane"}
#: shape of an array of a kernel's own that has room for every lane
SCRATCH = "scratch"


class NotLowered(Exception):
    """A spec has what tile programs do not have yet; the message says what."""


@dataclass(frozen=True, eq=False)
class Value:
    """An instruction and what it gives. kind: f32, i32, bool, f64 or i64. level: see LEVELS.

    attr: a constant, a number (of a draw, a static), or the Field or array that it reads.
    """

    op: str
    args: tuple[Value, ...]
    kind: str
    level: str
    attr: Any = None


@dataclass(frozen=True)
class Store:
    """A value that leaves. target: payload | state | gradient | scratch.

    A state takes up no NaN or infinity. back: only where the caller wants the gradient decoded.
    place: of a scattered value, the element that it goes to.
    """

    target: str
    field: Field | None
    value: Value
    back: bool = False
    place: Value | None = None

    @property
    def name(self) -> str:
        """Of the payload field or state; "g"."""
        return self.field.name if self.field is not None else "g"

    @property
    def in_place(self) -> bool:
        """Whether it overwrites what later loads would read."""
        return self.target not in ("payload", SCRATCH)

    @property
    def packed(self) -> bool:
        """Whether several lanes go into one byte."""
        return not self.in_place and self.field is not None and self.field.packed


@dataclass
class Compact:
    """Lanes that a walk appends to arrays, in order: all for which `always` holds, and the first
    `limit` for which `first` does. parts: the arrays, and what goes there.
    """

    selection: str
    parts: list[tuple[Field, Value]]
    always: Value | None = None
    first: Value | None = None
    limit: Value | None = None

    @property
    def roots(self) -> list[Value]:
        """The lanes' values that it needs."""
        conditions = [v for v in (self.always, self.first) if v is not None]
        return conditions + [v for _, v in self.parts]


@dataclass
class Walk:
    """A loop over the tiles of a piece, or of the elements of a selection (`of`).

    folds: those that are totalled over all tiles.
    """

    stores: list[Store] = field(default_factory=list)
    folds: list[Value] = field(default_factory=list)
    compact: Compact | None = None
    of: str = ""

    @property
    def roots(self) -> list[Value]:
        """All that it computes."""
        compacted = self.compact.roots if self.compact else []
        places = [s.place for s in self.stores if s.place is not None]
        return [*self.folds, *compacted, *places, *(s.value for s in self.stores)]

    @property
    def values(self) -> list[Value]:
        """What it computes, arguments first, and the piece's values that this needs."""
        return list(order_inside(self.roots))


@dataclass
class KthLargest:
    """Finds the k-th largest order key of all lanes, and how many are larger.

    walk: compacts the keys that are at least `least`, which the step chooses; found, larger: the
    values of the piece that it makes.
    """

    walk: Walk
    k: Value
    least: Value
    found: Value
    larger: Value


@dataclass(frozen=True)
class Stream:
    """Values of varying length: an encode stores the array in the field, others load it."""

    field: Field
    array: Field


@dataclass
class Kernel:
    """encode, decode or check. steps: walks, in order; searches and stores of the piece between.

    statics: what the host computes for each piece; bad: the total that tells whether the gradient
    was finite, which the status byte says, of a check whether an index is not;
    limits: the most elements of each selection; adds: whether decode adds to what is there.
    """

    name: str
    module: Module
    tile: int
    steps: list[Walk | Store | KthLargest | Stream] = field(default_factory=list)
    statics: list[Expr] = field(default_factory=list)
    states: list[Field] = field(default_factory=list)
    bad: Value | None = None
    limits: dict[str, Value] = field(default_factory=dict)
    adds: bool = False

    @property
    def walks(self) -> list[Walk]:
        """The walks alone."""
        found = [s.walk if isinstance(s, KthLargest) else s for s in self.steps]
        return [s for s in found if isinstance(s, Walk)]

    @property
    def scratch(self) -> list[Field]:
        """Its own arrays: what selected elements are put together in, and what streams hold."""
        found = [f for w in self.walks if w.compact is not None for f, _ in w.compact.parts]
        found += [s.field for w in self.walks for s in w.stores if s.target == SCRATCH and s.field]
        found += [s.array for s in self.steps if isinstance(s, Stream)]
        return list({f.name: f for f in found}.values())


def order(
    roots: Iterable[Value], into: Callable[[Value], bool] = lambda v: True
) -> Iterator[Value]:
    """Every value that the roots need, once, arguments first; those of values `into` holds for."""
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        value, ready = stack.pop()
        if ready:
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            stack.append((value, True))
            stack.extend((a, False) for a in reversed(value.args if into(value) else ()))


def order_inside(roots: Iterable[Value]) -> Iterator[Value]:
    """order, but not what the piece's values are made of: a total's fold is an earlier walk's."""
    return order(roots, into=lambda v: v.level != "piece")


def text(kernel: Kernel) -> str:
    """A kernel to read, and to tell kernels apart by."""
    lines = [f"kernel {kernel.name}, tiles of {kernel.tile}"]
    status = ["status"] * kernel.module.status
    lines.append(f"  payload {', '.join([*map(_declared, kernel.module.fields), *status])}")
    lines += [f"  state {_declared(s)}" for s in kernel.states]
    names: dict[int, str] = {}
    for number, static in enumerate(kernel.statics):
        lines.append(f"  static {number} = {static}")
    for step in kernel.steps:
        if isinstance(step, Stream):
            lines.append(f"  stream {step.field.name}, {step.array.name} as {step.field.storage}")
            continue
        inner = step.walk if isinstance(step, KthLargest) else step
        stores = inner.stores if isinstance(inner, Walk) else [inner]
        roots = inner.roots if isinstance(inner, Walk) else [inner.value]
        if isinstance(inner, Walk):
            lines.append(f"  for each tile{f' of {inner.of}' * bool(inner.of)}:")
        for value in order(roots):
            if id(value) not in names:
                names[id(value)] = f"%{len(names)}"
                # what is known before the walk stands where it is first needed
                lines.append(f"    {_line(value, names)}")
        lines += [f"    {_store(s, names)}" for s in stores]
        if isinstance(inner, Walk) and inner.compact is not None:
            lines += _compact(inner.compact, names)
        if isinstance(step, KthLargest):
            names |= {id(step.found): f"%{len(names)}", id(step.larger): f"%{len(names) + 1}"}
            found = f"{names[id(step.found)]}, {names[id(step.larger)]}"
            lines.append(f"  {found} = kth largest of them, k = {_scalar(step.k)}")
    if kernel.bad is not None:
        lines.append(f"  status {names.get(id(kernel.bad.args[0]), '')} not finite")
    return "\n".join(lines) + "\n"


def _line(value: Value, names: dict[int, str]) -> str:
    what = value.attr.name if isinstance(value.attr, Field) else value.attr
    shown = [] if what is None else [str(what)]
    parts = ", ".join([*shown, *(names[id(a)] for a in value.args)])
    return f"{names[id(value)]} = {value.op} {parts}".rstrip() + f" : {value.kind} {value.level}"


def _scalar(value: Value) -> str:
    return f"{value.op} {value.attr}" if not value.args else value.op


def _compact(one: Compact, names: dict[int, str]) -> list[str]:
    conditions = [f"where {names[id(one.always)]}"] if one.always is not None else []
    if one.first is not None and one.limit is not None:
        conditions.append(f"the first {_scalar(one.limit)} where {names[id(one.first)]}")
    parts = ", ".join(f"{f.name} = {names[id(v)]}" for f, v in one.parts)
    return [f"    compact {one.selection} {', '.join(conditions)}: {parts}"]


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
