"""The CUDA backend: generated kernels on arrays in device memory.

Kernels run on CuPy's current stream (to use torch's: `with
cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):`). Nothing inside an encode or
decode of a batch waits for the device, and after the first call with a table nothing is allocated,
so that a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from compll.backends.cuda_device import CupyDevice, DeviceArrays
from compll.backends.cuda_source import Plan, Source, source
from compll.ir import Module
from compll.layout import limits, payload_bytes
from compll.static import Number, evaluate

I64 = NDArray[np.int64]
KEPT_BATCHES = 256


class Device(Protocol):
    """What runs kernels: CuPy, or the test-only shim on the CPU."""

    def upload(self, values: NDArray[Any]) -> Any:
        """A copy in device memory."""

    def zeros(self, count: int, dtype: str) -> Any:
        """Zeros in device memory."""

    def download(self, array: Any) -> NDArray[Any]:
        """A copy in host memory; waits."""

    def dtype(self, array: Any) -> str:
        """float32, float16 or bfloat16 (uint16 arrays hold the bits of those)."""

    def launch(
        self, gradient: str, kernel: str, grid: int, threads: int, args: tuple[Any, ...]
    ) -> None:
        """Run a kernel, for gradients of this dtype, after what was launched before."""


@dataclass
class Batch:
    """The device side of a table: everything that a call with it needs, made once."""

    table: Any
    at: Any
    first: Any
    tile_at: Any
    limits: Any
    sc: Any
    flags: Any
    part: Any
    used: Any
    pieces: int
    blocks: int
    tiles: int
    lengths: tuple[int, ...]


class Kernels:
    """The backend's batch interface (see codec.Backend); arrays are the device's."""

    arrays = DeviceArrays()

    def __init__(
        self, module: Module, params: Mapping[str, Number], device: Device, code: Source
    ) -> None:
        self.module, self.params, self.device, self.source = module, dict(params), device, code
        self.batches: dict[tuple[str, bytes, bytes], Batch] = {}
        self.rows: dict[tuple[str, tuple[int, ...], int], Any] = {}
        #: a uint64 in device memory that is added to `step`: lets a replayed CUDA graph go on
        self.tick: Any = None

    def batch(self, name: str, table: I64, at: I64) -> Batch:
        """The device side of a table, made once."""
        key = (name, table.tobytes(), at.tobytes())
        if key not in self.batches:
            _make_room(self.batches)
            self.batches[key] = self.make_batch(self.source.plans[name], table, at)
        return self.batches[key]

    def make_batch(self, plan: Plan, table: I64, at: I64) -> Batch:
        shape, device = self.source.shape, self.device
        tiles = -(-table[:, 1] // shape.tile)
        blocks = -(-tiles // shape.tiles)
        bounds = [list(limits(self.module, int(n), self.params).values()) for n in table[:, 1]]
        most = np.array([payload_bytes(self.module, int(n), self.params) for n in table[:, 1]])
        return Batch(
            table=device.upload(table.reshape(-1)),
            at=device.upload(at),
            first=device.upload(_starts(blocks)),
            tile_at=device.upload(_starts(tiles)),
            limits=device.upload(np.array(bounds, np.int64).reshape(-1)),
            sc=device.zeros(len(table) * plan.slots, "float64"),
            flags=device.zeros(len(table), "uint32"),
            part=device.zeros(int(tiles.sum()) * plan.parts, "uint32"),
            used=device.upload(most.astype(np.int64)),
            pieces=len(table),
            blocks=int(blocks.sum()),
            tiles=int(tiles.sum()),
            lengths=tuple(table[:, 1].tolist()),
        )

    def statics(self, name: str, lengths: tuple[int, ...], step: int) -> Any:
        """Host-computed values in device memory, float64 [m * statics]; made once per value."""
        plan = self.source.plans[name]
        step = step if plan.steps_matter else 0
        key = (name, lengths, step)
        if key not in self.rows:
            _make_room(self.rows)
            rows = [
                float(evaluate(e, self.params | {"n": n, "step": step}))
                for n in lengths
                for e in plan.statics
            ]
            self.rows[key] = self.device.upload(np.array(rows, np.float64))
        return self.rows[key]

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
    ) -> Any:
        """Encode all pieces; used bytes, int64 [m] in device memory."""
        if state is None and self.module.updates:
            state, table = self.fresh(table)
        name = "encode" if state is None or "feed" not in self.source.plans else "feed"
        plan = self.source.plans[name]
        b = self.batch(name, table, at)
        held = () if state is None else tuple(state[s] for s in plan.states)
        args = (
            x, b.table, b.first, b.tile_at, np.int32(b.pieces), out, b.at, b.limits,
            self.statics(name, b.lengths, step), np.int32(len(plan.statics)), np.uint64(seed),
            np.uint64(step & (2**64 - 1)), self.tick, np.float32(scale), np.int32(writeback),
            b.sc, np.int32(plan.slots), b.flags, b.part, np.int64(b.tiles), b.used, *held,
        )  # fmt: skip
        self.run(plan, b, args, self.device.dtype(x))
        return b.used

    def fresh(self, table: I64) -> tuple[dict[str, Any], I64]:
        """Zero states for a call without any, and the table that goes with them."""
        table = table.copy()
        table[:, 4] = np.cumsum(table[:, 1]) - table[:, 1]
        size = {True: int(table[:, 1].sum()), False: int(table[:, 2].max(initial=0)) + 1}
        zeros = self.device.zeros
        return {s.name: zeros(size[s.shape == "n"], "float32") for s in self.module.states}, table

    def decode_batch(
        self, payload: Any, table: I64, at: I64, used: Any, out: Any, *, add: bool
    ) -> None:
        """Decode all pieces into out, or add them."""
        name = "add" if add else "set"
        plan = self.source.plans[name]
        b = self.batch(name, table, at)
        args = (
            payload, b.table, b.first, np.int32(b.pieces), b.at, used, b.limits,
            self.statics(name, b.lengths, 0), np.int32(len(plan.statics)), b.flags, out,
        )  # fmt: skip
        self.run(plan, b, args, self.device.dtype(out))

    def run(self, plan: Plan, batch: Batch, args: tuple[Any, ...], gradient: str) -> None:
        """Launch the steps of a plan."""
        grids = {"tiles": batch.blocks, "pieces": batch.pieces}
        for step in plan.steps:
            if grids[step.grid]:
                self.device.launch(gradient, step.kernel, grids[step.grid], step.threads, args)

    def raise_found(self) -> None:
        """Raise PayloadError for a bad payload that an earlier decode met; waits."""


def build(module: Module, params: Mapping[str, Number]) -> Kernels:
    """The backend's entry point. Raises UsageError without CuPy or a device."""
    code = source(module)
    return Kernels(module, params, CupyDevice(code), code)


def _starts(counts: I64) -> I64:
    """Running totals, beginning with zero."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _make_room(cache: dict[Any, Any]) -> None:
    if len(cache) >= KEPT_BATCHES:
        cache.clear()
