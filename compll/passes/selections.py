"""Selections as tile programs: what selected elements need is compacted in the walk that selects.

What belongs to them follows as a walk over what was put together. See docs/tile-ir.md.
"""

from __future__ import annotations

from compll.ir.expr import Expr, walk
from compll.ir.module import POSITIONS, Field, Module, Selection
from compll.ir.program import Pass, Program
from compll.ir.tile import Compact, Kernel, KthLargest, NotLowered, Store, Stream, Value, Walk
from compll.passes.values import Kept, Values


def refuse(module: Module) -> None:
    """Raise NotLowered for what is not lowered yet."""
    if len(module.selections) > 1 or any(s.kind == "drawn" for s in module.selections):
        raise NotLowered("drawn selections, and several")
    if module.selections and module.decode.op != "scatter":
        raise NotLowered("a decode that spreads")
    if module.selections and module.group:
        raise NotLowered("selections in groups")


def limit(values: Values, s: Selection) -> Value:
    """The most elements that a selection has."""
    return values.make("as_count", [values.of(s.limit), size(values)], "i64", "piece")


def size(values: Values) -> Value:
    """The elements of the piece."""
    return values.make("size", (), "i64", "piece")


def search(values: Values, s: Selection) -> tuple[KthLargest, Compact]:
    """The threshold of a `top`, and the selection by it: the first of those as large as it."""
    assert s.threshold is not None
    key = values.make("order_key", [values.of(s.key)], "i32", "lane")
    least, found = (values.make(op, (), "i32", "piece", s.name) for op in ("least", "found"))
    larger = values.make("larger", (), "i64", "piece", s.name)
    enough = values.make("ge", [key, least], "bool", "lane")
    keys = Field(f"keys of {s.name}", "int32", 0, "kept", s.name)
    most = limit(values, s)
    one = Compact(f"keys of {s.name}", [(keys, key)], always=enough)
    step = KthLargest(Walk(compact=one), most, least, found, larger)
    compact = Compact(
        s.name, [],
        always=values.make("gt", [key, found], "bool", "lane"),
        first=values.make("eq", [key, found], "bool", "lane"),
        limit=values.make("sub", [most, larger], "i64", "piece"),
    )  # fmt: skip
    return step, compact


def encode(values: Values, program: Program, one: Pass, usual: Walk) -> None:
    """A pass that selects: the search, the walk, and one over what it selected."""
    (s,) = one.selections
    _refuse_pass(program, one, usual)
    values.kept = Kept(s, values)
    if s.kind == "top":
        step, compact = search(values, s)
        values.kernel.steps.append(step)
    else:
        compact = _filter(values, s)
    usual.compact, after = compact, Walk(of=s.name)
    values.kernel.steps.append(usual)
    for sink in one.kept:
        f = sink.field
        if f is not None and f.storage in POSITIONS:
            values.kernel.steps.append(Stream(f, values.of(sink.expr).attr))
        else:
            after.stores.append(values.stored(sink))
    compact.parts = list(values.kept.parts.values())
    values.kernel.steps.append(after)


def _filter(values: Values, s: Selection) -> Compact:
    """The elements for which a condition holds, as many as are allowed."""
    key = values.of(s.key)
    if s.unlimited:
        return Compact(s.name, [], always=key)
    return Compact(s.name, [], first=key, limit=limit(values, s))


def _refuse_pass(program: Program, one: Pass, usual: Walk) -> None:
    states = any(x.kind == "state" for p in program.passes[:-1] for x in p.sinks)
    if program.passes[-1] is not one or len(one.selections) != 1 or one.late or states:
        raise NotLowered("selections of several walks, and totals of what is selected")
    if any(f.attr == "sum" for f in usual.folds) or any(s.packed for s in usual.stores):
        raise NotLowered("sums and codes in the walk that selects")


def scattered(values: Values, kernel: Kernel, decode: Expr, *, add: bool) -> None:
    """A decode that places the selected elements."""
    index, value = (values.of(a) for a in decode.args)
    stream(values, kernel, decode)
    if value.level != "lane" or any(e.op == "uniform" for e in walk(decode)):
        raise NotLowered("a number at selected elements")
    if not add:
        zero = values.make("const", (), "f32", "piece", 0.0)
        kernel.steps.append(Store("zero", None, zero))
    store = Store("scatter_add" if add else "scatter", None, value, place=index)
    kernel.steps.append(Walk([store], of=decode.args[0].type.of))


def stream(values: Values, kernel: Kernel, decode: Expr) -> bool:
    """Whether a payload's positions are a stream, which then is loaded."""
    f = values.fields[str(decode.args[0].value)]
    if f.storage in POSITIONS:
        kernel.steps.append(Stream(f, values.of(decode.args[0]).attr))
    return f.storage in POSITIONS


def check(values: Values, kernel: Kernel, decode: Expr) -> None:
    """Whether a payload's positions lie in the tensor; `bad` tells."""
    if stream(values, kernel, decode):
        return
    if any(s.dynamic for s in values.module.selections):
        raise NotLowered("a filter's positions that are no stream")
    index = values.of(decode.args[0])
    outside = values.make("outside", [index, size(values)], "bool", "lane")
    found = values.make("convert", [outside], "i32", "lane")
    fold = values.make("fold", [found], "i32", "tile", "max")
    kernel.steps.append(Walk(folds=[fold], of=decode.args[0].type.of))
    kernel.bad = values.make("total", [fold], "i32", "piece", "max")
