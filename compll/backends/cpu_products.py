"""Runs whose matrix products read the gradient and its residual directly, see [Note: fed products]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compll.array_steps import last_product, of_gradient
from compll.backends import cpu_fed
from compll.backends.array_runs import ArrayRun
from compll.backends.cpu_fed import Fed
from compll.backends.cpu_loops import LoopRun
from compll.backends.matrix_numbers import F32
from compll.ir import Expr


class ProductRun(LoopRun):
    """A LoopRun that makes an array of its input only where something else than products wants it."""

    fed: tuple[F32, np.float32, F32] | None = None

    def feed(self, x: F32, factor: np.float32, residual: F32) -> None:
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
            return [expr.args[1]]
        return super().needs(expr)

    def of_input(self, expr: Expr) -> Expr | None:
        """See array_steps.of_gradient; None without feedback."""
        return None if self.fed is None else of_gradient(expr, self.n)

    def op_matmul(self, expr: Expr) -> F32:
        plain = self.of_input(expr)
        if plain is None or self.fed is None:
            return super().op_matmul(expr)
        g, other = Fed(*self.fed, self.roomy(plain)[1]), self.value(expr.args[1])
        turned = expr.args[0] is not plain
        return cpu_fed.transposed(g, other) if turned else cpu_fed.product(g, other)

    def close(
        self, piece: F32, states: Mapping[str, F32] | None, decoder: ArrayRun, other: ArrayRun
    ) -> None:
        """As of all ArrayRuns; a product is decoded row by row into the piece and the residual."""
        pair = self.factors(decoder)
        if states is None or pair is None:
            return super().close(piece, states, decoder, other)
        self.begin(piece, states, 1.0)
        values = self.updates()
        cpu_fed.settled(Fed(piece, np.float32(1), states["residual"], pair[1].shape[1]), *pair)
        return self.keep(states, values)

    def factors(self, decoder: ArrayRun) -> tuple[F32, F32] | None:
        """Of the product that decode ends with, where its rows can go into the residual."""
        product = last_product(self.module)
        if product is None:
            return None
        rows, cols = self.size(product)
        if rows * cols < self.n:
            return None
        a, b = map(decoder.value, product.args)
        return a, b
