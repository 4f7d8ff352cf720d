"""Values that follow from one code of few bits: every thread of a warp holds one of them, and lanes
ask for theirs, instead of computing it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from compll.ir.tile import Value

WARP = 32
#: instructions from which a value is asked for
WORTH = 3
KINDS = {"f32": np.float32, "i32": np.int32, "bool": np.bool_}
#: instructions by their functions of arrays
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or, "not": np.logical_not,
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift, "where": np.where,
    "min": lambda a, b: np.where(a < b, a, b), "max": lambda a, b: np.where(a > b, a, b),
    "convert": lambda a: a, "repeat": lambda a: a,
    "exp2": lambda a: ((np.clip(a, -127, 128) + 127) << 23).astype(np.int32).view(np.float32),
}  # fmt: skip


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
        bits = v.attr if v.op == "code" else v.attr.bits if v.op == "unpack" else WARP
        if 1 << bits <= WARP:
            self.codes[id(v)], self.costs[id(v)] = v, 0
            self.numbers[id(v)] = np.arange(1 << bits, dtype=np.int32)
            return
        codes = {id(self.codes[id(a)]): self.codes[id(a)] for a in v.args if id(a) in self.codes}
        known = all(id(a) in self.numbers for a in v.args)
        if len(codes) != 1 or not known or v.op not in FUNCTIONS:
            return
        with np.errstate(all="ignore"):
            found = FUNCTIONS[v.op](*(self.numbers[id(a)] for a in v.args))
        (self.codes[id(v)],) = codes.values()
        self.numbers[id(v)] = np.asarray(found).astype(KINDS[v.kind])
        self.costs[id(v)] = 1 + sum(self.costs.get(id(a), 0) for a in v.args)
