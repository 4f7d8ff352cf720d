"""What the CUDA backend's kernels have in common, whatever runs them: CuPy, or the tests' shim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from compll.arrays import I64
from compll.backends.cuda_plans import P, Source
from compll.errors import PayloadError, UsageError
from compll.ir import Module
from compll.static import Number, evaluate

KEPT_BATCHES = 256
#: by the bits that decode kernels set
REASONS = {
    1: "a payload's length does not fit its header",
    2: "an index lies outside its tensor",
    3: "a payload's length does not fit its header, and an index lies outside its tensor",
}


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


class Launching(Generic[P]):
    """A source's kernels on a device, and what is kept of batches."""

    def __init__(
        self,
        module: Module,
        params: Mapping[str, Number],
        make_device: Callable[[Source[Any]], Device],
        code: Source[P],
    ) -> None:
        self.module, self.params, self.source = module, dict(params), code
        self.make_device, self.device = make_device, make_device(code)
        self.rows: dict[tuple[str, tuple[int, ...], int], Any] = {}
        #: what decode kernels found wrong, a bit each (see REASONS)
        self.errors = self.device.zeros(1, "uint32")
        #: a uint64 in device memory that is added to `step`: lets a replayed CUDA graph go on
        self.tick: Any = None

    def statics(self, name: str, lengths: tuple[int, ...], step: int) -> Any:
        """Host-computed values in device memory, float64 [m * statics]; made once per value."""
        plan = self.source.plans[name]
        step = step if plan.steps_matter else 0
        key = (name, lengths, step)
        if key not in self.rows:
            make_room(self.rows)
            rows = [
                float(evaluate(e, self.params | {"n": n, "step": step}))
                for n in lengths
                for e in plan.statics
            ]
            self.rows[key] = self.device.upload(np.array(rows, np.float64))
        return self.rows[key]

    def refuse_shared(self, table: I64) -> None:
        """Pieces run at the same time, so no two of them may update the state of one tensor."""
        if len(np.unique(table[:, 2])) < len(table):
            raise UsageError(
                f"{self.module.name}: no two pieces of a batch on a device may belong to one "
                "tensor, whose state they would both update; encode them in separate calls"
            )

    def raise_found(self) -> None:
        """Raise PayloadError for a bad payload that an earlier decode met; waits."""
        found = int(self.device.download(self.errors)[0])
        if found:
            self.errors = self.device.zeros(1, "uint32")
            raise PayloadError(f"{self.module.name}: {REASONS[min(found, 3)]}")


def starts(counts: I64) -> I64:
    """Running totals of each row, beginning with zero."""
    return np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0))).astype(np.int64)


def make_room(cache: dict[Any, Any]) -> bool:
    """Empty a cache that has become full; whether it had."""
    full = len(cache) >= KEPT_BATCHES
    if full:
        cache.clear()
    return full
