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
#: shape of an array of a kernel's own that has room for every lane
SCRATCH = "scratch"
#: what the name of a payload field ends with that is a sum over the ranks
ALL = "__all"
#: and of one that has sums of lanes by an index of theirs
SUMS = "sums"


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
    """A value that leaves. target: payload | state | gradient | kept | scratch | sums.

    A state takes up no NaN or infinity. back: only where the caller wants the gradient decoded.
    place: of a scattered value, the element that it goes to, or the index by which it is summed.
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
        return self.target in ("state", "gradient", "scatter", "scatter_add")

    @property
    def placed(self) -> bool:
        """Whether each lane goes to a place of its own."""
        return self.place is not None and self.target != SUMS

    @property
    def packed(self) -> bool:
        """Whether several lanes go into one byte."""
        return not self.in_place and self.field is not None and self.field.packed


@dataclass(frozen=True)
class Extents:
    """Rows and columns of a matrix: as functions of n, and as values of the piece."""

    dims: tuple[Expr, ...]
    rows: Value
    cols: Value
    size: Value


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
    """A loop over the tiles of a piece, of the elements of a selection (`of`), or of a matrix.

    folds: those that are totalled over all tiles. Random draws of a matrix count from its own
    first element.
    """

    stores: list[Store] = field(default_factory=list)
    folds: list[Value] = field(default_factory=list)
    compacts: list[Compact] = field(default_factory=list)
    of: str = ""
    matrix: Extents | None = None

    @property
    def roots(self) -> list[Value]:
        """All that it computes."""
        compacted = [v for one in self.compacts for v in one.roots]
        places = [s.place for s in self.stores if s.place is not None]
        return [*self.folds, *compacted, *places, *(s.value for s in self.stores)]

    @property
    def spreads(self) -> list[Value]:
        """Lanes that take the next element of an array where a condition holds."""
        return [v for v in self.values if v.op == "spread"]

    @property
    def values(self) -> list[Value]:
        """What it computes, arguments first, and the piece's values that this needs."""
        return list(order_inside(self.roots))


@dataclass
class KthLargest:
    """Finds the k-th largest order key of all lanes or of a sample, and how many are larger.

    walk: compacts the keys that are at least `least`, which the step chooses; found, larger: the
    values of the piece that it makes. sample: how many elements are drawn; None: all are looked at.
    """

    walk: Walk
    k: Value
    least: Value
    found: Value
    larger: Value
    sample: Value | None = None

    @property
    def drawing(self) -> bool:
        """Whether an element's key depends on where it stands."""
        return any(v.op in ("draw", "position") for v in self.walk.values)

    @property
    def sampled(self) -> list[Field]:
        """The arrays that a sample is put together in: what keys are made of, or of all keys."""
        loads = [v.attr for v in self.walk.values if v.op == "load" and v.level == "lane"]
        names = [f"state {a.name}" if isinstance(a, Field) else "g" for a in loads]
        if self.drawing:
            names = ["keys"]
        return [Field(f"sample of {name}", "float32", 0, "kept") for name in dict.fromkeys(names)]


@dataclass
class ThresholdSearch:
    """`adjust` or `bisect`: thresholds are tried until as many lanes reach one as are wanted.

    walk: counts the lanes that reach each of `tries`, which the step chooses; given: the operator's
    numbers; found, count: the threshold that the step makes, and how many lanes reach it.
    """

    how: str
    walk: Walk
    given: list[Value]
    tries: list[Value]
    found: Value
    count: Value


@dataclass
class Quantiles:
    """The numbers that part all lanes' values into equal parts. walk: stores their order keys.

    arrays: where it stores them, and two more that are as long.
    """

    walk: Walk
    arrays: list[Field]
    found: Value
    parts: int


@dataclass
class Means:
    """What sums by index are on average."""

    sums: Field
    found: Value


@dataclass
class When:
    """Steps that are taken where a condition is `wanted`; elsewhere what they make is 0."""

    condition: Value
    wanted: bool
    steps: list[Step]


@dataclass(frozen=True)
class Stream:
    """Values of varying length: an encode stores the array in the field, others load it."""

    field: Field
    array: Field


@dataclass(frozen=True)
class Ascending:
    """A check of a payload's positions: each is in the tensor, and above the one before."""

    field: Field


@dataclass(frozen=True)
class View:
    """An array that a routine reads, in the order of its lanes: loads, and what is made of them.

    matrix: its rows and columns; None: the elements of the piece. turned: columns lie in memory as
    rows do in others. ends: the lanes are the piece's, and zeros follow to the end of the matrix.
    """

    value: Value
    matrix: Extents | None = None
    turned: bool = False
    ends: bool = False


@dataclass(frozen=True)
class Call:
    """A routine that mixes elements; see ROUTINES. made: the kernel's own arrays that it fills.

    numbers: values of the piece that it is given; attr: a number that is known when compiling.
    """

    routine: str
    views: tuple[View, ...]
    made: tuple[Field, ...]
    matrix: Extents | None = None
    numbers: tuple[Value, ...] = ()
    attr: int = 0


#: what calls compute. product: of two matrices, `attr` says whether sums are float32; columns are
#: those of top_columns, chosen ones those of a row of chances, by draw `attr`; drawn: the positions
#: of a selection that all ranks draw; spectrum: left vectors, singular values, right vectors
ROUTINES = (
    "product", "orthonormal", "hadamard", "row_max", "row_min", "top_columns", "place_columns",
    "sum_by", "chosen", "drawn", "spectrum",
)  # fmt: skip

Step = (
    Walk
    | Store
    | KthLargest
    | ThresholdSearch
    | Quantiles
    | Means
    | Stream
    | Ascending
    | When
    | Call
)


@dataclass
class Kernel:
    """encode, decode or check. steps: walks, in order; searches and stores of the piece between.

    statics: what the host computes for each piece; bad: the total that tells whether the gradient
    was finite, which the status byte says, of a check whether a payload's counts do not fit;
    limits: the most elements of each selection. added: fields of which it is given the sums over
    the ranks; own: arrays that steps leave for others; sizes: of payload fields that are matrices;
    rooms: matrices that must hold the elements of a piece ("matrix"), or that are taken for them
    ("flat"), and others ("").
    """

    name: str
    module: Module
    tile: int
    steps: list[Step] = field(default_factory=list)
    statics: list[Expr] = field(default_factory=list)
    states: list[Field] = field(default_factory=list)
    bad: Value | None = None
    limits: dict[str, Value] = field(default_factory=dict)
    added: list[Field] = field(default_factory=list)
    own: list[Field] = field(default_factory=list)
    sizes: dict[str, Extents] = field(default_factory=dict)
    rooms: dict[tuple[str, tuple[Expr, ...]], None] = field(default_factory=dict)

    @property
    def walks(self) -> list[Walk]:
        """The walks alone."""
        return [w for s in flat(self.steps) if (w := walk_of(s)) is not None]

    @property
    def writes_back(self) -> bool:
        """Whether an encode can have the gradient become what was decoded."""
        return any(s.back for w in self.walks for s in w.stores)

    @property
    def scratch(self) -> list[Field]:
        """Its own arrays: of selected elements, of samples, and what streams hold."""
        found = [f for w in self.walks for one in w.compacts for f, _ in one.parts]
        stores = [s for w in self.walks for s in w.stores]
        found += [s.field for s in stores if s.target in (SCRATCH, "kept") and s.field]
        found += [s.array for s in self.steps if isinstance(s, Stream)]
        found += self.own
        searches = [s for s in flat(self.steps) if isinstance(s, KthLargest)]
        found += [f for s in searches for f in s.sampled]
        found += [f for s in self.steps if isinstance(s, Quantiles) for f in s.arrays]
        return list({f.name: f for f in found}.values())

    @property
    def asks(self) -> bool:
        """Whether the host may have to compute a part of it."""
        return any(isinstance(s, Call) and s.routine == "spectrum" for s in self.steps)

    @property
    def sums(self) -> list[Field]:
        """Its own arrays of sums by index."""
        found = [s.field for w in self.walks for s in w.stores if s.target == SUMS and s.field]
        return list({f.name: f for f in found}.values())


def flat(steps: Iterable[Step]) -> Iterator[Step]:
    """Steps, and those within them."""
    for step in steps:
        yield step
        if isinstance(step, When):
            yield from flat(step.steps)


def walk_of(step: Step) -> Walk | None:
    """The walk that a step is or has."""
    if isinstance(step, KthLargest | ThresholdSearch | Quantiles):
        return step.walk
    return step if isinstance(step, Walk) else None


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


def made(step: KthLargest | ThresholdSearch) -> tuple[Value, Value]:
    """The two values that a search makes."""
    return step.found, step.larger if isinstance(step, KthLargest) else step.count
