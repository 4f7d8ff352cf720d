"""Selections as tile programs: the walk that selects compacts the values that selected elements
need.

Stores of selected elements follow as a walk over the compacted arrays. See docs/tile-ir.md.
"""

from __future__ import annotations

from compll.ir.expr import Expr, walk
from compll.ir.module import POSITIONS, Selection
from compll.ir.program import Pass, Sink
from compll.ir.tile import Ascending, Compact, Kernel, Store, Stream, Value, Walk
from compll.passes.thresholds import Thresholds
from compll.passes.values import Values


def limit(values: Values, s: Selection) -> Value:
    """The most elements of a selection."""
    return values.make("as_count", [values.of(s.limit), size(values)], "i64", "piece")


def size(values: Values) -> Value:
    """The elements of the piece."""
    return values.make("size", (), "i64", "piece")


class Selecting:
    """The selections of an encode, pass after pass. Values of selected elements are stored at the
    end."""

    def __init__(self, values: Values, thresholds: Thresholds) -> None:
        self.values, self.thresholds = values, thresholds
        self.compacts: list[Compact] = []
        self.streams: list[Stream] = []
        self.walks: list[Walk] = []

    def select(self, one: Pass, usual: Walk) -> list[Walk]:
        """Have a pass's walk select. Returns the walks that total selected elements."""
        usual.compacts = [compact(self.values, self.thresholds, s) for s in one.selections]
        self.compacts += usual.compacts
        totals = self.late(one)
        for s in one.selections:
            after = Walk(of=s.name)
            for sink in one.kept:
                if sink.expr.type.of == s.name:
                    self.kept(sink, after)
            after.stores += [self.mended(x, s) for x in one.sinks if mends(x, s, one)]
            self.walks.append(after)
        return totals

    def late(self, one: Pass) -> list[Walk]:
        """Walks that compute totals of selected elements."""
        found = []
        for e in one.late:
            value = self.values.of(e)
            for s in one.selections:
                self.values.kept[s.name].late.add(id(value))
            if e.op.startswith("reduce_"):
                found.append(Walk(folds=[value.args[0]], of=e.args[0].type.of))
        return found

    def kept(self, sink: Sink, after: Walk) -> None:
        """Have a field of selected elements stored."""
        f = sink.field
        if f is not None and f.storage in POSITIONS:
            self.streams.append(Stream(f, self.values.of(sink.expr).attr))
        else:
            after.stores.append(self.values.stored(sink))

    def mended(self, sink: Sink, s: Selection) -> Store:
        """A store of a state at selected elements, for a state that the walk could not store."""
        values, kept = self.values, self.values.kept[s.name]
        value = kept.load(values.lanes(values.of(sink.expr.args[1])))
        place = kept.load(values.make("position", (), "i32", "lane"))
        return Store("state", values.states[sink.name], value, place=place)

    def end(self) -> list[Stream | Walk]:
        """Steps behind all walks: first streams, in the order of fields, because they decide the
        positions of later fields."""
        for one in self.compacts:
            one.parts = list(self.values.kept[one.selection].parts.values())
        names = [f.name for f in self.values.module.fields]
        self.streams.sort(key=lambda stream: names.index(stream.field.name))
        return [*self.streams, *(w for w in self.walks if w.stores)]


def compact(values: Values, thresholds: Thresholds, s: Selection) -> Compact:
    """The selection itself. The arrays that it fills are known at the end."""
    if s.kind == "filter":
        key = values.lanes(values.of(s.key))
        if s.unlimited:
            return Compact(s.name, [], always=key)
        return Compact(s.name, [], first=key, limit=limit(values, s))
    assert s.threshold is not None
    step = thresholds.kth[id(s.threshold)]
    key = values.order_key(values.lanes(values.of(s.key)))
    return Compact(
        s.name, [],
        always=values.make("gt", [key, step.found], "bool", "lane"),
        first=values.make("eq", [key, step.found], "bool", "lane"),
        limit=values.make("sub", [limit(values, s), step.larger], "i64", "piece"),
    )  # fmt: skip


def selects(sink: Sink) -> bool:
    """True if a state has one value at selected elements, and another elsewhere."""
    return sink.kind == "state" and sink.expr.op == "where" and sink.expr.args[0].op == "in"


def mends(sink: Sink, s: Selection, one: Pass) -> bool:
    """True if a state is stored at this selection's elements after the walk.

    If the walk need not touch the state, the later walk over selected elements stores it: it
    touches less.
    """
    if not selects(sink) or sink.expr.args[0].value != s.name:
        return False
    _, value, rest = sink.expr.args
    late = {id(e) for e in one.late}
    return (rest.op == "state" and rest.value == sink.name) or any(
        id(e) in late or e.type.shape == "kept" or e.op == "count_kept" for e in walk(value)
    )


def rest(values: Values, sink: Sink) -> Store | None:
    """The store of a walk for a state that is mended after it; None: no store."""
    inside, _, other = sink.expr.args
    if other.op == "state" and other.value == sink.name:
        return None
    f = values.states[sink.name]
    before = values.make("load", (), "f32", "lane", f)
    chosen = [values.of(inside), before, values.lanes(values.of(other))]
    return Store("state", f, values.make("where", chosen, "f32", "lane"))


def scattered(values: Values, kernel: Kernel, decode: Expr, *, add: bool) -> None:
    """Add the steps of a decode that places the selected elements."""
    index, value = (values.of(a) for a in decode.args)
    stream(values, kernel, decode)
    if not add:
        zero = values.make("const", (), "f32", "piece", 0.0)
        kernel.steps.append(Store("zero", None, zero))
    store = Store("scatter_add" if add else "scatter", None, values.lanes(value), place=index)
    kernel.steps.append(Walk([store], of=decode.args[0].type.of))


def stream(values: Values, kernel: Kernel, decode: Expr) -> bool:
    """True if a payload's positions are a stream. Adds the step that loads it."""
    f = values.fields[str(decode.args[0].value)]
    if f.storage in POSITIONS:
        kernel.steps.append(Stream(f, values.of(decode.args[0]).attr))
    return f.storage in POSITIONS


def check(values: Values, kernel: Kernel, decode: Expr) -> None:
    """Add a check that a payload's positions ascend within the tensor, or that a spread has as many
    values as elements."""
    if decode.op != "scatter":
        _check_spread(values, kernel, decode)
    elif decode.args[0].op == "field" and not stream(values, kernel, decode):
        kernel.steps.append(Ascending(values.fields[str(decode.args[0].value)]))


def _check_spread(values: Values, kernel: Kernel, decode: Expr) -> None:
    folds, wrong = [], values.make("const", (), "i32", "piece", 0)
    for e in walk(decode):
        if e.op == "spread":
            inside = values.of(e.args[0])
            folds.append(values.make("fold", [inside], "i32", "tile", "count"))
            found = values.make("total", [folds[-1]], "f64", "piece", "count")
            found = values.make("convert", [found], "i64", "piece")
            size = values.make("counted", (), "i64", "piece", e.args[1].type.of)
            other = values.whole(values.make("ne", [found, size], "bool", "piece"))
            wrong = values.make("add", [wrong, other], "i32", "piece")
    if folds:
        kernel.steps.append(Walk(folds=folds))
        kernel.bad = wrong
