"""The CUDA backend: generated kernels on arrays in device memory.

Kernels run on torch's current stream, or on CuPy's if one has been set. Nothing inside an encode or
decode of a batch waits for the device. After the first call with a table and a step's numbers
nothing is allocated or copied from the host, so that a CUDA graph can capture a call. If `used` in
host memory varies from call to call, each call copies it: a captured decode takes it in device
memory.

Calls of one codec on one stream share scratch memory: a call launches all of its kernels before
another thread's does. The array of bytes used that an encode returns is the codec's until the next
call with its table: order those, by one stream or by events. launch.py explains lifetimes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from compll.backends.cuda.device import CupyDevice, cupy
from compll.backends.cuda.launch import Batch, Launching, alone
from compll.backends.cuda.plans import separate
from compll.backends.cuda.source import hop_source, source
from compll.errors import UsageError
from compll.ir.layout import Before, rounds
from compll.ir.module import Module
from compll.ir.static import Number
from compll.numerics.numbers import I64
from compll.runtime.arrays import hold, is_held
from compll.runtime.batches import Encoding, fresh


class Kernels(Launching):
    """The backend's batch interface (see batches.Backend); arrays are the device's."""

    hop_kernels: Kernels | None = None

    @alone
    def encode_batch(
        self, x: Any, table: I64, out: Any, at: I64, state: Mapping[str, Any] | None, how: Encoding
    ) -> Any:
        """Encode all pieces; used bytes, int64 [m] in device memory."""
        if state is None and "encode" not in self.source.plans:
            state, table = self.fresh(table)
        back = how.writeback and self.source.plans[self.plan_of(state)].writes_back
        launch = self if how.incoming is None else self.hop()
        given = how if how.writeback == back else replace(how, writeback=back)
        used = launch.launch_encode(x, table, out, at, state, given)
        if how.writeback and not back:
            self.decode(out, table, at, used, x, add=False, step=how.step)
        return used

    def plan_of(self, state: Mapping[str, Any] | None) -> str:
        """The name of an encode's plan."""
        return "encode" if state is None or "feed" not in self.source.plans else "feed"

    def launch_encode(
        self, x: Any, table: I64, out: Any, at: I64, state: Mapping[str, Any] | None, how: Encoding
    ) -> Any:
        name = self.plan_of(state)
        b = self.batch(name, table)
        incoming = how.incoming
        taken = () if incoming is None else (incoming.payload, self.place(incoming.at))
        args = self.encode_args(name, b, x, out, self.place(at), how)
        self.run(name, b, (*args, *taken, *self.states(name, state, table)), self.device.dtype(x))
        return b.used

    def given_sizes(self, used: I64) -> Any:
        """Payloads' lengths in device memory; cached if they never change."""
        return self.place(used) if self.fixed or is_held(used) else self.device.upload(used)

    def hop(self) -> Kernels:
        """The kernels that decode, add and encode; made at the first call."""
        if self.hop_kernels is None:
            code = hop_source(self.source)
            self.hop_kernels = Kernels(self.module, self.params, self.make_device, code)
            self.hop_kernels.ticks = self.ticks
        return self.hop_kernels

    def fresh(self, table: I64) -> tuple[dict[str, Any], I64]:
        """Zero states for a call without states, and a table for them."""
        b, table = self.keeper.once(table, (self, "fresh"), self.make_fresh)
        arrays = self.lend("states", b)
        for held in arrays:
            held[:] = 0
        return dict(zip((s.name for s in self.module.states), arrays, strict=True)), table

    def make_fresh(self, table: I64) -> tuple[Batch, I64]:
        """The memory of such states, and the table."""
        wanted, changed = fresh(self.module, table)
        scratch = separate(tuple(wanted.values()))
        return Batch(changed, None, None, None, None, scratch, [], {}), hold(changed)

    @alone
    def decode_batch(
        self, payload: Any, table: I64, at: I64, used: Any, out: Any, *, add: bool, step: int = 0
    ) -> None:
        """Decode all pieces into out, or add them to it."""
        sizes = self.given_sizes(used) if isinstance(used, np.ndarray) else used
        self.decode(payload, table, at, sizes, out, add=add, step=step)

    # rounds

    @alone
    def encode_round(
        self,
        number: int,
        x: Any,
        table: I64,
        out: Any,
        at: I64,
        before: Before,
        state: Mapping[str, Any] | None,
        how: Encoding,
    ) -> Any:
        """Encode a round's payload for every piece; see Codec.encode_round."""
        name = f"round{number}{self.suffix(state)}"
        given = (out, self.place(at), before[:number])
        self.round(name, x, table, given, state, how)
        round_ = rounds(self.module)[number]

        def lengths(held: I64) -> Any:
            result = [round_.payload_bytes(n) for n in held[:, 1].tolist()]
            return self.device.upload(np.array(result, np.int64))

        return self.keeper.once(table, (self, "lengths", number), lengths)

    @alone
    def decode_rounds(
        self, x: Any, table: I64, sums: Before, state: Mapping[str, Any] | None, how: Encoding
    ) -> None:
        """Decode all ranks' sums and update the states; see Codec.decode_rounds."""
        given = (None, None, sums[: len(self.module.rounds)])
        self.round(f"rounds{self.suffix(state)}", x, table, given, state, how)

    def suffix(self, state: Mapping[str, Any] | None) -> str:
        """Suffix of the names of plans with states."""
        return "_feed" if state is not None and self.module.states else ""

    def round(
        self, name: str, x: Any, table: I64, given: tuple[Any, Any, Before],
        state: Mapping[str, Any] | None, how: Encoding,
    ) -> None:  # fmt: skip
        """Run a plan. given: a payload and starts of pieces in it; the sums of rounds."""
        out, at, sums = given
        b = self.batch(name, table)
        pairs = ((payload, self.place(begins)) for payload, begins in sums)
        args = (
            *self.encode_args(name, b, x, out, at, how), np.float32(how.workers),
            *(value for pair in pairs for value in pair), *self.states(name, state, table),
        )  # fmt: skip
        self.run(name, b, args, self.device.dtype(x))


def build(module: Module, params: Mapping[str, Number]) -> Kernels:
    """The backend's entry point. Raises SpecError, or UsageError without CuPy or a device."""
    return Kernels(module, params, CupyDevice, source(module))


def bound() -> int | None:
    """The current device's number, which a codec is tied to; None without a device."""
    try:
        return int(cupy().cuda.runtime.getDevice())
    except UsageError:
        return None  # building a codec raises this error
