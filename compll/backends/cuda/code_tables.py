"""Values that follow from one code of few bits: every thread of a warp holds one of them, and lanes
ask for theirs, instead of computing it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from compll.ir.tile import Value
from compll.numerics.bits import IN_NUMPY

WARP = 32
#: instructions from which a value is asked for
WORTH = 3
KINDS = {"f32": np.float32, "i32": np.int32, "bool": np.bool_}


class CodeTables:
    """The values of a walk that are asked for: their codes and numbers, by identity."""

    def __init__(self, values: Iterable[Value], roots: Iterable[Value]) -> None:
        self.codes: dict[int, Value] = {}
        self.numbers: dict[int, Any] = {}
        self.costs: dict[int, int] = {}
        users: dict[int, bool] = {id(v): True for v in roots}
        values = list(values)
        for v in values:
            self._look(v)
        for v in values:
            for a in v.args:
                users[id(a)] = users.get(id(a), False) or id(v) not in self.codes
        #: those that others than such values need
        self.asked = {
            id(v): (self.codes[id(v)], self.numbers[id(v)])
            for v in values
            if users.get(id(v)) and v.kind != "bool" and self.costs.get(id(v), 0) >= WORTH
        }

    def args(self, v: Value) -> tuple[Value, ...]:
        """The values that a value is made of here."""
        return (self.asked[id(v)][0],) if id(v) in self.asked else v.args

    def _look(self, v: Value) -> None:
        """Compute a value for every code, if it follows from one alone."""
        if v.op == "const" and v.kind in KINDS:
            self.numbers[id(v)] = KINDS[v.kind](v.attr)
        if v.level != "lane" or v.kind not in KINDS:
            return
        bits = v.attr if v.op == "code" else v.attr.storage.bits if v.op == "unpack" else WARP
        if 1 << bits <= WARP:
            self.codes[id(v)], self.costs[id(v)] = v, 0
            self.numbers[id(v)] = np.arange(1 << bits, dtype=np.int32)
            return
        codes = {id(self.codes[id(a)]): self.codes[id(a)] for a in v.args if id(a) in self.codes}
        known = all(id(a) in self.numbers for a in v.args)
        of = np.asarray if v.op in ("convert", "repeat") else IN_NUMPY.get(v.op)
        if len(codes) != 1 or not known or of is None:
            return
        with np.errstate(all="ignore"):
            found = of(*(self.numbers[id(a)] for a in v.args))
        (self.codes[id(v)],) = codes.values()
        self.numbers[id(v)] = np.asarray(found).astype(KINDS[v.kind])
        self.costs[id(v)] = 1 + sum(self.costs.get(id(a), 0) for a in v.args)
