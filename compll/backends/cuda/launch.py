"""What the CUDA backend's kernels have in common, whatever runs them: CuPy, or the tests' shim."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from compll.backends.cuda.plans import P, Source
from compll.errors import PayloadError, UsageError
from compll.ir.capacity import MOST
from compll.ir.module import Module
from compll.ir.static import Number, evaluate
from compll.numerics.types import I64

#: tables, and numbers, whose device side is kept; more than those of the layers of a large model
KEPT = 1024
T = TypeVar("T")
#: by the bits that decode kernels set
REASONS = {
    1: "a payload's length does not fit its header",
    2: "an index lies outside its tensor",
    3: "a payload's length does not fit its header, and an index lies outside its tensor",
}


class Device(Protocol):
    """What runs kernels: CuPy, or the test-only shim on the CPU."""

    def upload(self, values: NDArray[Any]) -> Any:
        """A copy in device memory. Raises UsageError where a CUDA graph is captured."""

    def zeros(self, count: int, dtype: str) -> Any:
        """Zeros in device memory. Raises UsageError, as upload; MemoryError."""

    def settle(self) -> None:
        """Wait until nothing runs on the device. Raises UsageError, as upload."""

    def finish(self) -> None:
        """Wait until the current stream has done all that it was given."""

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

    arrays: Any

    def __init__(
        self,
        module: Module,
        params: Mapping[str, Number],
        make_device: Callable[[Source[Any]], Device],
        code: Source[P],
    ) -> None:
        self.module, self.params, self.source = module, dict(params), code
        self.make_device, self.device = make_device, make_device(code)
        #: the last host-computed values of a plan and its pieces, with their step
        self.evaluated: dict[tuple[str, tuple[int, ...]], tuple[Any, NDArray[Any]]] = {}
        self.placed: dict[tuple[str, bytes], Any] = {}
        #: what decode kernels found wrong, a bit each (see REASONS)
        self.errors = self.device.zeros(1, "uint32")
        self.device.settle()  # the first call may be on another stream
        #: a uint64 in device memory that is added to `step`: lets a replayed CUDA graph go on. What
        #: the host computes from the step (a warm-up's ratio, say) stays that of the capture.
        self.tick: Any = None

    def statics(
        self, name: str, lengths: tuple[int, ...], step: int, most: I64 | None = None
    ) -> Any:
        """Host-computed values in device memory, float64 [m * statics]; made once per value. most:
        what filters may keep of each piece."""
        plan = self.source.plans[name]
        limits = lengths if most is None else tuple(most.tolist())
        asked = (step if plan.steps_matter else 0, limits)
        known = self.evaluated.get((name, lengths))
        if known is None or known[0] != asked:
            rows = [
                float(evaluate(e, self.params | {"n": n, "step": asked[0], MOST: limit}))
                for n, limit in zip(lengths, limits, strict=True)
                for e in plan.statics
            ]
            if len(self.evaluated) >= KEPT:
                self.evaluated.clear()
            known = self.evaluated[name, lengths] = (asked, np.array(rows, np.float64))
        return self.place(known[1], np.float64)

    def place(self, numbers: NDArray[Any], dtype: type[np.number[Any]] = np.int64) -> Any:
        """Numbers in device memory; uploaded once."""
        numbers = np.ascontiguousarray(numbers, dtype)
        key = (numbers.dtype.str, numbers.tobytes())
        return self.kept(self.placed, key, lambda: self.device.upload(numbers))

    def kept(self, cache: dict[Any, T], key: object, make: Callable[[], T]) -> T:
        """What a cache has for a key, made if need be.

        The older half of a full cache is dropped, and all that is kept where memory runs out: when
        nothing on the device uses them.
        """
        if key not in cache:
            if len(cache) >= KEPT:
                self.device.settle()
                for old in list(cache)[: KEPT // 2]:
                    del cache[old]
            try:
                made = make()
            except MemoryError:
                self.device.settle()
                self.forget()
                made = make()
            self.device.finish()  # the next call with it may be in another stream
            cache[key] = made
        return cache[key]

    def forget(self) -> None:
        """Drop what is kept for tables; subclasses have more."""
        self.placed.clear()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around a plan's launches: scratch is as the next call needs it after all of them only."""
        try:
            yield
        except BaseException:
            self.forget()
            raise

    def refuse_shared(self, table: I64) -> None:
        """Pieces run at the same time, so no two of them may update the state of one tensor."""
        if len(np.unique(table[:, 2])) < len(table):
            raise UsageError(
                f"{self.module.name}: no two pieces of a batch on a device may belong to one "
                "tensor, whose state they would both update; encode them in separate calls"
            )

    def raise_found(self) -> None:
        """Raise PayloadError for a bad payload that an earlier decode met; waits."""
        with self.arrays.stream():
            found = int(self.device.download(self.errors)[0])
            if found:
                self.errors[:] = 0  # in place: a captured CUDA graph writes to it
        if found:
            raise PayloadError(f"{self.module.name}: {REASONS[min(found, 3)]}")


def starts(counts: I64) -> I64:
    """Running totals of each row, beginning with zero."""
    return np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0))).astype(np.int64)
