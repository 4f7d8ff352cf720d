"""Tile programs, which a backend prints as machine code. See docs/how/tile-ir.md.

A kernel works on pieces of a gradient, and on the tiles of a piece: TILE elements, or a group.
Values are instructions without side effects. Their level says how often they change: once per
`element`, per `tile`, or per `piece`. A walk over the tiles leaves stores behind. Elements beyond
the end of a last, shorter tile read zeros, take no part in folds and are not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from compll.ir.expr import Expr
from compll.ir.module import Field, Module
from compll.ir.storage import FLOAT32, INT32, VARYING, WITH_BITS, Storage

LEVELS = ("piece", "tile", "element")
#: instructions for sizes that steps make: elements of a selection, bytes of a field
SIZES = ("counted", "length")
#: roles of arrays. gradient: what an encode reads and a decode writes, also float16; payload: a
#: field, number of the header or status byte that the kernel stores; incoming: a field or status
#: byte that it is given; sum: a field's sum over the ranks; scratch: the kernel's own; wrong, used:
#: see WRONG and USED
Role = Literal["gradient", "state", "payload", "incoming", "sum", "scratch", "wrong", "used"]
#: kinds of kernels. hop: an encode of the gradient plus an incoming payload; cut: one whose filters
#: keep at most a given number of elements; round: one that stores a single field, given the sums of
#: earlier rounds; rounds: the decode of all sums, with states; set and add: decodes; check: of an
#: incoming payload, before a decode
Kind = Literal["encode", "hop", "cut", "round", "rounds", "set", "add", "check"]


@dataclass(frozen=True)
class Domain:
    """The items that an array has a value for each of, or that a walk runs over.

    kind: scalar (one), table (`of` numbers), group (tiles), n (elements), kept (elements of the
    selection `of`) or matrix (of `dims`: rows and columns).
    """

    kind: str
    of: str = ""
    dims: tuple[Expr, ...] = ()

    @staticmethod
    def matrix(dims: tuple[Expr, ...]) -> Domain:
        """The elements of a matrix."""
        return Domain("matrix", dims=dims)


ELEMENTS = Domain("n")


@dataclass(frozen=True)
class Array:
    """Memory of a piece: a value of the storage type for each item of the domain."""

    name: str
    role: Role
    storage: Storage = FLOAT32
    domain: Domain = ELEMENTS

    @staticmethod
    def of(f: Field, role: Role) -> Array:
        """The array of a payload field or state."""
        return Array(f.name, role, f.layout, Domain(f.shape, f.of, f.dims))

    @property
    def received(self) -> bool:
        """True if it is read from a payload, where it may start at any byte."""
        return self.role in ("incoming", "sum")


GRADIENT = Array("g", "gradient")
#: where a check stores a number that is not 0 for a payload that is no payload
WRONG = Array("wrong", "wrong", INT32, Domain("scalar"))
#: where an encode stores the payload's bytes
USED = Array("used", "used", Storage("int64", 64), Domain("scalar"))


@dataclass(frozen=True, eq=False)
class Value:
    """An instruction and its result. kind: f32, i32, bool, f64 or i64. level: see LEVELS.

    attr: a constant, a number (of a draw, a static), or the Array that it reads.
    """

    op: str
    args: tuple[Value, ...]
    kind: str
    level: str
    attr: Any = None


@dataclass(frozen=True)
class Store:
    """A value that is written to an array.

    A state ignores NaN and infinity. back: store only if the caller wants the gradient decoded.
    place: for a scattered value, its element, which `adds` adds it to. A number of the piece that
    is stored in the gradient fills it.
    """

    array: Array
    value: Value
    back: bool = False
    place: Value | None = None
    adds: bool = False

    @property
    def in_place(self) -> bool:
        """True if it overwrites memory that later loads read."""
        return self.array.role in ("state", "gradient")

    @property
    def packed(self) -> bool:
        """True if several elements share a byte."""
        return self.array.storage.packed


@dataclass(frozen=True)
class Extents:
    """Rows and columns of a matrix, both as functions of n and as values of the piece."""

    dims: tuple[Expr, ...]
    rows: Value
    cols: Value
    size: Value


@dataclass
class Compact:
    """Elements that a walk appends to arrays, in order: all for which `always` holds, and the first
    `limit` for which `first` does. parts: the arrays, and the values appended to each."""

    selection: str
    parts: list[tuple[Array, Value]]
    always: Value | None = None
    first: Value | None = None
    limit: Value | None = None

    @property
    def roots(self) -> list[Value]:
        """Values per element that it needs."""
        conditions = [v for v in (self.always, self.first) if v is not None]
        return conditions + [v for _, v in self.parts]


@dataclass(eq=False)
class Walk:
    """A loop over the tiles of a domain: the elements of a piece, of a selection or of a matrix.

    folds: values that are totalled over all tiles. product: a short product of which the walk
    computes elements as it reads them, so its array is none of the kernel's. Random draws of a
    matrix are numbered from its own first element.
    """

    stores: list[Store] = field(default_factory=list)
    folds: list[Value] = field(default_factory=list)
    compacts: list[Compact] = field(default_factory=list)
    domain: Domain = ELEMENTS
    product: Call | None = None

    @property
    def roots(self) -> list[Value]:
        """Values that it computes for its stores, folds and selections."""
        compacted = [v for compact in self.compacts for v in compact.roots]
        places = [s.place for s in self.stores if s.place is not None]
        return [*self.folds, *compacted, *places, *(s.value for s in self.stores)]

    @property
    def spreads(self) -> list[Value]:
        """Values whose elements take the next element of an array if a condition holds."""
        return [v for v in self.values if v.op == "spread"]

    @property
    def values(self) -> list[Value]:
        """Values that it computes, arguments first, and the piece's values that they need."""
        return list(order_inside(self.roots))


@dataclass
class When:
    """Steps that run if a condition equals `wanted`; else their results are 0."""

    condition: Value
    wanted: bool
    steps: list[Op]


@dataclass(frozen=True)
class View:
    """An array that a routine reads, in the order of its elements: loads, and values computed from
    them.

    matrix: its rows and columns; None: the elements of the piece, or of the selection `of`.
    turned: the matrix is stored by columns instead of rows. ends: elements are the piece's, and
    zeros fill the rest of the matrix.
    """

    value: Value
    matrix: Extents | None = None
    turned: bool = False
    ends: bool = False
    of: str = ""

    @property
    def domain(self) -> Domain:
        """The elements that it has in memory."""
        if self.of:
            return Domain("kept", self.of)
        return ELEMENTS if self.ends or self.matrix is None else Domain.matrix(self.matrix.dims)


@dataclass(frozen=True)
class Call:
    """A routine, which backends have by its name: one of SEARCHES, one of FIELDS, that of an
    operator that mixes elements, a "product" of matrices (float32 sums if `attr` is 1) or "drawn"
    positions of a selection.

    made: the arrays that it fills. results: the values of the piece that it computes. numbers:
    those that it takes. attr: a number or a payload field that is known when compiling.
    """

    routine: str
    views: tuple[View, ...] = ()
    made: tuple[Array, ...] = ()
    matrix: Extents | None = None
    numbers: tuple[Value, ...] = ()
    results: tuple[Value, ...] = ()
    attr: Any = 0


#: routines that search. kth_largest: the k-th largest order key of all elements, or of a sample of
#: as many as the second number says, and the number of larger ones; adjust, bisect: a threshold
#: that the wanted number of elements reaches, and their number; quantiles: the table of numbers
#: that divide the order keys into `attr` equal parts
SEARCHES = ("kth_largest", "adjust", "bisect", "quantiles")
#: routines of the payload field `attr`. Those of storages of varying length make the field of an
#: array, and its length, or an array of the field; ascending: a check that each position is inside
#: the tensor and above the one before
FIELDS = (*VARYING, "ascending")

Op = Walk | Store | Call | When


@dataclass
class Kernel:
    """A function over the pieces of a batch.

    steps: walks, in order; searches, routines and stores of the piece between them. statics:
    numbers that the host computes for each piece. counts: elements of each selection; "": of the
    piece. starts: of parts of payloads, in bytes. sizes: bytes of fields of varying length, and of
    the codes that they are made of. sums: given ones of fields over the ranks. scratch: its own
    arrays; those of streams come first in decodes, which find them where a check has left them.
    extents: of matrices, by their dimensions. matrices: those that hold the elements of a piece
    ("matrix"), that replace them ("flat"), and others (""). exprs: values that compute expressions
    of the spec, and these.
    """

    name: str
    kind: Kind
    module: Module
    tile: int
    steps: list[Op] = field(default_factory=list)
    statics: list[Expr] = field(default_factory=list)
    states: list[Array] = field(default_factory=list)
    counts: dict[str, Value] = field(default_factory=dict)
    starts: dict[Array, Value] = field(default_factory=dict)
    sizes: dict[Array, Value] = field(default_factory=dict)
    sums: list[Array] = field(default_factory=list)
    scratch: list[Array] = field(default_factory=list)
    extents: dict[tuple[Expr, ...], Extents] = field(default_factory=dict)
    matrices: dict[tuple[str, tuple[Expr, ...]], None] = field(default_factory=dict)
    exprs: dict[Value, Expr] = field(default_factory=dict)

    @property
    def decodes(self) -> bool:
        """True if it is given a payload and stores none."""
        return self.kind in ("set", "add", "check")

    @property
    def walks(self) -> list[Walk]:
        """All walks, including those within `When`."""
        return [s for s in flat(self.steps) if isinstance(s, Walk)]

    @property
    def writes_back(self) -> bool:
        """True if an encode can overwrite the gradient with its decoded values."""
        return any(s.back for w in self.walks for s in w.stores)


def flat(steps: Iterable[Op]) -> Iterator[Op]:
    """All steps, including those within `When`, and products within walks."""
    for step in steps:
        if isinstance(step, Walk) and step.product is not None:
            yield step.product
        yield step
        if isinstance(step, When):
            yield from flat(step.steps)


def order(
    roots: Iterable[Value], into: Callable[[Value], bool] = lambda v: True
) -> Iterator[Value]:
    """Every value that the roots need, once, arguments first. Values for which `into` is false hide
    their arguments."""
    seen: set[Value] = set()
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        value, ready = stack.pop()
        if ready:
            yield value
        elif value not in seen:
            seen.add(value)
            stack.append((value, True))
            stack.extend((a, False) for a in reversed(value.args if into(value) else ()))


def count_of(condition: Value) -> Value:
    """The number of elements of a tile for which a condition holds."""
    return Value("fold", (condition,), "i32", "tile", "count")


def order_inside(roots: Iterable[Value]) -> Iterator[Value]:
    """Values as `order` gives them, without the arguments of the piece's values: an earlier walk
    computed a total's fold."""
    return order(roots, into=lambda v: v.level != "piece")


# ---- tile text ----------------------------------------------------------------------------------
# Tile programs as text, to read and to tell kernels apart.

#: the unit that has one value of an array, by its domain
UNITS = {"scalar": "piece", "group": "tile", "n": "element"}


def text(kernel: Kernel) -> str:
    """A kernel as text; kernels of equal text are equal."""
    lines = [f"kernel {kernel.name}, tiles of {kernel.tile}"]
    lines += [f"  state {_declared(a)}" for a in kernel.states]
    names: dict[Value, str] = {}
    for number, static in enumerate(kernel.statics):
        lines.append(f"  static {number} = {static}")
    for dims, extents in kernel.extents.items():
        lines += [*_known([extents.size], names), f"  matrix {_sides(dims)}: {names[extents.size]}"]
    lines += [f"  sum over ranks {_declared(a)}" for a in kernel.sums]
    lines += [f"  array {_declared(a)}" for a in kernel.scratch]
    for name, count in kernel.counts.items():
        lines += [*_known([count], names), f"  elements of {name or 'g'}: {names[count]}"]
    for a, start in kernel.starts.items():
        lines += [*_known([start], names), f"  {a.role} {_declared(a)} at {names[start]}"]
    for step in kernel.steps:
        lines += [f"  {line}" for line in _step(step, names)]
    return "\n".join(lines) + "\n"


def _step(step: Op, names: dict[Value, str]) -> list[str]:
    if isinstance(step, When):
        inner = [f"  {line}" for compact in step.steps for line in _step(compact, names)]
        before = _known([step.condition], names)
        return [*before, f"when {'not ' * (not step.wanted)}{names[step.condition]}:", *inner]
    if isinstance(step, Call):
        return _call(step, names)
    if isinstance(step, Store):
        return [*_known([step.value], names), f"  {_store(step, names)}"]
    limits = [compact.limit for compact in step.compacts if compact.limit is not None]
    over = f" of {_set(step.domain)}" * (step.domain != ELEMENTS)
    lines = [f"for each tile{over}:"]
    if step.product is not None:
        *known, made = _call(step.product, names)
        lines += [*known, f"  {made}"]
    lines += _known([*step.roots, *limits], names)
    lines += [f"  {_store(s, names)}" for s in step.stores]
    return lines + [line for compact in step.compacts for line in _compact(compact, names)]


def _call(call: Call, names: dict[Value, str]) -> list[str]:
    """Lines for a call: its inputs, and the arrays and values that it makes."""
    lines: list[str] = []
    parts = [call.attr.name if isinstance(call.attr, Field) else str(call.attr)]
    for view in call.views:
        matrix = [] if view.matrix is None else [view.matrix.rows, view.matrix.cols]
        lines += _known([view.value, *matrix], names)
        sides = " x ".join(names[v] for v in matrix)
        how = " turned" * view.turned + " ended by zeros" * view.ends
        how += f" of {view.of}" * bool(view.of)
        parts.append(f"{names[view.value]}{f' as {sides}' * bool(matrix)}{how}")
    given = [*call.numbers, *([call.matrix.rows, call.matrix.cols] if call.matrix else [])]
    lines += _known(given, names)
    parts += [names[v] for v in given]
    for value in call.results:
        names.setdefault(value, f"%{len(names)}")
    made = [*(a.name for a in call.made), *(names[v] for v in call.results)]
    left = f"{', '.join(made)} = " * bool(made)
    return [*lines, f"{left}{call.routine} {', '.join(parts)}"]


def _set(domain: Domain) -> str:
    """A selection, a table or a matrix."""
    if domain.kind == "matrix":
        return f"matrix {_sides(domain.dims)}"
    return f"a table of {domain.of}" if domain.kind == "table" else domain.of


def _sides(dims: tuple[Expr, ...]) -> str:
    return f"[{', '.join(map(str, dims))}]"


def _known(roots: list[Value], names: dict[Value, str]) -> list[str]:
    """Lines for the values that `roots` need and that have no name yet."""
    lines = []
    for value in order(roots):
        if value not in names:
            names[value] = f"%{len(names)}"
            lines.append(f"  {_line(value, names)}")
    return lines


def _line(value: Value, names: dict[Value, str]) -> str:
    what = value.attr.name if isinstance(value.attr, Array) else value.attr
    shown = [] if what is None else [str(what)]
    parts = ", ".join([*shown, *(names[a] for a in value.args)])
    return f"{names[value]} = {value.op} {parts}".rstrip() + f" : {value.kind} {value.level}"


def _compact(compact: Compact, names: dict[Value, str]) -> list[str]:
    conditions = [f"where {names[compact.always]}"] if compact.always is not None else []
    if compact.first is not None and compact.limit is not None:
        conditions.append(f"the first {names[compact.limit]} where {names[compact.first]}")
    parts = ", ".join(f"{f.name} = {names[v]}" for f, v in compact.parts)
    return [f"  compact {compact.selection} {', '.join(conditions)}: {parts}"]


def _store(store: Store, names: dict[Value, str]) -> str:
    array = store.array
    verb = "pack" if store.packed else "add" if store.adds else "store"
    where = "if back: " if store.back else ""
    to = "" if store.place is None else f" at {names[store.place]}"
    kind = "" if array.role == "gradient" else f" as {_type(array.storage)}"
    return f"{where}{verb} {array.role} {array.name}{to}, {names[store.value]}{kind}"


def _declared(a: Array) -> str:
    per = UNITS.get(a.domain.kind) or f"element of {_set(a.domain)}"
    return f"{a.name}: {_type(a.storage)} per {per}"


def _type(storage: Storage) -> str:
    return storage.name + str(storage.bits) * (storage.name in WITH_BITS)
