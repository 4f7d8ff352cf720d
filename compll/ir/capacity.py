"""Payloads that are cut: the number of elements that selections may keep in a given number of
bytes.

If both sides of a message must know its length beforehand, an encode is given a capacity. Elements
that do not fit are treated as if the condition did not hold for them: a `filter` keeps the first
elements, and states, such as the residual, treat the others as not sent. So nothing is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from compll.ir.expr import Type, walk
from compll.ir.layout import layout, limits
from compll.ir.module import Module, Selection
from compll.ir.static import Number
from compll.numerics.types import I64

__all__ = ["MOST", "capped", "cut", "cuts", "most_in"]

#: the static that holds the most elements a filter of `capped` keeps; no parameter has this name
MOST = "(most)"


def cuts(module: Module) -> bool:
    """True if payloads can be cut: a state keeps the elements that selections leave out, and decode
    takes any number of elements."""
    filters = [s for s in module.selections if s.dynamic]
    spreads = any(e.op == "spread" for e in walk(module.decode))
    return bool(filters and module.states) and module.decoded is not None and not spreads


def capped(module: Module) -> Module:
    """The module with filters that keep at most MOST elements; the host sets MOST for every
    piece."""
    most = module.pool.make("param", (), Type("int", "static"), MOST)

    def less(s: Selection) -> Selection:
        limit = module.pool.make("min", (s.limit, most), s.limit.type)
        return replace(s, limit=limit) if s.dynamic else s

    return replace(module, selections=tuple(map(less, module.selections)))


def cut(module: Module, limits: I64, most: I64 | None) -> I64:
    """Lower the `limits` of filters, int64 [pieces, selections], to `most`, int64 [pieces]. Changes
    `limits` and returns it."""
    if most is not None:
        filters = [i for i, s in enumerate(module.selections) if s.dynamic]
        limits[:, filters] = np.minimum(limits[:, filters], most[:, None])
    return limits


def most_in(module: Module, params: Mapping[str, Number], n: int, capacity: int) -> int:
    """Elements of n that each filter may keep, so that a payload has at most `capacity` bytes; -1
    if not even an empty payload fits."""
    whole = limits(module, n, params)
    counted = {s.name for s in module.selections if s.dynamic}

    def fits(most: int) -> bool:
        kept = {name: min(k, most) if name in counted else k for name, k in whole.items()}
        return layout(module, n, kept)[-1] <= capacity

    low, high = -1, max((whole[name] for name in counted), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
