"""Searches: the k-th largest, thresholds found by counting the elements above them, quantiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compll.ir.expr import Expr
from compll.ir.storage import INT32
from compll.ir.tile import Array, Call, Op, Value, View, Walk, When, count_of, order_inside
from compll.numerics import tries
from compll.passes.values import Values


class Searches:
    """The searches of an encode. kth: searches for the k-th largest, by their expressions.

    guards: conditions without which a step is not needed; see guards.py.
    """

    def __init__(self, values: Values, guards: Mapping[int, tuple[Expr, bool]]) -> None:
        self.values, self.guards = values, guards
        self.kth: dict[int, Call] = {}

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

    def results(self, name: str, *kinds: str) -> tuple[Value, ...]:
        """The values of the piece that a search of this name computes."""
        numbers = enumerate(kinds)
        return tuple(
            self.values.make("result", (), kind, "piece", f"{name}.{k}") for k, kind in numbers
        )

    def kth_largest(self, e: Expr) -> tuple[Op, Value]:
        """The k-th largest of all elements, or of a sample."""
        values, (x, k) = self.values, e.args
        sample, of = None, x.type.of if x.type.shape == "kept" else ""
        whole = values.kernel.counts[of]
        if x.op == "sample":
            x, count = x.args
            sample = self.count(count, whole)
        view = View(values.order_key(values.lanes(values.of(x))), of=of)
        keys = values.scratch(f"keys {len(self.kth)}", INT32)
        samples = [
            values.scratch(f"sample of {a.name}", a.storage) for a in sampled(view) or [keys]
        ]
        numbers = (self.count(k, sample or whole), *([sample] if sample is not None else []))
        results = self.results(keys.name, "i32", "i64")
        step = Call(e.op, (view,), (keys, *samples), numbers=numbers, results=results)
        self.kth[id(e)] = step
        single = values.make("from_key", [results[0]], "f32", "piece")
        return step, values.make("convert", [single], "f64", "piece")

    def count(self, e: Expr, most: Value) -> Value:
        """A number of elements, 1..most."""
        one = self.values.make("const", (), "i64", "piece", 1)
        found = self.values.make("as_count", [self.values.of(e), most], "i64", "piece")
        return self.values.make("max", [found, one], "i64", "piece")

    def threshold(self, e: Expr) -> tuple[Op, Value]:
        """The step of adjust or bisect."""
        values = self.values
        view = View(values.lanes(values.of(e.args[0])))
        found, count = self.results(f"{e.op} {len(values.counts)}", "f64", "f64")
        values.counts[id(e)] = count
        numbers = tuple(values.of(a) for a in e.args[1:])
        return Call(e.op, (view,), numbers=numbers, results=(found, count)), found

    def quantiles(self, e: Expr) -> tuple[Op, Value]:
        """The step that makes a table."""
        values = self.values
        table = values.one(e, ())
        view = View(values.order_key(values.lanes(values.of(e.args[0]))))
        names = (f"{what} of {table.attr.name}" for what in ("keys", "near keys", "sorted keys"))
        made = tuple(values.scratch(name, INT32) for name in names)
        return Call(e.op, (view,), made, results=(table,), attr=int(e.value)), table


def sampled(view: View) -> list[Array]:
    """The arrays of which a sample gives its keys; none if a key depends on its position, or the
    elements are selected ones."""
    lanes = [v for v in order_inside([view.value]) if v.level == "lane"]
    if view.of or any(v.op in ("draw", "position") for v in lanes):
        return []
    return list(dict.fromkeys(v.attr for v in lanes if v.op == "load"))


def counting(view: View) -> tuple[Sequence[Value], Walk]:
    """The thresholds that a search tries at once (see [Note: tries] in numerics/tries.py), and the
    walk that counts the lanes that reach each."""
    tried = [Value("try", (), "f32", "piece", q) for q in range(tries.SIZE)]
    reached = [Value("ge", (view.value, t), "bool", "lane") for t in tried]
    return tried, Walk(folds=[*map(count_of, reached)])
