"""Tile programs: what a backend prints as machine code. See docs/tile-ir.md.

A kernel works on pieces of a gradient, a piece on its tiles: TILE elements, or a group. Values are
instructions without side effects; their level says how often they change: once per `lane` (element
of a tile), per `tile`, or per `piece`. What a walk over the tiles leaves behind are its stores.
Lanes beyond the end of a last, shorter tile read zeros, take no part in folds and are not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from compll.ir.expr import Expr
from compll.ir.module import Field, Module

LEVELS = ("piece", "tile", "lane")
#: what a field or state has a value for, by its shape
PER = {"scalar": "piece", "group": "tile", "n": "lane"}


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
    """A value that leaves. target: payload | state | gradient.

    A state takes up no NaN or infinity. back: only where the caller wants the gradient decoded.
    """

    target: str
    field: Field | None
    value: Value
    back: bool = False

    @property
    def name(self) -> str:
        """Of the payload field or state; "g"."""
        return self.field.name if self.field is not None else "g"

    @property
    def in_place(self) -> bool:
        """Whether it overwrites what later loads would read."""
        return self.target != "payload"

    @property
    def packed(self) -> bool:
        """Whether several lanes go into one byte."""
        return self.target == "payload" and self.field is not None and self.field.packed


@dataclass
class Walk:
    """A loop over the tiles of a piece. folds: those that are totalled over all tiles."""

    stores: list[Store] = field(default_factory=list)
    folds: list[Value] = field(default_factory=list)


@dataclass
class Kernel:
    """encode or decode. steps: walks, in order, and stores of one value per piece between them.

    statics: what the host computes for each piece; bad: the total that tells whether the gradient
    was finite, which the status byte says; adds: whether decode adds to what is there.
    """

    name: str
    module: Module
    tile: int
    steps: list[Walk | Store] = field(default_factory=list)
    statics: list[Expr] = field(default_factory=list)
    states: list[Field] = field(default_factory=list)
    bad: Value | None = None
    adds: bool = False

    @property
    def walks(self) -> list[Walk]:
        """The walks alone."""
        return [s for s in self.steps if isinstance(s, Walk)]


def order(roots: Iterable[Value]) -> Iterator[Value]:
    """Every value that the roots need, once, arguments first."""
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        value, ready = stack.pop()
        if ready:
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            stack.append((value, True))
            stack.extend((a, False) for a in reversed(value.args))


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
        walk = isinstance(step, Walk)
        lines += ["  for each tile:"] if walk else []
        stores = step.stores if isinstance(step, Walk) else [step]
        folds = step.folds if isinstance(step, Walk) else []
        for value in order([s.value for s in stores] + folds):
            if id(value) not in names:
                names[id(value)] = f"%{len(names)}"
                # what is known before the walk stands where it is first needed
                lines.append(f"    {_line(value, names)}")
        lines += [f"    {_store(s, names)}" for s in stores]
    if kernel.bad is not None:
        lines.append(f"  status {names.get(id(kernel.bad.args[0]), '')} not finite")
    return "\n".join(lines) + "\n"


def _line(value: Value, names: dict[int, str]) -> str:
    what = value.attr.name if isinstance(value.attr, Field) else value.attr
    shown = [] if what is None else [str(what)]
    parts = ", ".join([*shown, *(names[id(a)] for a in value.args)])
    return f"{names[id(value)]} = {value.op} {parts}".rstrip() + f" : {value.kind} {value.level}"


def _store(store: Store, names: dict[int, str]) -> str:
    kind = "" if store.field is None else f" as {_type(store.field)}"
    verb = "pack" if store.packed else "store"
    where = "if back: " if store.back else ""
    return f"{where}{verb} {store.target} {store.name}, {names[id(store.value)]}{kind}"


def _declared(f: Field) -> str:
    return f"{f.name}: {_type(f)} per {PER[f.shape]}"


def _type(f: Field) -> str:
    return f"{f.storage}{f.bits}" if f.packed else f.storage
