"""Runs whose matrix products read the gradient and its residual directly, see [Note: fed products]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compll.backends import cpu_fed
from compll.backends.array_runs import ArrayRun
from compll.backends.cpu_fed import Fed
from compll.backends.cpu_loops import LoopRun
from compll.backends.matrix_numbers import F32
from compll.ir import Expr

#: columns of a result up to which its products are fused
NARROW = 16


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
        if expr.op == "matmul" and self.of_input(expr) is not None:
            return [expr.args[1]]
        return super().needs(expr)

    def of_input(self, expr: Expr) -> Expr | None:
        """matrix(g, columns), of a narrow product of that, or of its transpose, with another."""
        one = expr.args[0]
        plain = one.args[0] if one.op == "transpose" else one
        direct = plain.op == "matrix" and plain.args[0].op == "input" and self.fed is not None
        return plain if direct and self.size(expr)[1] <= NARROW else None

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
        pair = self.last_product(decoder)
        if states is None or pair is None:
            return super().close(piece, states, decoder, other)
        self.begin(piece, states, 1.0)
        values = self.updates()
        cpu_fed.settled(Fed(piece, np.float32(1), states["residual"], pair[1].shape[1]), *pair)
        return self.keep(states, values)

    def last_product(self, decoder: ArrayRun) -> tuple[F32, F32] | None:
        """The factors, where the decoded value is what feedback takes and the product of two."""
        decode = self.module.decode
        product = decode.args[0] if decode.op == "flat" else decode
        if product.op != "matmul" or not self.module.feedback or self.module.own:
            return None
        rows, cols = self.size(product)
        if rows * cols < self.n:
            return None
        a, b = map(decoder.value, product.args)
        return a, b
