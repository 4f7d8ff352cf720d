"""The reference backend: NumPy, one operator at a time. It defines what a spec means.

Speed is no goal. Every other backend is tested against this one, payload byte for payload byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from compll import feedback, passes
from compll.arrays import HostArrays
from compll.backends import fields, halves, numbers, shared
from compll.backends.elementwise import MEANING
from compll.backends.numbers import F32
from compll.batches import Incoming, State
from compll.errors import PayloadError
from compll.ir import Expr, Field, Module, Selection, Type
from compll.layout import header, layout, tile_of
from compll.static import Number, as_count, evaluate

if TYPE_CHECKING:
    from compll.backends.array_runs import ArrayKernels

U8 = NDArray[np.uint8]


class Run:
    """One encode or decode of one tensor (or partition)."""

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
    ) -> None:
        self.module, self.n, self.tile = module, n, tile_of(module)
        self.env: dict[str, Number] = dict(params) | {"n": n, "step": step}
        self.seed, self.step, self.tensor, self.offset = seed, step, tensor, offset
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

    def stored(self, field: Field) -> U8:
        """The bytes of a payload field."""
        assert field.expr is not None
        return fields.stored(field, self.value(field.expr), self.tile, self.n)

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

    # leaves

    def op_input(self, expr: Expr) -> Any:
        return self.inputs[expr.value]

    op_state = op_field = op_input

    def op_uniform(self, expr: Expr) -> Any:
        return numbers.uniform(
            self.seed, self.step, self.tensor, expr.value, self.offset, self.n, self.tile
        )

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

    # selections

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

    def op_quantiles(self, expr: Expr) -> Any:
        key = np.sort(numbers.order_key(self.value(expr.args[0])))
        return numbers.from_key(key[np.arange(1, expr.value) * len(key) // expr.value])

    def op_bucket(self, expr: Expr) -> Any:
        x, edges = (numbers.order_key(self.value(a)) for a in expr.args)
        return np.searchsorted(edges, x, side="right")

    def op_mean_by(self, expr: Expr) -> Any:
        index, x = (self.value(a) for a in expr.args)
        return numbers.mean_by(index, x, expr.value)

    def op_lookup(self, expr: Expr) -> Any:
        table, index = (self.value(a) for a in expr.args)
        return table[np.clip(index, 0, len(table) - 1)]

    def pick(self, name: str) -> NDArray[np.int64]:
        """Positions of a selection's elements, ascending."""
        if name not in self.picked:
            selection = self.selections[name]
            limit = as_count(evaluate(selection.limit, self.env), self.n)
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

    def op_in(self, expr: Expr) -> Any:
        mask = np.zeros(self.n, np.bool_)
        mask[self.pick(str(expr.value))] = True
        return mask

    def op_indices(self, expr: Expr) -> Any:
        return self.pick(str(expr.value))

    def op_gather(self, expr: Expr) -> Any:
        return self.value(expr.args[0])[self.pick(str(expr.value))]

    def op_scatter(self, expr: Expr) -> Any:
        out = np.zeros(self.n, np.float32)
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


def encode(
    module: Module,
    params: Mapping[str, Number],
    x: F32,
    states: dict[str, NDArray[Any]] | None,
    *,
    seed: int,
    step: int,
    tensor: int,
    offset: int,
    scale: float,
    writeback: bool,
    early: tuple[str, ...] = (),
) -> U8:
    """Encode one piece: x and states are views that are updated in place."""
    run = Run(module, params, len(x), seed=seed, step=step, tensor=tensor, offset=offset)
    if len(x) == 0:
        return np.zeros(0, np.uint8)
    with np.errstate(all="ignore"):
        return _encode(run, x, states, np.float32(scale), writeback, early)


def _encode(
    run: Run,
    x: F32,
    states: dict[str, NDArray[Any]] | None,
    scale: np.float32,
    writeback: bool,
    early: tuple[str, ...],
) -> U8:
    module, g = run.module, x * scale
    run.inputs = {name: halves.read(held) for name, held in (states or {}).items()}
    feed = module.feedback and states is not None
    if feed:
        g = g + run.inputs["residual"]
    run.inputs["g"] = g
    for state in module.states:
        if state.name != "residual":
            default = np.zeros(run.n if state.shape == "n" else 1, np.float32)
            value = run.inputs.get(state.name, default)
            run.inputs[state.name] = value if state.shape == "n" else np.float64(value[0])
    exprs = dict(module.updates)
    if feed:
        source = module.pool.make("input", (), Type("float", "n"), "g")
        assert module.decoded is not None
        exprs["residual"] = feedback.residual_update(module.pool, source, module.decoded)
    kept = _early(run, exprs, early) if states is not None or module.updates else {}
    payload = written(run, lambda: g)
    updates = {name: run.value(e) for name, e in exprs.items()}
    for name, held in (states or {}).items():
        if name in updates:
            halves.keep(held, updates[name], kept.get(name))
    if writeback:
        x[:] = decode(module, run.env, payload, len(x))
    return payload


def _early(run: Run, exprs: Mapping[str, Expr], early: tuple[str, ...]) -> dict[str, F32]:
    """What states hold after the first pass, where they are stored in it: [Note: early states]."""
    outside = {name: exprs[name].args[2] for name in early}
    values = {name: run.value(e) for name, e in outside.items()}
    kept = {name: np.where(np.isfinite(v), v, run.inputs[name]) for name, v in values.items()}
    run.done = {id(e): kept[name] for name, e in outside.items()}
    return kept


def written(run: Run, g: Callable[[], F32]) -> U8:
    """The payload; g: the input, asked for where a status tells whether it was finite."""
    module = run.module
    kept = {s.name: len(run.pick(s.name)) for s in module.selections}
    stored = {f.name: run.stored(f) for f in module.fields}
    counted, gaps = header(module)
    lengths = {name: len(stored[name]) for name in gaps}
    place = layout(module, run.n, kept, lengths)
    out = np.zeros(place.total, np.uint8)
    head = [kept[name] for name in counted] + [lengths[name] for name in gaps]
    out[: 4 * len(head)] = np.array(head, "<u4").view(np.uint8)
    for start, data in zip(place.starts, stored.values(), strict=True):
        out[start : start + len(data)] = data
    if module.status:
        out[-1] = not np.isfinite(g()).all()
    return out


def decode(
    module: Module, params: Mapping[str, Number], payload: U8, n: int, run: Run | None = None
) -> F32:
    """The float32 [n] values of a payload, computed by `run`. Raises PayloadError."""
    run = run or Run(module, params, n)
    if n == 0 and len(payload) == 0:
        return np.zeros(0, np.float32)
    read(module, payload, n, run)
    with np.errstate(all="ignore"):
        out = np.asarray(run.value(module.decode), np.float32)
    return np.full(n, np.nan, np.float32) if module.status and payload[-1] else out


def read(module: Module, payload: U8, n: int, run: Run) -> None:
    """Give `run` the fields of a payload. Raises PayloadError."""
    kept = fields.read_counts(module, run.env, payload, n)
    lengths = fields.read_lengths(module, payload)
    where = layout(module, n, kept, lengths)
    if len(payload) != where.total:
        raise PayloadError(
            f"{module.name}: a payload of {n} elements has {where.total} bytes here, "
            f"this one {len(payload)}"
        )
    drawn = {s.name for s in module.selections if s.kind == "drawn"}
    run.picked = {name: np.arange(count) for name, count in kept.items() if name not in drawn}
    for field, start in zip(module.fields, where.starts, strict=True):
        data = payload[start : start + lengths.get(field.name, len(payload))]
        run.inputs[field.name] = fields.loaded(field, data, n, run.tile, kept.get(field.of, 0))
    fields.check_indices(module, run.inputs, n)


class Kernels:
    """The backend's batch interface (see batches.Backend)."""

    arrays = HostArrays()
    fuses = False

    def __init__(self, module: Module, params: Mapping[str, Number]) -> None:
        self.module, self.params = module, params
        self.early = passes.early(module)

    def encode_batch(
        self,
        x: F32,
        table: NDArray[np.int64],
        out: U8,
        at: NDArray[np.int64],
        state: State | None,
        *,
        seed: int,
        step: int,
        scale: float,
        writeback: bool,
        incoming: Incoming | None = None,
    ) -> NDArray[np.int64]:
        """Encode piece after piece."""
        assert incoming is None
        used = np.zeros(len(table), np.int64)
        for i, (start, length, tensor, offset, first) in enumerate(table.tolist()):
            views = None if state is None else self.views(state, first, length, tensor)
            payload = encode(
                self.module,
                self.params,
                x[start : start + length],
                views,
                seed=seed,
                step=step,
                tensor=tensor,
                offset=offset,
                scale=scale,
                writeback=writeback,
                early=self.early,
            )
            out[at[i] : at[i] + len(payload)] = payload
            used[i] = len(payload)
        return used

    def views(self, state: State, first: int, length: int, tensor: int) -> dict[str, NDArray[Any]]:
        """The part of the state arrays that belongs to one piece."""
        spans = {
            s.name: (tensor, 1) if s.shape == "scalar" else (first, length)
            for s in self.module.states
        }
        return {name: state[name][a : a + k] for name, (a, k) in spans.items()}

    def decode_batch(
        self,
        payload: U8,
        table: NDArray[np.int64],
        at: NDArray[np.int64],
        used: NDArray[np.int64],
        out: F32,
        *,
        add: bool,
    ) -> None:
        """Decode all pieces, then write them."""
        values = [
            decode(self.module, self.params, payload[a : a + u], length)
            for a, u, length in zip(at.tolist(), used.tolist(), table[:, 1].tolist(), strict=True)
        ]
        for (start, length), value in zip(table[:, :2].tolist(), values, strict=True):
            piece = out[start : start + length]
            piece[:] = piece + value if add else value

    def raise_found(self) -> None:
        """A bad payload was told at once."""


def build(module: Module, params: Mapping[str, Number]) -> Kernels | ArrayKernels:
    """The backend's entry point."""
    if module.arrays:
        from compll.backends.array_runs import ArrayKernels
        from compll.backends.matrix_numbers import NUMPY

        return ArrayKernels(module, params, NUMPY)
    return Kernels(module, params)
