"""Runs whose steps read the gradient and its residual directly, see [Note: fed products]."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compll.backends.cpu import fed as cpu_fed
from compll.backends.cpu.fed import Factors, Fed
from compll.backends.cpu.loops import LoopRun, summed
from compll.ir.expr import Expr
from compll.ir.matrices import short
from compll.numerics.types import F32
from compll.passes.array_steps import last_product, of_gradient
from compll.runtime.batches import State


class Scattered(NamedTuple):
    """A result of few values at their positions, zero elsewhere."""

    at: NDArray[np.int64]
    values: F32


class ProductRun(LoopRun):
    """A LoopRun that makes an array of its input only where some step cannot do without."""

    fed: tuple[F32, np.float32, NDArray[Any]] | None = None

    def feed(self, x: F32, factor: np.float32, residual: NDArray[Any]) -> None:
        """Remember the input's parts."""
        self.fed = x, factor, residual

    def given(self) -> F32:
        """The input, an array from now on."""
        if "g" not in self.inputs and self.fed is not None:
            self.inputs["g"] = self.algebra.fed(*self.fed)
        return super().given()

    def op_input(self, expr: Expr) -> Any:
        return self.given() if expr.value == "g" else super().op_input(expr)

    def needs(self, expr: Expr) -> list[Expr]:
        if self.of_input(expr) is not None:
            return list(expr.args[1:])
        return super().needs(expr)

    def of_input(self, expr: Expr) -> Expr | None:
        """See array_steps.of_gradient; None without feedback."""
        if self.fed is None or (expr.op != "matmul" and not self.loops.spares):
            return None
        return of_gradient(expr, self.n)

    def compute(self, expr: Expr) -> Any:
        if expr.op == "reduce_sum" and self.fed is not None and self.of_input(expr) is not None:
            return summed(cpu_fed.sums(*self.fed, self.tile))
        return super().compute(expr)

    def op_gather(self, expr: Expr) -> Any:
        if self.fed is None or self.of_input(expr) is None:
            return super().op_gather(expr)
        return cpu_fed.gathered(*self.fed, self.pick(str(expr.value)))

    def op_matmul(self, expr: Expr) -> F32:
        plain = self.of_input(expr)
        if plain is None or self.fed is None:
            return super().op_matmul(expr)
        g, other = Fed(*self.fed, self.roomy(plain)[1]), self.value(expr.args[1])
        turned = expr.args[0] is not plain
        return cpu_fed.transposed(g, other) if turned else cpu_fed.product(g, other)

    def result(self) -> Any:
        """Where decode ends with a product its factors, with a scatter the positions and values."""
        product = last_product(self.module)
        if product is not None and not self.roomless(product):
            sums = np.float32 if short(product) else np.float64
            return Factors(*(np.ascontiguousarray(self.value(m), sums) for m in product.args))
        if self.module.decode.op == "scatter":
            at, values = map(self.value, self.module.decode.args)
            return Scattered(np.asarray(at, np.int64), np.asarray(values, np.float32))
        return super().result()

    def roomless(self, product: Expr) -> bool:
        """Whether a product has fewer elements than the tensor, which `flat` tells."""
        rows, cols = self.size(product)
        return rows * cols < self.n

    def write(self, piece: F32, value: Any, *, add: bool) -> None:
        if isinstance(value, Factors):
            cpu_fed.decoded(piece, value, add=add)
        elif isinstance(value, Scattered):
            cpu_fed.placed(piece, value.at, value.values, add=add)
        else:
            super().write(piece, value, add=add)

    def finish(self, piece: F32, states: State | None, value: Any, *, write: bool) -> None:
        if states is None or self.fed is None or isinstance(value, np.ndarray):
            return super().finish(piece, states, value, write=write)
        values = self.updates()
        if isinstance(value, Factors):
            cpu_fed.settled(self.fed, value, write=write)
        else:
            cpu_fed.left(self.fed, value.at, value.values)
            if write:
                self.write(piece, value, add=False)
        return self.keep(states, values)
