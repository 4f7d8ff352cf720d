"""The CUDA backend: generated kernels on arrays in device memory.

Kernels run on torch's current stream, or on CuPy's where one has been set. Nothing inside an encode
or decode of a batch waits for the device, and after the first call with a table and a step's
numbers nothing is allocated or copied from the host, so that a call can be captured in a CUDA
graph. Where `used` in host memory varies from call to call it is copied in each: a captured decode
takes it in device memory.

Calls of one codec share scratch memory, and the array of bytes used that an encode returns is the
codec's until the next call with its table: order them, by one stream or by events. What is kept for
the older half of 1024 tables is dropped when another comes, and all when memory runs out or a call
is interrupted; graphs captured before must be captured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from compll.backends.cuda.arrays import ArrayKernels
from compll.backends.cuda.device import CupyDevice, DeviceArrays, cupy
from compll.backends.cuda.grids import Grid, Step
from compll.backends.cuda.launch import Device, Launching, starts
from compll.backends.cuda.plans import Plan, Source
from compll.backends.cuda.searches import MOST_ROUNDS
from compll.backends.cuda.source import hop_source, source
from compll.backends.cuda.streams import CHUNK, GROUP
from compll.errors import UsageError
from compll.ir.expr import Expr
from compll.ir.layout import field_bytes, is_fixed, limits, payload_bytes
from compll.ir.module import Module
from compll.ir.static import Number, as_count, evaluate
from compll.numerics.numbers import MEAN_LANES, MEAN_TILE
from compll.numerics.types import I64
from compll.passes import lower
from compll.runtime.batches import Incoming


@dataclass
class Batch:
    """The device side of a table: everything that a call with it needs, made once."""

    table: Any
    at: Any
    first: Any
    item_at: Any
    used: Any
    scratch: tuple[Any, ...]
    pieces: int
    blocks: list[int]
    lengths: tuple[int, ...]
    repeats: dict[Expr | int, int]


class Kernels(Launching[Plan]):
    """The backend's batch interface (see batches.Backend); arrays are the device's."""

    arrays = DeviceArrays()

    def __init__(
        self,
        module: Module,
        params: Mapping[str, Number],
        make_device: Callable[[Source[Any]], Device],
        code: Source[Plan],
    ) -> None:
        super().__init__(module, params, make_device, code)
        self.fuses = bool(lower.kernels(module)["hop"])
        self.hop_kernels: Kernels | None = None
        self.batches: dict[tuple[str, bytes, bytes], Batch] = {}
        self.states: dict[bytes, dict[str, Any]] = {}
        self.fixed = is_fixed(module)

    def batch(self, name: str, table: I64, at: I64) -> Batch:
        """The device side of a table, made once."""
        key = (name, table.tobytes(), at.tobytes())
        make = partial(self.make_batch, self.source.plans[name], table, at)
        return self.kept(self.batches, key, make)

    def forget(self) -> None:
        """What is kept for tables, also by the kernels that decode, add and encode."""
        super().forget()
        self.batches.clear()
        self.states.clear()
        if self.hop_kernels is not None:
            self.hop_kernels.forget()

    def make_batch(self, plan: Plan, table: I64, at: I64) -> Batch:
        lengths = table[:, 1].tolist()
        items = np.array([[self.items(g, n) for n in lengths] for g in plan.grids], np.int64)
        blocks = -(-items // np.array([[g.per_block] for g in plan.grids]))
        firsts, begins = starts(blocks), starts(items)
        most = [payload_bytes(self.module, n, self.params) for n in lengths]
        upload, zeros = self.device.upload, self.device.zeros
        sizes = {str(g): int(begins[g, -1]) for g in range(len(plan.grids))}
        sizes |= {f"{g}b": int(firsts[g, -1]) for g in range(len(plan.grids))}
        sizes["piece"] = len(lengths)
        return Batch(
            table=upload(table.reshape(-1)),
            at=upload(at),
            first=upload(firsts.reshape(-1)),
            item_at=upload(begins.reshape(-1)),
            used=upload(np.array(most, np.int64)),
            scratch=tuple(zeros(sizes[s.per] * s.factor, s.dtype) for s in plan.scratch),
            pieces=len(lengths),
            blocks=[int(b) for b in firsts[:, -1]],
            lengths=tuple(lengths),
            repeats={e: self.times(e, lengths) for s in plan.steps if (e := s.repeat) is not None},
        )

    def items(self, grid: Grid, n: int) -> int:
        """Of a grid, for a piece of n elements."""
        tile = self.source.shape.tile
        if grid.kind == "elements":
            return n
        if grid.kind == "tiles":
            return -(-n // tile)
        if grid.kind.startswith("sample"):
            count = self.sampled(grid, n)
            return -(-count // tile) if grid.kind == "sample_tiles" else count
        if grid.kind == "trits":
            f = next(f for f in self.module.fields if f.name == grid.arg)
            return f.layout.most_bytes(n, n, tile)
        if grid.kind in ("chunks", "groups"):
            return self.chunks(str(grid.arg), n, GROUP if grid.kind == "groups" else 1)
        if grid.kind in ("lanes", "bins"):
            lanes = min(MEAN_LANES, -(-n // MEAN_TILE))
            return lanes if grid.kind == "lanes" else int(str(grid.arg)) if n else 0
        kept = limits(self.module, n, self.params)[str(grid.arg)] if n else 0
        return -(-kept // tile) if grid.kind == "kept_tiles" else kept

    def chunks(self, name: str, n: int, each: int) -> int:
        """Of the most bits that a stream of positions takes."""
        f = next(f for f in self.module.fields if f.name == name)
        kept = limits(self.module, n, self.params)[f.of] if n else 0
        bits = 8 * field_bytes(f, self.module, n, kept)
        return -(-bits // (CHUNK * each)) if n else 0

    def sampled(self, grid: Grid, n: int) -> int:
        """The elements of a sample; as many as there are where the host does not know."""
        if n == 0 or grid.arg == "":
            return n
        return max(1, as_count(self.told(grid.arg, n), n))

    def told(self, number: Expr | int | str, n: int) -> float:
        """A number of a spec that does not depend on the step."""
        if isinstance(number, Expr):
            return float(evaluate(number, self.params | {"n": n, "step": 0}))
        return float(number)

    def times(self, tries: Expr | int, lengths: list[int]) -> int:
        """Rounds of three tries each: at most 100, and the look at the last one."""
        if tries == MOST_ROUNDS:
            return MOST_ROUNDS
        found = [self.told(tries, n) for n in lengths]
        most = max((int(max(0.0, min(v, 100.0))) for v in found if v == v), default=0)
        return -(-(1 + most) // 3)

    def encode_batch(
        self,
        x: Any,
        table: I64,
        out: Any,
        at: I64,
        state: Mapping[str, Any] | None,
        *,
        seed: int,
        step: int,
        scale: float,
        writeback: bool,
        incoming: Incoming | None = None,
        most: I64 | None = None,
    ) -> Any:
        """Encode all pieces; used bytes, int64 [m] in device memory."""
        if state is None and self.module.updates:
            state, table = self.fresh(table)
        # What is not finite is known, by the status byte, when x has been written back.
        written = self.source.plans[self.plan_of(state)].writes_back and not self.module.status
        back = writeback and written
        launch = self if incoming is None else self.hop()
        used = launch.launch_encode(
            x, table, out, at, state, seed, step, scale, back, incoming, most
        )
        if writeback and not back:
            self.decode_batch(out, table, at, used, x, add=False)
        return used

    def plan_of(self, state: Mapping[str, Any] | None) -> str:
        """The name of an encode's plan."""
        return "encode" if state is None or "feed" not in self.source.plans else "feed"

    def launch_encode(
        self, x: Any, table: I64, out: Any, at: I64, state: Mapping[str, Any] | None, seed: int,
        step: int, scale: float, writeback: bool, incoming: Incoming | None = None,
        most: I64 | None = None,
    ) -> Any:  # fmt: skip
        name = self.plan_of(state)
        plan = self.source.plans[name]
        if state is not None and any(s.shape != "n" for s in self.module.states):
            self.refuse_shared(table)
        b = self.batch(name, table, at)
        held = () if state is None else tuple(state[s] for s in plan.states)
        taken: tuple[Any, ...] = ()
        if incoming is not None:
            taken = (incoming.payload, self.place(incoming.at))
        args = (
            x, b.table, b.first, b.item_at, np.int32(b.pieces), out, b.at,
            self.statics(name, b.lengths, step, most), np.uint64(seed), np.uint64(step & (2**64 - 1)), self.tick, np.float32(scale), np.int32(writeback),
            b.used, *taken, *held, *b.scratch,
        )  # fmt: skip
        self.run(plan, b, args, self.device.dtype(x))
        return b.used

    def given_sizes(self, used: I64) -> Any:
        """Payloads' lengths in device memory; kept where they are always the same."""
        return self.place(used) if self.fixed else self.device.upload(used)

    def hop(self) -> Kernels:
        """The kernels that decode, add and encode; made at the first call."""
        if self.hop_kernels is None:
            code = hop_source(self.module, self.source.shape.threads)
            self.hop_kernels = Kernels(self.module, self.params, self.make_device, code)
        self.hop_kernels.tick = self.tick
        return self.hop_kernels

    def fresh(self, table: I64) -> tuple[dict[str, Any], I64]:
        """Zero states for a call without any, and the table that goes with them."""
        key, table = table.tobytes(), table.copy()
        table[:, 4] = np.cumsum(table[:, 1]) - table[:, 1]
        size = {True: int(table[:, 1].sum()), False: int(table[:, 2].max(initial=0)) + 1}

        def zeros() -> dict[str, Any]:
            make = self.device.zeros
            return {s.name: make(size[s.shape == "n"], s.dtype) for s in self.module.states}

        states = self.kept(self.states, key, zeros)
        for held in states.values():
            held[:] = 0
        return states, table

    def decode_batch(
        self, payload: Any, table: I64, at: I64, used: Any, out: Any, *, add: bool
    ) -> None:
        """Decode all pieces into out, or add them."""
        name = "add" if add else "set"
        plan = self.source.plans[name]
        b = self.batch(name, table, at)
        sizes = self.given_sizes(used) if isinstance(used, np.ndarray) else used
        args = (
            out, b.table, b.first, b.item_at, np.int32(b.pieces), payload, b.at, sizes,
            self.statics(name, b.lengths, 0), self.errors, *b.scratch,
        )  # fmt: skip
        self.run(plan, b, args, self.device.dtype(out))

    def run(self, plan: Plan, batch: Batch, args: tuple[Any, ...], gradient: str) -> None:
        """Launch the steps of a plan; neighbours that repeat do so together."""
        with self.whole():
            for expr, group in groupby(plan.steps, key=lambda s: s.repeat):
                steps = list(group)
                for _ in range(1 if expr is None else batch.repeats[expr]):
                    for step in steps:
                        self.launch(step, batch, args, gradient)

    def launch(self, step: Step, batch: Batch, args: tuple[Any, ...], gradient: str) -> None:
        blocks = batch.pieces if step.grid < 0 else batch.blocks[step.grid]
        if blocks:
            self.device.launch(gradient, step.kernel, blocks, step.threads, args)


def kernels(
    module: Module,
    params: Mapping[str, Number],
    make_device: Callable[[Source[Any]], Device],
    code: Source[Any],
) -> Kernels | ArrayKernels:
    """The kernels of a source, in passes or an array at a time."""
    kind = ArrayKernels if module.arrays else Kernels
    return kind(module, params, make_device, code)


def build(module: Module, params: Mapping[str, Number]) -> Kernels | ArrayKernels:
    """The backend's entry point. Raises SpecError, or UsageError without CuPy or a device."""
    return kernels(module, params, CupyDevice, source(module))


def bound() -> int | None:
    """What a codec is tied to besides its spec: the current device, where there is one."""
    try:
        return int(cupy().cuda.runtime.getDevice())
    except UsageError:
        return None  # which building a codec tells
