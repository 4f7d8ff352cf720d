"""Element by element steps of specs that are computed an array at a time, as compiled loops.

Such a spec (see [Note: arrays] in array_runs.py) is a few operators over whole arrays, and between
them expressions of single elements. Each of those, up to the next array, becomes one loop here,
which the reference computes operator by operator; also sums of such expressions, and codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compll.backends.cpu.text import code
from compll.backends.cpu.values import Values, draws
from compll.backends.reference.array_runs import ArrayRun
from compll.ir.expr import Expr, walk
from compll.ir.module import Field, Module
from compll.ir.static import Number
from compll.numerics import numbers
from compll.numerics import shared_draws as shared
from compll.numerics.matrices import Algebra
from compll.numerics.numbers import LANES, MASK
from compll.numerics.types import U8
from compll.passes.array_steps import arrays, elementwise, outcomes, taken, writes_input

ARRAYS = {"float": "float32", "int": "int32", "bool": "boolean"}
DTYPES = {"float": np.float32, "int": np.int32, "bool": np.bool_, "code": np.uint8}


class Loop(NamedTuple):
    """A compiled step. kind: float, int or bool elements, code, sum.

    leaves: the arrays it reads, in the order of its arguments; scalars: numbers of the tensor.
    """

    name: str
    kind: str
    leaves: tuple[Expr, ...]
    scalars: tuple[Expr, ...]
    signature: str
    text: str


class Emitter(Values):
    """Emits one loop."""

    def __init__(self, module: Module, root: Expr) -> None:
        super().__init__(module, None)
        self.root = root
        self.leaves: list[Expr] = []
        self.numbers: list[Expr] = []
        inner = list(walk(root, into=lambda e: elementwise(e) and e.op != "lift"))
        for e in inner:
            if e.type.shape == "n" and not elementwise(e):
                self.buffers[id(e)] = f"b{len(self.leaves)}"
                self.leaves.append(e)
        self.alike = sorted({int(e.value) for e in inner if e.op == "shared"})
        self.draws = draws(*inner)

    def scalar(self, expr: Expr) -> str:
        """A number of the tensor, or one known before any data."""
        known = next((i for i, e in enumerate(self.numbers) if e is expr), len(self.numbers))
        self.numbers[known:] = [expr] if known == len(self.numbers) else self.numbers[known:]
        return f"(sc[{known}] != 0.0)" if expr.type.dtype == "bool" else f"sc[{known}]"

    def written(self, expr: Expr, i: str) -> str:
        if expr.op == "shared":
            return f"uniform(spread[{i}], a{expr.value}c, a{expr.value}b)"
        return super().written(expr, i)

    def loop(self, name: str, kind: str, field: Field | None) -> Loop:
        """The function."""
        arrays = "".join(f", x{k}" for k in range(len(self.leaves)))
        with self.block(f"def {name}(out, n, first, seed, step, tensor, sc{arrays}):"):
            self.scratch(kind)
            with self.block(f"for t in range((n + {self.tile - 1}) // {self.tile}):"):
                self.add(f"start = t * {self.tile}")
                self.add(f"m = min(n - start, {self.tile})")
                self.keys()
                for k in range(len(self.leaves)):
                    self.add(f"b{k} = x{k}[start : start + m]")
                self.body(kind, field)
        types = {"sum": "float32", "code": "uint8"} | ARRAYS
        given = "".join(f", {ARRAYS[e.type.dtype]}[::1]" for e in self.leaves)
        place = "int64, int64, uint64, int64, int64, float64[::1]"
        signature = f"void({types[kind]}[::1], {place}{given})"
        return Loop(name, kind, tuple(self.leaves), tuple(self.numbers), signature, str(self))

    def scratch(self, kind: str) -> None:
        if kind == "sum":
            self.add(f"red = np.empty({self.tile}, np.float32)")
            self.add(f"acc = np.empty({LANES}, np.float32)")
        if self.draws or self.alike:
            self.add(f"spread = np.empty({self.tile}, np.uint32)")
            with self.block(f"for i in range({self.tile}):"):
                self.add("spread[i] = weyl(u32(i))")
        self.prepare(self.root)

    def keys(self) -> None:
        """The keys of this tile's draws."""
        for number in self.draws:
            self.draw(number, "(first + start)")
        for number in self.alike:
            a, draw = f"a{number}", (shared.ELEMENTS - number) & MASK
            self.add(f"{a}h = (first + start) >> 32")
            self.add(f"{a} = stream(u64(0), u64(step), u64(tensor), u64({draw}), u64({a}h))")
            self.add(f"{a}b = u32({a} & u64(0xFFFFFFFF))")
            self.add(f"{a}c = counter(u32(first + start), u32({a} >> u64(32)))")

    def body(self, kind: str, field: Field | None) -> None:
        if kind != "sum":
            self.add("o = out[start : start + m]")
        with self.block("for i in range(m):"):
            text = self.text(self.root, "i")
            if kind == "code" and field is not None:
                text = code(field.most.bit_length(), self.root, text)
            self.add(f"{'red' if kind == 'sum' else 'o'}[i] = {text}")
        if kind == "sum":
            self.lanes()

    def lanes(self) -> None:
        """Add a tile up, in the order of [Note: order of sums]."""
        with self.block(f"for i in range(m, {self.tile}):"):
            self.add("red[i] = ZERO")
        with self.block(f"for i in range({LANES}):"):
            self.add("acc[i] = red[i]")
        with (
            self.block(f"for k in range({LANES}, {self.tile}, {LANES}):"),
            self.block(f"for i in range({LANES}):"),
        ):
            self.add("acc[i] += red[k + i]")
        self.add("fold(acc)")
        self.add("out[t] = acc[0]")


class Loops:
    """The loops of a module: `steps` by the expression that they compute, `codes` by field.

    spares: whether no step needs gradient plus residual as an array.
    """

    def __init__(self, module: Module) -> None:
        self.spares = not writes_input(module, 1)
        self.steps: dict[int, Loop] = {}
        self.codes: dict[str, Loop] = {}
        coded = {f.name: f for f in module.fields if f.most and f.shape == "n"}
        for name, f in coded.items():
            assert f.expr is not None
            self.codes[name] = Emitter(module, f.expr).loop(f"code_{name}", "code", f)
        for e in _found(module, coded):
            kind, root = ("sum", e.args[0]) if e.op == "reduce_sum" else (e.type.dtype, e)
            made = Emitter(module, root).loop(f"step{len(self.steps)}", kind, None)
            self.steps[id(e)] = made

    def __iter__(self) -> Iterator[Loop]:
        yield from self.steps.values()
        yield from self.codes.values()


def _found(module: Module, coded: Mapping[str, Field]) -> Iterator[Expr]:
    """The expressions that arrays are made of, and sums; not those stored as codes alone."""
    roots = outcomes(module)
    codes = {id(f.expr) for f in coded.values()}
    needed = {id(e) for e in taken(*roots)} | {id(module.decode)}
    yield from (e for e in arrays(*roots) if id(e) not in codes or id(e) in needed)
    yield from (e for e in walk(*roots) if e.op == "reduce_sum" and e.args[0].type.shape == "n")


class LoopRun(ArrayRun):
    """An ArrayRun that calls compiled loops for what single elements make."""

    def __init__(
        self,
        module: Module,
        params: Mapping[str, Number],
        n: int,
        algebra: Algebra,
        loops: Loops,
        kernels: Any,
        **place: int,
    ) -> None:
        super().__init__(module, params, n, algebra, **place)
        self.loops, self.kernels = loops, kernels

    def needs(self, expr: Expr) -> list[Expr]:
        loop = self.loops.steps.get(id(expr))
        if loop is None:
            return super().needs(expr)
        return [e for e in (*loop.leaves, *loop.scalars) if e.type.shape != "static"]

    def compute(self, expr: Expr) -> Any:
        loop = self.loops.steps.get(id(expr))
        return super().compute(expr) if loop is None else self.called(loop)

    def stored(self, field: Field) -> U8:
        """The bytes of a payload field; codes come out of their loop."""
        loop = self.loops.codes.get(field.name)
        return super().stored(field) if loop is None else self.called(loop)

    def called(self, loop: Loop) -> Any:
        """What a loop gives."""
        tiles = -(-self.n // self.tile)
        out: Any = np.empty(tiles if loop.kind == "sum" else self.n, DTYPES.get(loop.kind, "f4"))
        given = [np.require(self.value(e), DTYPES[e.type.dtype], ["C", "W"]) for e in loop.leaves]
        scalars = np.array([float(self.value(e)) for e in loop.scalars], np.float64)
        getattr(self.kernels, loop.name)(
            out, self.n, self.offset, self.seed, self.step, self.tensor, scalars, *given
        )
        return summed(out) if loop.kind == "sum" else out


def summed(parts: NDArray[np.float32]) -> float:
    """The sum of the sums of tiles, in the order of [Note: order of sums]."""
    size = -(-len(parts) // LANES) * LANES
    return float(numbers.lane_sums(parts.astype(np.float64), size)[0])
