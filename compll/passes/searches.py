"""Searches: the k-th largest, thresholds found by counting the elements above them, quantiles."""

from __future__ import annotations

from collections.abc import Mapping

from compll.ir.expr import Expr
from compll.ir.storage import INT32
from compll.ir.tile import (
    ELEMENTS,
    Compact,
    Domain,
    Op,
    Search,
    Store,
    Value,
    Walk,
    When,
)
from compll.numerics import tries
from compll.passes.values import Values

#: scratch arrays of a search for quantiles
ARRAYS = ("keys", "near keys", "sorted keys")


class Searches:
    """The searches of an encode. kth: searches for the k-th largest, by their expressions.

    guards: conditions without which a step is not needed; see guards.py.
    """

    def __init__(self, values: Values, guards: Mapping[int, tuple[Expr, bool]]) -> None:
        self.values, self.guards = values, guards
        self.kth: dict[int, Search] = {}

    def guarded(self, e: Expr, step: Op) -> Op:
        """A step, under the condition of its value if it has one."""
        guard = self.guards.get(id(e))
        if guard is None:
            return step
        condition, wanted = guard
        return When(self.values.of(condition), wanted, [step])

    def step(self, e: Expr) -> tuple[Op, Value]:
        """A search, and its result."""
        if e.op == "quantiles":
            return self.quantiles(e)
        return self.kth_largest(e) if e.op == "kth_largest" else self.threshold(e)

    def kth_largest(self, e: Expr) -> tuple[Op, Value]:
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
        keys = values.scratch(name, INT32)
        domain = Domain("kept", of) if of else ELEMENTS
        walk = Walk(compacts=[Compact(name, [(keys, key)], always=enough)], domain=domain)
        numbers = [self.count(k, sample or whole), *([sample] if sample is not None else [])]
        step = Search("kth_largest", walk, numbers, (found, larger), [least])
        names = [(f"sample of {a.name}", a.storage) for a in step.sampled]
        step.arrays = [values.scratch(name, storage) for name, storage in names]
        self.kth[id(e)] = step
        single = values.make("from_key", [found], "f32", "piece")
        return step, values.make("convert", [single], "f64", "piece")

    def count(self, e: Expr, most: Value) -> Value:
        """A number of elements, 1..most."""
        one = self.values.make("const", (), "i64", "piece", 1)
        found = self.values.make("as_count", [self.values.of(e), most], "i64", "piece")
        return self.values.make("max", [found, one], "i64", "piece")

    def threshold(self, e: Expr) -> tuple[Op, Value]:
        """The step of adjust or bisect."""
        values = self.values
        name = f"{e.op} {len(values.counts)}"
        chosen = [values.make("try", (), "f32", "piece", f"{name}.{q}") for q in range(tries.SIZE)]
        x = values.lanes(values.of(e.args[0]))
        reached = [values.make("ge", [x, t], "bool", "lane") for t in chosen]
        folds = [values.make("fold", [r], "i32", "tile", "count") for r in reached]
        found, count = (
            values.make(op, (), "f64", "piece", name) for op in ("threshold", "reached")
        )
        values.counts[id(e)] = count
        given = [values.of(a) for a in e.args[1:]]
        return Search(e.op, Walk(folds=folds), given, (found, count), chosen), found

    def quantiles(self, e: Expr) -> tuple[Op, Value]:
        """The step that makes a table."""
        values = self.values
        found = values.one(e, ())
        key = values.order_key(values.lanes(values.of(e.args[0])))
        keys, *rest = (values.scratch(f"{what} of {found.attr.name}", INT32) for what in ARRAYS)
        walk = Walk([Store(keys, key)])
        step = Search("quantiles", walk, [], (found,), arrays=[keys, *rest], attr=int(e.value))
        return step, found
