"""Searched thresholds: the k-th largest, and thresholds found by counting the elements above
them."""

from __future__ import annotations

from collections.abc import Mapping

from compll.ir.expr import Expr
from compll.ir.module import Field
from compll.ir.program import LIBRARY, TABLES, Pass
from compll.ir.tile import Compact, KthLargest, Op, ThresholdSearch, Value, Walk, When
from compll.passes import tables
from compll.passes.values import Values

#: thresholds that a walk counts for: after number q comes 2 q + 1 if too few elements reach it,
#: else 2 q + 2, so that three tries take one walk
TRIES = 7


class Thresholds:
    """The searches of an encode. kth: searches for the k-th largest, by their expressions.

    guards: conditions without which a search is not needed; see Program.
    """

    def __init__(self, values: Values, guards: Mapping[int, tuple[Expr, bool]]) -> None:
        self.values, self.guards = values, guards
        self.kth: dict[int, KthLargest] = {}

    def steps(self, one: Pass) -> list[Op]:
        """Steps before a pass's walk."""
        found: list[Op] = []
        for e in one.scalars:
            if e.op in TABLES:
                found += tables.steps(self.values, e)
            elif e.op in LIBRARY:
                found.append(self.guarded(e))
        return found

    def guarded(self, e: Expr) -> Op:
        """A search, under its condition if it has one."""
        step = self.step(e)
        guard = self.guards.get(id(e))
        if guard is None:
            return step
        condition, wanted = guard
        return When(self.values.of(condition), wanted, [step])

    def step(self, e: Expr) -> KthLargest | ThresholdSearch:
        """A search."""
        return self.kth_largest(e) if e.op == "kth_largest" else self.search(e)

    def kth_largest(self, e: Expr) -> KthLargest:
        """The k-th largest of all elements, or of a sample."""
        values, (x, k) = self.values, e.args
        name = f"keys {len(self.kth)}"
        sample, of = None, x.type.of if x.type.shape == "kept" else ""
        whole = values.kernel.limits[of] if of else values.make("size", (), "i64", "piece")
        if x.op == "sample":
            x, count = x.args
            sample = self.count(count, whole)
        key = values.order_key(values.lanes(values.of(x)))
        least, found = (values.make(op, (), "i32", "piece", name) for op in ("least", "found"))
        larger = values.make("larger", (), "i64", "piece", name)
        enough = values.make("ge", [key, least], "bool", "lane")
        keys = Field(name, "int32", 0, "kept", name)
        walk = Walk(compacts=[Compact(name, [(keys, key)], always=enough)], of=of)
        step = KthLargest(walk, self.count(k, sample or whole), least, found, larger, sample)
        self.kth[id(e)] = step
        single = values.make("from_key", [found], "f32", "piece")
        values.done[id(e)] = values.make("convert", [single], "f64", "piece")
        return step

    def count(self, e: Expr, most: Value) -> Value:
        """A number of elements, 1..most."""
        one = self.values.make("const", (), "i64", "piece", 1)
        found = self.values.make("as_count", [self.values.of(e), most], "i64", "piece")
        return self.values.make("max", [found, one], "i64", "piece")

    def search(self, e: Expr) -> ThresholdSearch:
        """The step of adjust or bisect."""
        values = self.values
        name = f"{e.op} {len(values.counts)}"
        tries = [values.make("try", (), "f32", "piece", f"{name}.{q}") for q in range(TRIES)]
        x = values.lanes(values.of(e.args[0]))
        reached = [values.make("ge", [x, t], "bool", "lane") for t in tries]
        folds = [values.make("fold", [r], "i32", "tile", "count") for r in reached]
        found, count = (
            values.make(op, (), "f64", "piece", name) for op in ("threshold", "reached")
        )
        values.done[id(e)], values.counts[id(e)] = found, count
        given = [values.of(a) for a in e.args[1:]]
        return ThresholdSearch(e.op, Walk(folds=folds), given, tries, found, count)
