"""Numbers that the host computes for a batch's pieces before kernels run, and zero states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from compll.ir.capacity import MOST
from compll.ir.expr import Expr
from compll.ir.module import Module
from compll.ir.static import Number, depends, evaluate
from compll.numerics.held import Memo
from compll.numerics.types import F64, I64
from compll.runtime.batches import LENGTH, STATE, TENSOR


class Rows:
    """Values known before any data, a row for each piece."""

    def __init__(self, params: Mapping[str, Number]) -> None:
        self.params = dict(params)
        self.known, self.stepping = Memo(), Memo()

    def follow_step(self, kernel: str, exprs: Sequence[Expr]) -> bool:
        """True if numbers of the kernel of this name depend on the step."""
        return bool(self.stepping.once(kernel, lambda: any("step" in depends(e) for e in exprs)))

    def of(
        self, kernel: str, exprs: Sequence[Expr], table: I64, step: int, most: I64 | None = None
    ) -> F64:
        """Rows for the kernel of this name, float64 [m, expressions]. most: see ir/capacity.py."""
        if not exprs:
            return np.empty((len(table), 0))
        step = step if self.follow_step(kernel, exprs) else 0
        lengths = table[:, 1].tolist()
        cut = lengths if most is None else most.tolist()
        once, row = self.known.once, self.row
        rows = [
            once((kernel, n, step, k), partial(row, exprs, n, step, k))
            for n, k in zip(lengths, cut, strict=True)
        ]
        return np.array(rows, np.float64).reshape(len(table), len(exprs))

    def row(self, exprs: Sequence[Expr], n: int, step: int, most: int) -> list[float]:
        """The row of a piece of n elements."""
        env = self.params | {"n": n, "step": step, MOST: most}
        return [float(evaluate(e, env)) for e in exprs]


def fresh(module: Module, table: I64) -> tuple[dict[str, tuple[str, int]], I64]:
    """Types and lengths of the zero states of a call without states, and a table for them."""
    table = np.array(table)
    table[:, STATE] = np.cumsum(table[:, LENGTH]) - table[:, LENGTH]
    size = {True: int(table[:, LENGTH].sum()), False: int(table[:, TENSOR].max(initial=0)) + 1}
    return {s.name: (s.dtype, size[s.shape == "n"]) for s in module.states}, table
