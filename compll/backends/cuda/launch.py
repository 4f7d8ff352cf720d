"""What the CUDA backend's kernels have in common, whatever runs them: CuPy, or the tests' shim."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from compll.backends.cuda.device import DeviceArrays
from compll.backends.cuda.grids import Items
from compll.backends.cuda.plans import Plan, Source
from compll.errors import PayloadError, UsageError
from compll.ir.capacity import MOST
from compll.ir.expr import Expr
from compll.ir.layout import payload_bytes
from compll.ir.module import Module
from compll.ir.static import Number, evaluate
from compll.numerics.types import I64
from compll.runtime.batches import Encoding

#: tables, and numbers, whose device side is kept; more than those of the layers of a large model
KEPT = 1024
T = TypeVar("T")
MASK = (1 << 64) - 1
#: by the bits that decode kernels set
REASONS = {
    1: "a payload's length does not fit its header",
    2: "an index lies outside its tensor, or is not above the one before it",
    3: "a payload's length does not fit its header, and in one an index lies outside its tensor",
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


@dataclass
class Batch:
    """The device side of a table, for one plan: everything that a call with it needs, made once."""

    table: Any
    first: Any
    item_at: Any
    used: Any
    scratch: tuple[Any, ...]
    pieces: int
    blocks: list[int]
    lengths: tuple[int, ...]
    repeats: dict[Expr | int, int]


class Launching:
    """A source's kernels on a device, and what is kept of batches."""

    arrays = DeviceArrays()

    def __init__(
        self,
        module: Module,
        params: Mapping[str, Number],
        make_device: Callable[[Source], Device],
        code: Source,
    ) -> None:
        self.module, self.params, self.source = module, dict(params), code
        self.make_device, self.device = make_device, make_device(code)
        self.items = Items(module, self.params, code.shape.tile)
        self.batches: dict[tuple[str, bytes], Batch] = {}
        #: the last host-computed values of a plan and its pieces, with what they are of
        self.evaluated: dict[tuple[str, tuple[int, ...]], tuple[Any, NDArray[Any]]] = {}
        self.placed: dict[tuple[str, bytes], Any] = {}
        #: what decode kernels found wrong, a bit each (see REASONS)
        self.errors = self.device.zeros(1, "uint32")
        self.device.settle()  # the first call may be on another stream
        #: a uint64 in device memory that is added to `step`: lets a replayed CUDA graph go on. What
        #: the host computes from the step (a warm-up's ratio, say) stays that of the capture.
        self.tick: Any = None

    # batches

    def batch(self, name: str, table: I64) -> Batch:
        """The device side of a table, made once."""
        make = partial(self.make_batch, self.source.plans[name], table)
        return self.kept(self.batches, (name, table.tobytes()), make)

    def make_batch(self, plan: Plan, table: I64) -> Batch:
        lengths = table[:, 1].tolist()
        for n in lengths:
            self.items.check_rooms(plan.rooms, n)
        shape = len(plan.grids), len(lengths)
        counts = [[self.items.count(g, n) for n in lengths] for g in plan.grids]
        items = np.array(counts, np.int64).reshape(shape)
        blocks = -(-items // np.array([[g.per_block] for g in plan.grids]))
        firsts, begins = starts(blocks), starts(items)
        most = [payload_bytes(self.module, n, self.params) for n in lengths]
        sizes = {str(g): int(begins[g, -1]) for g in range(len(plan.grids))}
        sizes |= {f"{g}b": int(firsts[g, -1]) for g in range(len(plan.grids))}
        sizes["piece"] = len(lengths)
        upload = self.device.upload
        return Batch(
            table=upload(table.reshape(-1)),
            first=upload(firsts.reshape(-1)),
            item_at=upload(begins.reshape(-1)),
            used=upload(np.array(most, np.int64)),
            scratch=self.scratch(table, [(s.dtype, sizes[s.per] * s.factor) for s in plan.scratch]),
            pieces=len(lengths),
            blocks=[int(b) for b in firsts[:, -1]],
            lengths=tuple(lengths),
            repeats={
                e: self.items.rounds(e, lengths) for s in plan.steps if (e := s.repeat) is not None
            },
        )

    def scratch(self, table: I64, wanted: list[tuple[str, int]]) -> tuple[Any, ...]:
        """A plan's memory for a table, by types and lengths; zeros before the first call."""
        return tuple(self.device.zeros(count, dtype) for dtype, count in wanted)

    def begin(self, x: Any, b: Batch) -> tuple[Any, ...]:
        """What every kernel is given first."""
        return x, b.table, b.first, b.item_at, np.int32(b.pieces)

    def encode_args(
        self, name: str, b: Batch, x: Any, out: Any, at: Any, how: Encoding
    ) -> tuple[Any, ...]:
        """What kernels of an encode, or of a round, are given; then come states and scratch."""
        return (
            *self.begin(x, b), out, at, self.statics(name, b.lengths, how.step, how.most),
            np.uint64(how.seed & MASK), np.uint64(how.step & MASK), self.tick,
            np.float32(how.scale), np.int32(how.writeback), b.used,
        )  # fmt: skip

    def decode(
        self, payload: Any, table: I64, at: I64, used: Any, out: Any, *, add: bool, step: int = 0
    ) -> None:
        """Decode all pieces into out, or add them."""
        name = "add" if add else "set"
        b = self.batch(name, table)
        args = (
            *self.begin(out, b), payload, self.place(at), used, self.statics(name, b.lengths, step),
            np.uint64(step & MASK), self.tick, self.errors,
        )  # fmt: skip
        self.run(name, b, args, self.device.dtype(out))

    def run(self, name: str, b: Batch, args: tuple[Any, ...], gradient: str) -> None:
        """Launch the steps of a plan; neighbours that repeat do so together."""
        with self.whole():
            for expr, group in groupby(self.source.plans[name].steps, key=lambda s: s.repeat):
                steps = list(group)
                for _ in range(1 if expr is None else b.repeats[expr]):
                    for step in steps:
                        blocks = b.pieces if step.grid < 0 else b.blocks[step.grid]
                        if blocks:
                            given = (*args, *b.scratch)
                            self.device.launch(gradient, step.kernel, blocks, step.threads, given)

    def states(self, name: str, state: Mapping[str, Any] | None, table: I64) -> tuple[Any, ...]:
        """The states that a plan is given."""
        if state is None:
            return ()
        if any(s.shape == "scalar" for s in self.module.states):
            self.refuse_shared(table)
        return tuple(state[s] for s in self.source.plans[name].states)

    # what is kept

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
        self.batches.clear()
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
