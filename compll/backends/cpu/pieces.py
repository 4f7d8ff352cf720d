"""Numbers that the host computes for a batch's pieces before kernels run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from compll.ir.capacity import MOST
from compll.ir.expr import Expr
from compll.ir.module import Module
from compll.ir.static import Number, depends, evaluate
from compll.numerics.held import Memo
from compll.numerics.types import F64, I64
from compll.runtime.batches import State


class Rows:
    """Values known before any data, a row for each piece."""

    def __init__(self, params: Mapping[str, Number]) -> None:
        self.params = dict(params)
        self.known, self.stepping = Memo(), Memo()

    def of(
        self, kernel: str, exprs: list[Expr], table: I64, step: int, most: I64 | None = None
    ) -> F64:
        """Rows for the kernel of this name, float64 [m, expressions]. most: see ir/capacity.py."""
        if not exprs:
            return np.empty((len(table), 0))
        if not self.stepping.once(kernel, lambda: any("step" in depends(e) for e in exprs)):
            step = 0
        lengths = table[:, 1].tolist()
        cut = [0] * len(lengths) if most is None else most.tolist()
        once, row = self.known.once, self.row
        rows = [
            once((kernel, n, step, k), partial(row, exprs, n, step, k))
            for n, k in zip(lengths, cut, strict=True)
        ]
        return np.array(rows, np.float64).reshape(len(table), len(exprs))

    def row(self, exprs: list[Expr], n: int, step: int, most: int) -> list[float]:
        """The row of a piece of n elements."""
        env = self.params | {"n": n, "step": step, MOST: most}
        return [float(evaluate(e, env)) for e in exprs]


def fresh(module: Module, table: I64) -> tuple[State, I64]:
    """Zero states for a call without states, and a table for them."""
    table = table.copy()
    table[:, 4] = np.cumsum(table[:, 1]) - table[:, 1]
    size = {True: int(table[:, 1].sum()), False: int(table[:, 2].max(initial=0)) + 1}
    states: dict[str, NDArray[np.generic]] = {
        s.name: np.zeros(size[s.shape == "n"], s.dtype) for s in module.states
    }
    return states, table
