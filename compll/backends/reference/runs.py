"""Values of expressions over one tensor (or partition): NumPy, one operator at a time.

[Note: combined] The ranks add up their stored values of a round; `combined` divides the sum by
their number. A single worker combines with itself. For a maximum, a value that is not finite is
stored as infinity: libraries differ in whether a maximum with NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compll.backends.reference import fields
from compll.errors import PayloadError, UsageError
from compll.ir.expr import Expr, Type
from compll.ir.layout import tile_of
from compll.ir.module import Field, Module, Selection
from compll.ir.static import Number, as_count, evaluate, extents, short
from compll.numerics import draws, matrices, numbers
from compll.numerics.bits import IN_NUMPY, code, from_key, order_key
from compll.numerics.numbers import F32, U8, Tries


class Place(NamedTuple):
    """The numbers that decide draws: offset is the place of the piece in its tensor."""

    seed: int
    step: int
    tensor: int
    offset: int


class Run:
    """Values in one encode or decode of one tensor (or partition), each computed once.

    Operators that are not elementwise are methods `op_NAME`.
    """

    def __init__(
        self,
        module: Module,
        params: Mapping[str, Number],
        n: int,
        place: Place,
        most: int | None = None,
    ) -> None:
        self.module, self.n, self.tile = module, n, tile_of(module)
        self.env: dict[str, Number] = dict(params) | {"n": n, "step": place.step}
        self.place, self.most = place, most
        self.inputs: dict[str, Any] = {}
        self.done: dict[Expr, Any] = {}
        self.picked: dict[str, NDArray[np.int64]] = {}
        self.selections = {s.name: s for s in module.selections}
        self.fields = {f.name: f for f in module.fields}
        #: values that the ranks have combined so far
        self.combined: dict[str, Any] = {}
        self.extremes = {name for name, how in module.rounds if how == "max"}

    def again(self) -> Run:
        """A fresh run in the same place."""
        return Run(self.module, self.env, self.n, self.place)

    def value(self, expr: Expr) -> Any:
        """The value of an expression: a number, or an array over its level."""
        if expr.type.shape == "static":
            return evaluate(expr, self.env)
        stack = [expr]
        while stack:
            waits = [a for a in self.needs(stack[-1]) if a not in self.done]
            if waits:
                stack.extend(waits)
                continue
            e = stack.pop()
            if e not in self.done:
                self.done[e] = self.typed(self.compute(e), e.type)
        return self.done[expr]

    def needs(self, expr: Expr) -> list[Expr]:
        """The arguments to compute first: all; for a `choose` its condition, then one branch."""
        args = expr.args
        if expr.op == "choose":
            ready = args[0].type.shape == "static" or args[0] in self.done
            args = (args[1 if self.value(args[0]) else 2],) if ready else args[:1]
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
        if expr.type.shape == "matrix":
            self.size(expr)  # raises for sizes that would take all memory
        if expr.op in IN_NUMPY:
            return IN_NUMPY[expr.op](*(self.argument(a, expr) for a in expr.args))
        if expr.op in matrices.OPERATORS:
            number = self.size(expr)[1] if expr.value is None else expr.value
            return matrices.OPERATORS[expr.op](*map(self.value, expr.args), number)
        return getattr(self, f"op_{expr.op}")(expr)

    def argument(self, arg: Expr, user: Expr) -> Any:
        """The value of an argument, in 64 bits for a number of the whole tensor."""
        value, dtype = self.value(arg), arg.type.dtype
        if user.type.shape == "scalar" and dtype in ("float", "int"):
            return np.float64(value) if dtype == "float" else np.int64(value)
        return value

    def stored(self, field: Field) -> U8:
        """The bytes of a payload field."""
        assert field.expr is not None
        value = self.value(field.expr)
        if field.name in self.extremes:
            # The all-reduce of a maximum may lose a NaN: see [Note: combined].
            value = np.where(np.isfinite(value), value, np.inf)
        return fields.stored(field, value, self.tile, self.among(field))

    def own_value(self, field: Field) -> Any:
        """The value of this worker's own payload field, as a decoder reads it."""
        kept = len(self.pick(field.of)) if field.shape == "kept" else 0
        return fields.loaded(field, self.stored(field), self.among(field), self.tile, kept)

    def among(self, field: Field) -> int:
        """Number of elements from which a field holds all, or the selected ones."""
        outer = self.module.among(field.of)
        return len(self.pick(outer)) if outer else self.n

    # leaves

    def op_input(self, expr: Expr) -> Any:
        return self.inputs[expr.value]

    op_state = op_field = op_input

    def op_uniform(self, expr: Expr) -> Any:
        seed, step, tensor, offset = self.place
        return draws.uniform(seed, step, tensor, expr.value, offset, self.n, self.tile)

    def op_shared(self, expr: Expr) -> Any:
        _, step, tensor, offset = self.place
        return draws.shared_uniform(step, tensor, expr.value, offset, self.n, self.tile)

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

    def op_code(self, expr: Expr) -> Any:
        field = next(f for f in self.module.fields if f.name == expr.value)
        return code(self.value(expr.args[0]), (1 << field.bits) - 1)

    def op_choose(self, expr: Expr) -> Any:
        return self.value(expr.args[1 if self.value(expr.args[0]) else 2])

    # reductions

    def op_reduce_sum(self, expr: Expr) -> Any:
        values = self.value(expr.args[0]).reshape(-1)
        if expr.type.shape == "group":
            return numbers.lane_sums(values, self.tile)
        return numbers.total(values, self.tile)

    def extreme(self, expr: Expr, ufunc: Any) -> Any:
        key = order_key(self.value(expr.args[0]).reshape(-1))
        if expr.type.shape == "group":
            return from_key(ufunc.reduceat(key, np.arange(0, self.n, self.tile)))
        return from_key(np.atleast_1d(ufunc.reduce(key)))[0] if len(key) else 0.0

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
        at = draws.sample_positions(*self.place[:3], self.n, count)
        return self.value(expr.args[0])[at]

    def op_kth_largest(self, expr: Expr) -> Any:
        key = order_key(self.value(expr.args[0]))
        k = max(1, as_count(float(self.value(expr.args[1])), len(key)))
        return from_key(np.partition(key, len(key) - k)[len(key) - k :][:1])[0]

    def op_adjust(self, expr: Expr) -> Any:
        x, *given = (self.value(a) for a in expr.args)
        rule = Tries(expr.op, [float(v) for v in given])
        low, high, left = rule.begin()
        while True:
            t = rule.threshold(low, high)
            count = np.count_nonzero(x >= np.float32(t))
            if rule.fits(count) or left <= 0:
                return t
            low, high = rule.after(low, high)[int(not count < rule.fewest)]
            left -= 1

    op_bisect = op_adjust

    def op_adjusted_count(self, expr: Expr) -> Any:
        (adjusted,) = expr.args
        return np.count_nonzero(self.value(adjusted.args[0]) >= np.float32(self.value(adjusted)))

    # tables

    def op_literal(self, expr: Expr) -> Any:
        return np.array(expr.value, np.float32)

    def op_quantiles(self, expr: Expr) -> Any:
        key = np.sort(order_key(self.value(expr.args[0])))
        return from_key(key[np.arange(1, expr.value) * len(key) // expr.value])

    def op_bucket(self, expr: Expr) -> Any:
        x, edges = (order_key(np.asarray(self.value(a), np.float32)) for a in expr.args)
        result = np.searchsorted(edges, x.reshape(-1), side="right")
        return result[0] if expr.type.shape == "scalar" else result.reshape(x.shape)

    def op_lookup(self, expr: Expr) -> Any:
        table, index = (self.value(a) for a in expr.args)
        return matrices.lookup(table.reshape(-1), index)

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
            return draws.shared_positions(*self.place[1:], self.n, limit)
        key = self.value(selection.key)
        if selection.kind == "filter":
            return np.flatnonzero(key)[:limit]
        assert selection.threshold is not None
        order = order_key(key)
        least = order_key(np.array([self.value(selection.threshold)], np.float32))[0]
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

    # matrices

    def size(self, expr: Expr) -> tuple[int, int]:
        """Rows and columns."""
        return extents(expr.type.dims, self.n)

    def op_matrix(self, expr: Expr) -> F32:
        rows, cols = self.roomy(expr)
        return matrices.padded(self.value(expr.args[0]), rows, cols)

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
        return matrices.product(left, right, short(expr))

    def op_sum_by(self, expr: Expr) -> F32:
        index, x = (self.value(a).reshape(-1) for a in expr.args)
        return numbers.sum_by(index, x, self.size(expr)[1])[None]

    def op_transpose(self, expr: Expr) -> Any:
        return self.value(expr.args[0]).T

    def op_orthonormal(self, expr: Expr) -> F32:
        a, *spare = map(self.value, expr.args)
        return matrices.orthonormal(a, spare[0] if spare else np.zeros_like(a))

    def op_ones(self, expr: Expr) -> F32:
        return np.ones(self.size(expr), np.float32)

    def op_random_matrix(self, expr: Expr) -> F32:
        return matrices.random_matrix(*self.place[1:3], *self.size(expr))

    def op_chosen(self, expr: Expr) -> Any:
        seed, step, tensor, offset = self.place
        u = draws.uniform(seed, step, tensor, expr.value, offset, 1)
        chances = self.value(expr.args[0])
        return matrices.chosen(chances[0], float(u[0]), self.size(expr)[1])[None]

    def op_take_columns(self, expr: Expr) -> F32:
        return matrices.take_columns(*map(self.value, expr.args))

    def op_combined(self, expr: Expr) -> Any:
        name = str(expr.value)
        if name not in self.combined:
            self.combined[name] = self.own_value(self.fields[name])
        return self.combined[name]
