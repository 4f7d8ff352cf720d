"""Estimates of ranks' parameters, against which gossip compresses.

In CHOCO-SGD (Koloskova et al. 2019) a rank sends the compressed difference between its parameters
and an estimate of them, and adds the sent difference to the estimate. Its neighbours keep copies of
the estimate and add the same payloads, so all copies have the same bits. The error of one payload
is part of the next difference: that is the error feedback, so the codec needs none of its own.

A rank keeps one copy per neighbour rather than their sum, which would take less memory: the
rounding errors of a sum accumulate differently from those of the estimates, so the average of the
parameters would drift by the difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

import numpy as np

from casync.codec import (
    Bytes,
    Codec,
    CodecDefaults,
    DecodeOptions,
    EncodeOptions,
    Floats,
    Ints,
    State,
    StateField,
)

__all__ = ["BEGIN", "LAST", "OWN", "Estimate", "copy_of"]

OWN = "estimate"  # state: this rank's parameters as its neighbours know them
#: states of local steps with an outer optimizer, which payloads leave alone: parameters at the
#: begin of these steps, and those of the last round before neighbours were heard
BEGIN, LAST = "begin of local steps", "before the last round"


def copy_of(rank: int) -> str:
    """Name of the state that holds this rank's copy of the estimate of `rank`."""
    return f"{OWN} of rank {rank}"


class Estimate(CodecDefaults):
    """A codec for parameters: encodes their difference from the estimate and adds it to the
    estimate. Payloads are those of the inner codec. Implements Codec."""

    reencodes = False

    def __init__(self, inner: Codec, neighbours: Iterable[int], more: Iterable[str] = ()) -> None:
        """neighbours: ranks whose estimates this rank copies. more: further states, of BEGIN and
        LAST."""
        self._inner = inner
        #: the rank's own estimate and copies of its neighbours': ends with the ranks it knows
        names = (OWN, *map(copy_of, neighbours), *more)
        self.states = tuple(StateField(name, fate="same") for name in names)
        self.name, self.digest, self.params = inner.name, inner.digest, inner.params
        self.align, self.fixed = inner.align, inner.fixed
        self.repeats = False  # captured programs have no estimates

    def payload_bytes(self, n: int) -> int:
        return self._inner.payload_bytes(n)

    def encode_batch(
        self,
        x: Floats,
        table: Ints,
        out: Bytes,
        at: Ints,
        *,
        state: State | None = None,
        **options: Unpack[EncodeOptions],
    ) -> Ints:
        """Implements Codec.encode_batch, for unscaled parameters."""
        assert state is not None
        assert options.pop("scale", 1.0) == 1.0
        assert not options.pop("writeback", False)
        assert "incoming" not in options  # it does not fuse
        inside, change = table.copy(), np.empty(int(table[:, 1].sum()), np.float32)
        inside[:, 0] = np.cumsum(table[:, 1]) - table[:, 1]
        for (start, n, *_, place), (first, *_) in zip(table.tolist(), inside.tolist(), strict=True):
            known = state[OWN][place : place + n]
            np.subtract(x[start : start + n], known, out=change[first : first + n])
        used = self._inner.encode_batch(change, inside, out, at, **options)
        inside[:, 0] = table[:, 4]
        self._inner.decode_batch(
            out, inside, at, used, state[OWN], add=True, step=options.get("step", 0)
        )
        return used

    def decode_batch(
        self,
        payload: Bytes,
        table: Ints,
        at: Ints,
        used: Ints,
        out: Floats,
        **options: Unpack[DecodeOptions],
    ) -> None:
        self._inner.decode_batch(payload, table, at, used, out, **options)
