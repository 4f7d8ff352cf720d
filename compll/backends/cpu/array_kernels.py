"""Specs with matrices or rounds on the CPU: compiled steps and routines, one after the other.

What single elements make are steps (passes/element_steps.py), matrices are routines (matrices.py);
of the rest, few numbers or singular vectors, NumPy is as fast. With feedback, steps and products
read gradient and residual themselves; an array of their sum is made only for what needs one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compll.backends.cpu import matrices
from compll.backends.cpu.interface import GIVEN, passed
from compll.backends.cpu.matrices import Factors, Matrix
from compll.backends.cpu.tiles import library, signed
from compll.backends.reference.array_kernels import ArrayKernels
from compll.backends.reference.array_runs import ArrayRun
from compll.ir.expr import Expr
from compll.ir.matrices import short
from compll.ir.module import Field, Module
from compll.ir.static import Number
from compll.numerics import halves
from compll.numerics.types import F32, U8
from compll.passes import element_steps
from compll.passes.array_steps import last_product, of_gradient, ranked
from compll.passes.element_steps import Step
from compll.runtime.batches import State

DTYPES = {"float32": np.float32, "int32": np.int32, "float64": np.float64, "uint": np.uint8}


class Scattered(NamedTuple):
    """A result of few values at their positions, zero elsewhere."""

    at: NDArray[np.int64]
    values: F32


class Steps:
    """A module's steps, compiled when first asked for: those that read the input apart.

    They are found by their field's name, where they make codes, else by their expression.
    """

    def __init__(self, module: Module) -> None:
        self.module, self.lock = module, threading.Lock()
        self.parts = element_steps.parts(module)
        self.libraries: dict[str, Any] = {}

    def find(self, key: int | str, *, feed: bool) -> tuple[Step, Callable[..., None]] | None:
        """A step and its function; feed: for an input with a residual."""
        kinds = ("free", "input", "fed" if feed else "plain")
        kind = next((kind for kind in kinds if key in self.parts[kind]), None)
        if kind is None:
            return None
        step = self.parts[kind][key]
        with self.lock:
            if kind not in self.libraries:
                kernels = [s.kernel for s in self.parts[kind].values()]
                self.libraries[kind] = library(self.module.name, kernels)
        return step, self.libraries[kind].functions[step.kernel.name]


class Run(ArrayRun):
    """An ArrayRun that calls what is compiled."""

    fed: tuple[F32, np.float32, NDArray[Any]] | None = None
    #: positions, the input's elements there, and what the residual holds
    gathered: tuple[NDArray[Any], F32, NDArray[Any]] | None = None

    def __init__(self, *args: Any, steps: Steps, **place: Any) -> None:
        super().__init__(*args, **place)
        self.steps = steps

    # the input

    def feed(self, x: F32, factor: np.float32, residual: NDArray[Any]) -> None:
        """Remember the input's parts."""
        self.fed = x, factor, residual

    @property
    def parts(self) -> tuple[F32, np.float32, NDArray[Any]] | None:
        """Those of the input, while it is no array."""
        return None if "g" in self.inputs else self.fed

    def given(self) -> F32:
        """The input, an array from now on."""
        if self.parts is not None:
            self.inputs["g"] = self.perform("input")
        return super().given()

    def op_input(self, expr: Expr) -> Any:
        return self.given() if expr.value == "g" else super().op_input(expr)

    # steps

    def found(self, key: int | str) -> tuple[Step, Callable[..., None]] | None:
        """The step of an expression or field, if it is one."""
        return self.steps.find(key, feed=self.parts is not None)

    def perform(self, key: int | str, *arrays: Any, back: bool = False) -> Any:
        """What a step makes of arrays."""
        found = self.found(key)
        assert found is not None
        step, function = found
        out = np.empty(1 if step.storage == "float64" else self.n, DTYPES[step.storage])
        x, scale, *residual = self.parts or (self.inputs.get("g"), np.float32(1))
        numbers = [float(self.value(e)) for e in step.kernel.statics]
        table = np.array([[0, self.n, self.tensor, self.offset, 0]], np.int64)
        given = {
            "x": x, "table": table, "rows": 1, "payload": out, "at": np.zeros(1, np.int64),
            "used": np.zeros(1, np.int64), "statics": np.array(numbers, np.float64),
            "seed": signed(self.seed), "step": self.step, "scale": scale, "back": back,
        }  # fmt: skip
        states = [*(residual if step.residual else ()), *arrays]
        function(*[passed(given.get(name, 0)) for name in GIVEN], *map(passed, states))
        return out

    def of_leaves(self, key: int | str) -> Any:
        """What a step makes of the arrays that are its own."""
        found = self.found(key)
        assert found is not None
        kinds = [DTYPES[element_steps.STORAGES[e.type.dtype]] for e in found[0].leaves]
        values = map(self.value, found[0].leaves)
        arrays = [matrices.plain(x, kind) for x, kind in zip(values, kinds, strict=True)]
        return self.perform(key, *arrays)

    def stored(self, field: Field) -> U8:
        """The bytes of a payload field; codes come out of their step."""
        return (
            super().stored(field) if self.found(field.name) is None else self.of_leaves(field.name)
        )

    def needs(self, expr: Expr) -> list[Expr]:
        found = self.found(id(expr))
        if found is not None:
            return found[0].needs
        if expr.op == "top_columns":
            return [ranked(expr)]
        return list(expr.args[1:]) if self.of_input(expr) is not None else super().needs(expr)

    def compute(self, expr: Expr) -> Any:
        if self.found(id(expr)) is None:
            return super().compute(expr)
        made = self.of_leaves(id(expr))
        if expr.type.shape == "scalar":
            return made[0]
        return made.astype(np.bool_) if expr.type.dtype == "bool" else made

    # products and selected elements

    def of_input(self, expr: Expr) -> Expr | None:
        """See array_steps.of_gradient; None without feedback."""
        return None if self.parts is None else of_gradient(expr, self.n)

    def op_gather(self, expr: Expr) -> Any:
        at = self.pick(str(expr.value))
        if self.of_input(expr) is not None and self.parts is not None:
            self.gathered = at, *matrices.gather(self.matrix(*self.parts), at)
            return self.gathered[1]
        if expr.args[0].type.dtype != "float":
            return super().op_gather(expr)
        return matrices.gather(Matrix(matrices.plain(self.value(expr.args[0])), 1), at)[0]

    def matrix(self, x: F32, scale: np.float32, residual: NDArray[Any], cols: int = 1) -> Matrix:
        """The input as a matrix."""
        return Matrix(x, cols, scale, residual, self.module.decay)

    def op_matmul(self, expr: Expr) -> F32:
        source = self.of_input(expr)
        if source is None or self.parts is None:
            return super().op_matmul(expr)
        m = self.matrix(*self.parts, cols=self.roomy(source)[1])
        other = self.value(expr.args[1])
        return (matrices.narrow if expr.args[0] is source else matrices.across)(m, other)

    def op_top_columns(self, expr: Expr) -> Any:
        m, k = self.value(ranked(expr)), self.size(expr)[1]
        return matrices.top_columns(m, k, magnitudes=expr.args[0].op == "abs")

    # results

    def result(self) -> Any:
        """Where decode ends with a product its factors, with a scatter the positions and values."""
        product, decode = last_product(self.module), self.module.decode
        if product is not None and np.prod(self.size(product)) >= self.n:
            a, b = map(self.value, product.args)
            return matrices.factors(a, b, short(product))
        if decode.op == "scatter":
            at, values = map(self.value, decode.args)
            return Scattered(np.asarray(at, np.int64), np.asarray(values, np.float32))
        return super().result()

    def write(self, piece: F32, value: Any, *, add: bool) -> None:
        if isinstance(value, Factors):
            matrices.write(piece, value, add=add)
        elif isinstance(value, Scattered):
            matrices.scatter(piece, *value, "add" if add else "set")
        else:
            super().write(piece, value, add=add)

    def finish(self, piece: F32, states: State | None, value: Any, *, write: bool) -> None:
        if states is None or self.fed is None:
            return super().finish(piece, states, value, write=write)
        values = self.updates()
        self.inputs.pop("g", None)  # steps from here on take its parts
        if isinstance(value, Factors):
            matrices.settle(self.matrix(*self.fed), value, back=write)
        elif isinstance(value, Scattered):
            self.leave(self.matrix(*self.fed), value)
            if write:
                self.write(piece, value, add=False)
        elif (found := self.found("kept")) is not None and found[0].leaves:
            self.perform("kept", matrices.plain(value), back=write)
        elif write:  # NaN, as the payload's status says: the residual stays
            self.write(piece, value, add=False)
        return self.keep(states, values)

    def leave(self, m: Matrix, value: Scattered) -> None:
        """Keep the input in the residual, less the values at their positions."""
        assert m.residual is not None
        at, given, held = self.gathered or (value.at[:0], None, None)
        if given is None or held is None or not np.array_equal(at, value.at):
            given, held = matrices.gather(m, value.at)
        self.perform("kept")
        halves.keep(held, given - value.values)
        matrices.scatter(m.residual, value.at, held, "put")


def build(module: Module, params: Mapping[str, Number]) -> ArrayKernels:
    """The backend's entry point for such specs."""
    make = partial(Run, steps=Steps(module))
    return ArrayKernels(module, params, matrices.COMPILED, make)
