"""Tables of a piece as tile programs: quantiles are a step between walks."""

from __future__ import annotations

from compll.ir.expr import Expr
from compll.ir.module import Field
from compll.ir.tile import SCRATCH, Op, Quantiles, Store, Walk
from compll.passes.values import Values

#: scratch arrays of a search for quantiles
ARRAYS = ("keys", "near keys", "sorted keys")


def steps(values: Values, e: Expr) -> list[Op]:
    """Steps that make a table before a walk that needs it."""
    found = values.of(e)
    name = found.attr.name
    key = values.order_key(values.lanes(values.of(e.args[0])))
    keys, *rest = (Field(f"{what} of {name}", "int32", 32, SCRATCH) for what in ARRAYS)
    return [Quantiles(Walk([Store(SCRATCH, keys, key)]), [keys, *rest], found, int(e.value))]
