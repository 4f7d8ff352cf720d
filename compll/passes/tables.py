"""Tables of a piece as tile programs: quantiles and means by index are steps between walks."""

from __future__ import annotations

from compll.ir.expr import Expr, walk
from compll.ir.module import Field
from compll.ir.program import Sink
from compll.ir.tile import SCRATCH, SUMS, Means, Op, Quantiles, Store, Walk, order
from compll.passes.values import Values

#: scratch arrays of a search for quantiles
ARRAYS = ("keys", "near keys", "sorted keys")


def steps(values: Values, e: Expr) -> list[Op]:
    """Steps that make a table before a walk that needs it."""
    found = values.of(e)
    name = found.attr.name
    if e.op == "quantiles":
        key = values.order_key(values.lanes(values.of(e.args[0])))
        keys, *rest = (Field(f"{what} of {name}", "int32", 32, SCRATCH) for what in ARRAYS)
        return [Quantiles(Walk([Store(SCRATCH, keys, key)]), [keys, *rest], found, int(e.value))]
    index, value = (values.lanes(values.of(a)) for a in e.args)
    sums = Field(name, "float64", 64, SUMS, str(e.value))
    return [Walk([Store(SUMS, sums, value, place=index)]), Means(sums, found)]


def late(sink: Sink) -> bool:
    """True if the write-back needs means, which are known after the walk. A decode then writes
    back."""
    return sink.kind == "back" and any(e.op == "mean_by" for e in walk(sink.expr))


def fused(steps: list[Op], usual: Walk) -> tuple[list[Op], list[Op]]:
    """Steps before a walk, and behind it. If the walk does not need the means, it makes their sums
    itself."""
    if len(steps) < 2:
        return steps, []
    *before, summing, means = steps
    if not (isinstance(summing, Walk) and isinstance(means, Means)):
        return steps, []
    if not usual.roots or any(v is means.found for v in order(usual.roots)):
        return steps, []
    usual.stores += summing.stores
    return before, [means]
