"""Values of expressions over one tensor (or partition): NumPy, one operator at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.backends.reference import fields
from compll.backends.reference.elementwise import MEANING
from compll.errors import PayloadError
from compll.ir.expr import Expr, Type
from compll.ir.layout import tile_of
from compll.ir.module import Field, Module, Selection
from compll.ir.static import Number, as_count, evaluate
from compll.numerics import numbers
from compll.numerics import shared_draws as shared
from compll.numerics.types import U8


class Run:
    """Values in one encode or decode of one tensor (or partition), each computed once.

    Operators that are not elementwise are methods `op_NAME`.
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
        """The arguments to compute first: all; for a `choose` its condition, then one branch."""
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
            return np.int64(value)  # not an element: int32's bounds do not apply
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

    def stored(self, field: Field) -> U8:
        """The bytes of a payload field."""
        assert field.expr is not None
        return fields.stored(field, self.value(field.expr), self.tile, self.among(field))

    def among(self, field: Field) -> int:
        """Number of elements from which a field holds all, or the selected ones."""
        outer = self.module.among(field.of)
        return len(self.pick(outer)) if outer else self.n

    # leaves

    def op_input(self, expr: Expr) -> Any:
        return self.inputs[expr.value]

    op_state = op_field = op_input

    def op_uniform(self, expr: Expr) -> Any:
        return numbers.uniform(
            self.seed, self.step, self.tensor, expr.value, self.offset, self.n, self.tile
        )

    def op_shared(self, expr: Expr) -> Any:
        return shared.uniform(self.step, self.tensor, expr.value, self.offset, self.n, self.tile)

    def op_group_size(self, expr: Expr) -> Any:
        sizes = np.full(-(-self.n // self.tile), self.tile, np.float32)
        sizes[-1:] = self.n - (len(sizes) - 1) * self.tile
        return sizes

    # conversions

    def op_lift(self, expr: Expr) -> Any:
        (arg,) = expr.args
        value, shape = self.value(arg), expr.type.shape
        if arg.type.shape == "group":
            return np.repeat(value, self.tile)[: self.n]
        size = {"n": self.n, "group": -(-self.n // self.tile)}.get(shape)
        if size is None:
            size = len(self.pick(expr.type.of)) if shape == "kept" else 1
        dtype = {"float": np.float32, "int": np.int32, "bool": np.bool_}[arg.type.dtype]
        return np.full(size, value, dtype)

    def op_float(self, expr: Expr) -> Any:
        value = self.value(expr.args[0])
        return (
            np.float64(value)
            if expr.type.shape == "scalar"
            else np.asarray(value).astype(np.float32)
        )

    def op_int(self, expr: Expr) -> Any:
        return np.asarray(self.value(expr.args[0])).astype(np.int32)

    def op_trunc(self, expr: Expr) -> Any:
        value = np.asarray(self.value(expr.args[0]))
        if expr.type.shape == "scalar":  # already clamped: see Rules.whole_number
            return np.int64(value)
        return np.where(
            np.isfinite(value), np.clip(np.trunc(value), -(2.0**31), 2.0**31 - 128), 0
        ).astype(np.int32)

    def op_code(self, expr: Expr) -> Any:
        field = next(f for f in self.module.fields if f.name == expr.value)
        return fields.code(self.value(expr.args[0]), (1 << field.bits) - 1)

    def op_choose(self, expr: Expr) -> Any:
        return self.value(expr.args[1 if self.value(expr.args[0]) else 2])

    # reductions

    def op_reduce_sum(self, expr: Expr) -> Any:
        values = self.value(expr.args[0]).reshape(-1)
        if expr.type.shape == "group":
            return numbers.lane_sums(values, self.tile)
        return numbers.total(values, self.tile)

    def extreme(self, expr: Expr, ufunc: Any) -> Any:
        key = numbers.order_key(self.value(expr.args[0]).reshape(-1))
        if expr.type.shape == "group":
            return numbers.from_key(ufunc.reduceat(key, np.arange(0, self.n, self.tile)))
        return numbers.from_key(np.atleast_1d(ufunc.reduce(key)))[0] if len(key) else 0.0

    def op_reduce_max(self, expr: Expr) -> Any:
        return self.extreme(expr, np.maximum)

    def op_reduce_min(self, expr: Expr) -> Any:
        return self.extreme(expr, np.minimum)

    def op_count_kept(self, expr: Expr) -> Any:
        name = str(expr.value if expr.value is not None else expr.type.of)
        return len(self.pick(name))

    # thresholds

    def op_sample(self, expr: Expr) -> Any:
        count = as_count(self.value(expr.args[1]), self.n)
        at = numbers.sample_positions(self.seed, self.step, self.tensor, self.n, count)
        return self.value(expr.args[0])[at]

    def op_kth_largest(self, expr: Expr) -> Any:
        key = numbers.order_key(self.value(expr.args[0]))
        k = max(1, as_count(float(self.value(expr.args[1])), len(key)))
        return numbers.from_key(np.partition(key, len(key) - k)[len(key) - k :][:1])[0]

    def op_adjust(self, expr: Expr) -> Any:
        x = self.value(expr.args[0])
        t, low, high, down, up, tries = (float(self.value(a)) for a in expr.args[1:])
        for _ in range(int(max(0, min(tries, 100)))):
            count = int(np.count_nonzero(x >= np.float32(t)))
            if low <= count <= high:
                break
            t = t * down if count < low else t * up
        return t

    def op_bisect(self, expr: Expr) -> Any:
        x = self.value(expr.args[0])
        low, high, fewest, most, tries = (float(self.value(a)) for a in expr.args[1:])
        t = low + (high - low) / 2
        for _ in range(int(max(0, min(tries, 100)))):
            t = low + (high - low) / 2
            count = int(np.count_nonzero(x >= np.float32(t)))
            if fewest <= count <= most:
                break
            low, high = (low, t) if count < fewest else (t, high)
        return t

    def op_adjusted_count(self, expr: Expr) -> Any:
        (adjusted,) = expr.args
        return np.count_nonzero(self.value(adjusted.args[0]) >= np.float32(self.value(adjusted)))

    # tables

    def op_literal(self, expr: Expr) -> Any:
        return np.array(expr.value, np.float32)

    def op_quantiles(self, expr: Expr) -> Any:
        key = np.sort(numbers.order_key(self.value(expr.args[0])))
        return numbers.from_key(key[np.arange(1, expr.value) * len(key) // expr.value])

    def op_bucket(self, expr: Expr) -> Any:
        x, edges = (numbers.order_key(self.value(a)) for a in expr.args)
        found = np.searchsorted(edges, x.reshape(-1), side="right")
        return found[0] if expr.type.shape == "scalar" else found.reshape(x.shape)

    def op_lookup(self, expr: Expr) -> Any:
        table, index = (self.value(a) for a in expr.args)
        return table.take(index, mode="clip")

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

    def length(self, type: Type) -> int:
        """Number of elements: the tensor's, or the selected ones."""
        return len(self.pick(type.of)) if type.shape == "kept" else self.n

    def op_in(self, expr: Expr) -> Any:
        mask = np.zeros(self.length(expr.type), np.bool_)
        mask[self.pick(str(expr.value))] = True
        return mask

    def op_indices(self, expr: Expr) -> Any:
        return self.pick(str(expr.value))

    def op_gather(self, expr: Expr) -> Any:
        return self.value(expr.args[0])[self.pick(str(expr.value))]

    def op_scatter(self, expr: Expr) -> Any:
        out = np.zeros(self.length(expr.type), np.float32)
        out[self.value(expr.args[0])] = self.value(expr.args[1])
        return out

    def op_spread(self, expr: Expr) -> Any:
        inside, values = map(self.value, expr.args)
        if np.count_nonzero(inside) != len(values):
            raise PayloadError(
                f"{self.module.name}: {len(values)} values for {np.count_nonzero(inside)} elements"
            )
        out = np.zeros(self.n, np.float32)
        out[inside] = values
        return out
