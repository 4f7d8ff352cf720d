"""The value of an expression, by the values of its arguments: NumPy, one operator at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.backends.reference.elementwise import MEANING
from compll.ir.expr import Expr, Type
from compll.ir.layout import tile_of
from compll.ir.module import Module, Selection
from compll.ir.static import Number, as_count, evaluate
from compll.numerics import numbers
from compll.numerics import shared_draws as shared


class Evaluation:
    """Values in one encode or decode of one tensor (or partition), each computed once.

    Operators that are not elementwise are methods `op_NAME` of a Run.
    """

    def __init__(
        self,
        module: Module,
        params: Mapping[str, Number],
        n: int,
        *,
        seed: int = 0,
        step: int = 0,
        tensor: int = 0,
        offset: int = 0,
        most: int | None = None,
    ) -> None:
        self.module, self.n, self.tile = module, n, tile_of(module)
        self.env: dict[str, Number] = dict(params) | {"n": n, "step": step}
        self.seed, self.step, self.tensor, self.offset = seed, step, tensor, offset
        self.most = most
        self.inputs: dict[str, Any] = {}
        self.done: dict[int, Any] = {}
        self.picked: dict[str, NDArray[np.int64]] = {}
        self.selections = {s.name: s for s in module.selections}

    def value(self, expr: Expr) -> Any:
        """The value of an expression: a number, or an array over its level."""
        if expr.type.shape == "static":
            return evaluate(expr, self.env)
        stack = [expr]
        while stack:
            waits = [a for a in self.needs(stack[-1]) if id(a) not in self.done]
            if waits:
                stack.extend(waits)
                continue
            e = stack.pop()
            if id(e) not in self.done:
                self.done[id(e)] = self.typed(self.compute(e), e.type)
        return self.done[id(expr)]

    def needs(self, expr: Expr) -> list[Expr]:
        """The arguments to compute first: all, or of a `choose` its condition, then one branch."""
        args = expr.args
        if expr.op == "choose":
            known = args[0].type.shape == "static" or id(args[0]) in self.done
            args = (args[1 if self.value(args[0]) else 2],) if known else args[:1]
        return [a for a in args if a.type.shape != "static"]

    @staticmethod
    def typed(value: Any, type: Type) -> Any:
        if type.dtype == "float":
            return np.float64(value) if type.shape == "scalar" else np.asarray(value, np.float32)
        if type.dtype == "int" and type.shape != "scalar":
            return np.asarray(value, np.int32)
        if type.dtype == "int" and np.asarray(value).dtype.kind in "bi":
            return np.int64(value)  # no element: int32's bounds are not its own
        return value

    def compute(self, expr: Expr) -> Any:
        if expr.op in MEANING:
            return MEANING[expr.op](*(self.argument(a, expr) for a in expr.args))
        return getattr(self, f"op_{expr.op}")(expr)

    def argument(self, arg: Expr, user: Expr) -> Any:
        value = self.value(arg)
        if user.type.shape == "scalar" and arg.type.dtype == "float":
            return np.float64(value)
        return value

    # selections

    def pick(self, name: str) -> NDArray[np.int64]:
        """Positions of a selection's elements, ascending."""
        if name not in self.picked:
            selection = self.selections[name]
            limit = as_count(evaluate(selection.limit, self.env), self.n)
            if selection.dynamic and self.most is not None:
                limit = min(limit, self.most)
            self.picked[name] = self.choose_elements(selection, limit)
        return self.picked[name]

    def choose_elements(self, selection: Selection, limit: int) -> NDArray[np.int64]:
        if selection.kind == "drawn":
            return shared.positions(self.step, self.tensor, self.offset, self.n, limit)
        key = self.value(selection.key)
        if selection.kind == "filter":
            return np.flatnonzero(key)[:limit]
        assert selection.threshold is not None
        order = numbers.order_key(key)
        least = numbers.order_key(np.array([self.value(selection.threshold)], np.float32))[0]
        above = order > least
        ties = np.flatnonzero(order == least)[: max(0, limit - int(np.count_nonzero(above)))]
        above[ties] = True
        return np.flatnonzero(above)[:limit]
