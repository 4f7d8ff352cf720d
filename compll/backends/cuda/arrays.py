"""Specs that are computed an array at a time, on a device: rounds besides encode and decode.

Nothing here waits for the device; what a table needs is made in the first call with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from compll.backends.cuda.launch import Launching
from compll.ir.rounds import Before, rounds
from compll.numerics.types import I64
from compll.runtime.batches import Encoding


class ArrayKernels(Launching):
    """The backend's batch interface (see batches.ArrayBackend); arrays are the device's."""

    fuses = False

    def encode_batch(
        self, x: Any, table: I64, out: Any, at: I64, state: Mapping[str, Any] | None, how: Encoding
    ) -> Any:
        """Encode all pieces, with themselves as the only rank; used bytes, int64 [m], on the device."""
        assert how.incoming is None
        fed = state is not None and bool(self.module.states)
        name = "feed" if fed else "encode"
        b = self.batch(name, table)
        held = self.states(name, state if fed else None, table)
        args = self.encode_args(name, b, x, out, self.place(at), how)
        self.run(name, b, (*args, *held), self.device.dtype(x))
        if how.writeback and not fed:
            self.decode_batch(out, table, at, b.used, x, add=False, step=how.step)
        return b.used

    def decode_batch(
        self, payload: Any, table: I64, at: I64, used: Any, out: Any, *, add: bool, step: int = 0
    ) -> None:
        """Decode all pieces into out, or add them."""
        sizes = self.place(used) if isinstance(used, np.ndarray) else used
        self.decode(payload, table, at, sizes, out, add=add, step=step)

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
        """What a round adds up, for every piece; see Codec.encode_round."""
        name = f"round{number}{self.feeds(state)}"
        given = (out, self.place(at), before[:number])
        self.round(name, x, table, given, state, how)
        one = rounds(self.module)[number]
        found = [one.payload_bytes(n) for n in table[:, 1].tolist()]
        return self.place(np.array(found, np.int64))

    def decode_rounds(
        self, x: Any, table: I64, sums: Before, state: Mapping[str, Any] | None, how: Encoding
    ) -> None:
        """What all ranks' sums decode to, and the states that follow; see Codec.decode_rounds."""
        given = (None, None, sums[: len(self.module.rounds)])
        self.round(f"rounds{self.feeds(state)}", x, table, given, state, how)

    def feeds(self, state: Mapping[str, Any] | None) -> str:
        """What the names of plans with states end with."""
        return "_feed" if state is not None and self.module.states else ""

    def round(
        self, name: str, x: Any, table: I64, given: tuple[Any, Any, Before],
        state: Mapping[str, Any] | None, how: Encoding,
    ) -> None:  # fmt: skip
        """Run a plan. given: a payload and where pieces begin in it; the sums of rounds."""
        out, at, sums = given
        b = self.batch(name, table)
        pairs = ((payload, self.place(begins)) for payload, begins in sums)
        args = (
            *self.encode_args(name, b, x, out, at, how), np.float32(how.workers),
            *(value for pair in pairs for value in pair), *self.states(name, state, table),
        )  # fmt: skip
        self.run(name, b, args, self.device.dtype(x))
