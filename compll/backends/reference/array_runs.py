"""Specs with matrices or rounds, computed an array at a time.

[Note: arrays] A product of matrices needs all of its input before it gives any output, so such a
spec has little to fuse: its time is that of the products.

[Note: combined] The ranks add up their stored values of a round; `combined` divides the sum by
their number. A single worker combines with itself. For a maximum, a value that is not finite is
stored as infinity: libraries differ in whether a maximum with NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.backends.reference import fields, pieces
from compll.backends.reference.runs import Run
from compll.errors import UsageError
from compll.ir.expr import Expr
from compll.ir.matrices import extents, short
from compll.ir.module import Field, Module
from compll.ir.static import Number
from compll.numerics import halves, numbers
from compll.numerics import matrices as matrix_numbers
from compll.numerics.types import F32, U8
from compll.runtime.batches import State


class ArrayRun(Run):
    """A Run that knows matrices, and the values that ranks have combined so far."""

    def __init__(self, module: Module, params: Mapping[str, Number], n: int, **place: int) -> None:
        super().__init__(module, params, n, **place)
        self.combined: dict[str, Any] = {}
        self.fields = {f.name: f for f in module.fields}
        self.extremes = {name for name, how in module.rounds if how == "max"}

    def size(self, expr: Expr) -> tuple[int, int]:
        """Rows and columns."""
        return extents(expr.type.dims, self.n)

    def compute(self, expr: Expr) -> Any:
        if expr.type.shape == "matrix":
            self.size(expr)  # raises for sizes that would take all memory
        return super().compute(expr)

    def op_matrix(self, expr: Expr) -> F32:
        rows, cols = self.roomy(expr)
        return matrix_numbers.padded(self.value(expr.args[0]), rows, cols)

    def roomy(self, expr: Expr) -> tuple[int, int]:
        """Rows and columns of a matrix that must hold all elements."""
        rows, cols = self.size(expr)
        if rows * cols < self.n:
            raise UsageError(f"a matrix of {rows} x {cols} has no room for {self.n} elements")
        return rows, cols

    def op_flat(self, expr: Expr) -> Any:
        flat = self.value(expr.args[0]).reshape(-1)[: self.n]
        if len(flat) < self.n:
            raise UsageError(f"flat: a matrix of {len(flat)} elements, {self.n} are needed")
        return flat

    def op_matmul(self, expr: Expr) -> F32:
        left, right = map(self.value, expr.args)
        return matrix_numbers.product(left, right, short(expr))

    def op_sum_by(self, expr: Expr) -> F32:
        index, x = (self.value(a).reshape(-1) for a in expr.args)
        return numbers.sum_by(index, x, self.size(expr)[1])[None]

    def op_lookup(self, expr: Expr) -> F32:
        table, index = map(self.value, expr.args)
        return matrix_numbers.lookup(table.reshape(-1), index)

    def op_transpose(self, expr: Expr) -> Any:
        return self.value(expr.args[0]).T

    def op_orthonormal(self, expr: Expr) -> F32:
        a, *spare = map(self.value, expr.args)
        return matrix_numbers.orthonormal(a, spare[0] if spare else np.zeros_like(a))

    def op_ones(self, expr: Expr) -> F32:
        return np.ones(self.size(expr), np.float32)

    def op_random_matrix(self, expr: Expr) -> F32:
        step = int(self.env["step"])
        return matrix_numbers.random_matrix(step, self.tensor, *self.size(expr))

    def op_chosen(self, expr: Expr) -> Any:
        u = numbers.uniform(self.seed, self.step, self.tensor, expr.value, self.offset, 1)
        chances = self.value(expr.args[0])
        return matrix_numbers.chosen(chances[0], float(u[0]), self.size(expr)[1])[None]

    def op_take_columns(self, expr: Expr) -> F32:
        return matrix_numbers.take_columns(*map(self.value, expr.args))

    def op_top_columns(self, expr: Expr) -> Any:
        return matrix_numbers.top_columns(self.value(expr.args[0]), self.size(expr)[1])

    def op_place_columns(self, expr: Expr) -> F32:
        at, x = map(self.value, expr.args)
        return matrix_numbers.place_columns(at, x, self.size(expr)[1])

    def op_hadamard(self, expr: Expr) -> F32:
        return matrix_numbers.hadamard(self.value(expr.args[0]), expr.value)

    def op_combined(self, expr: Expr) -> Any:
        name = str(expr.value)
        if name not in self.combined:
            self.combined[name] = self.alone(self.fields[name])
        return self.combined[name]

    def alone(self, field: Field) -> Any:
        """The value of this worker's own payload field, as a decoder reads it."""
        kept = len(self.pick(field.of)) if field.shape == "kept" else 0
        return fields.loaded(field, self.stored(field), self.among(field), self.tile, kept)

    def stored(self, field: Field) -> U8:
        """The bytes of a payload field."""
        assert field.expr is not None
        value = self.value(field.expr)
        if field.name in self.extremes:
            # The all-reduce of a maximum may lose a NaN: see [Note: combined].
            value = np.where(np.isfinite(value), value, np.inf)
        return fields.stored(field, value, self.tile, self.among(field))

    def begin(self, x: F32, states: State | None, scale: float) -> None:
        """Set the input (with the residual added) and the states."""
        factor = np.float32(scale)
        if self.module.feedback and states is not None:
            self.feed(x, factor, states["residual"])
        else:
            self.inputs["g"] = x if factor == 1 else x * factor
        for s in self.module.states:
            held = None if states is None else states[s.name]
            self.inputs[s.name] = self.state(s, held)

    def feed(self, x: F32, factor: np.float32, residual: NDArray[Any]) -> None:
        """Set the input of feedback."""
        self.inputs["g"] = matrix_numbers.fed(x, factor, residual, self.module.decay)

    def given(self) -> F32:
        """The input."""
        g: F32 = self.inputs["g"]
        return g

    def state(self, item: Field, held: NDArray[Any] | None) -> Any:
        """A state's value. A matrix that has no room in its piece is not kept."""
        if item.shape == "scalar":
            return np.float64(0.0 if held is None else held[0])
        if item.shape == "n":
            return np.zeros(self.n, np.float32) if held is None else halves.read(held)
        rows, cols = extents(item.dims, self.n)
        if held is None or rows * cols > self.n:
            return np.zeros((rows, cols), np.float32)
        return held[: rows * cols].reshape(rows, cols)

    def own(self, decoder: ArrayRun) -> Any:
        """The decoded value of this worker's own payload, by a fresh run in the same place.

        A maximum is the ranks' one, since all ranks need it to decode.
        """
        for name, field in self.fields.items():
            own = name not in self.extremes
            decoder.inputs[name] = self.alone(field) if own else self.combined[name]
        return decoder.result()

    def settle(self, states: State, out: F32) -> None:
        """Update the states, given the decoded values; no state takes up a NaN or infinity."""
        values = self.updates()
        if self.module.feedback:
            matrix_numbers.left(states["residual"], self.given(), out)
        self.keep(states, values)

    def updates(self) -> dict[str, F32]:
        """New values of the states besides the residual, computed while all states have their old
        values."""
        found = {name: self.value(e) for name, e in self.module.updates.items()}
        # copies: a value may be a state's own memory, which another update overwrites
        return {name: np.array(value, np.float32).reshape(-1) for name, value in found.items()}

    def keep(self, states: State, values: Mapping[str, F32]) -> None:
        """Store new values of states that have room."""
        for name, flat in values.items():
            if len(flat) <= len(states[name]):
                halves.keep(states[name][: len(flat)], flat)

    def ready(self, payload: U8) -> Any:
        """The decoded value of a payload, for `write`. Raises PayloadError."""
        if self.n == 0 and len(payload) == 0:
            return np.zeros(0, np.float32)
        pieces.read(self.module, payload, self.n, self)
        with np.errstate(all="ignore"):
            value = self.result()
        return np.full(self.n, np.nan, np.float32) if self.module.status and payload[-1] else value

    def result(self) -> Any:
        """The decoded value of the fields that this run was given, in a form that `write` takes."""
        return np.asarray(self.value(self.module.decode), np.float32)

    def write(self, piece: F32, value: Any, *, add: bool) -> None:
        """Write a result, or add it."""
        piece[:] = piece + value if add else value

    def finish(self, piece: F32, states: State | None, value: Any, *, write: bool) -> None:
        """Update the states, given a result, and write the result; follows `begin`."""
        if states is not None:
            self.settle(states, value)
        if write:
            self.write(piece, value, add=False)

    def close(self, piece: F32, states: State | None, decoder: ArrayRun, other: ArrayRun) -> None:
        """Overwrite the piece with the value decoded from all ranks, and update the states.

        decoder: a run in the same place that holds the combined values; other: a fresh one.
        """
        value, own = decoder.result(), self.module.own and states is not None
        if states is not None:
            self.begin(piece, states, 1.0)
        self.finish(piece, states, self.own(other) if own else value, write=not own)
        if own:
            self.write(piece, value, add=False)
