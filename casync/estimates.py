"""Parameters as their neighbours know them: what gossip compresses against.

In CHOCO-SGD (Koloskova et al. 2019) a rank sends the compressed difference between its parameters
and an estimate of them, which follows by what was sent. Its neighbours keep copies that follow by
the same payloads, and so hold the same bits. The difference that one payload leaves out is in the
next: that is the error feedback, and the codec needs none of its own.

Copies rather than their sum, which would take less memory with many neighbours: the roundings of a
sum add up apart from those of the estimates, and average parameters would drift by what they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from casync.codec import Bytes, Codec, CodecDefaults, Floats, Ints, State

__all__ = ["OWN", "Estimate", "copy_of"]

OWN = "estimate"  # what neighbours know of this rank's parameters


def copy_of(rank: int) -> str:
    """The name of the state that is this rank's copy of another's estimate."""
    return f"{OWN} of rank {rank}"


class Estimate(CodecDefaults):
    """A codec for parameters: encodes how they differ from their estimate, which follows. Payloads
    are the inner codec's. See Codec for its members."""

    stateful = True
    reencodes = False

    def __init__(self, inner: Codec, neighbours: Iterable[int]) -> None:
        """`neighbours`: ranks of whose estimates there are copies."""
        self._inner = inner
        self._states = (OWN, *map(copy_of, neighbours))
        self.name, self.digest, self.params = inner.name, inner.digest, inner.params
        self.align, self.fixed = inner.align, inner.fixed
        self.repeats = False  # captured programs have none

    def payload_bytes(self, n: int) -> int:
        return self._inner.payload_bytes(n)

    def init_state(self, n: int, tensors: int = 1) -> dict[str, Any]:
        """The estimate, and the copies of neighbours': flat [n], float32."""
        return {name: np.zeros(n, np.float32) for name in self._states}

    def encode_batch(
        self,
        x: Floats,
        table: Ints,
        out: Bytes,
        at: Ints,
        *,
        state: State | None = None,
        seed: int = 0,
        step: int = 0,
        scale: float = 1.0,
        writeback: bool = False,
        incoming: Any = None,
        capacity: Ints | None = None,
    ) -> Ints:
        """See Codec; what it is asked for is parameters as they are."""
        assert state is not None
        assert scale == 1.0
        assert not writeback
        assert incoming is None
        assert capacity is None
        inside, change = table.copy(), np.empty(int(table[:, 1].sum()), np.float32)
        inside[:, 0] = np.cumsum(table[:, 1]) - table[:, 1]
        for (start, n, *_, place), (first, *_) in zip(table.tolist(), inside.tolist(), strict=True):
            known = state[OWN][place : place + n]
            np.subtract(x[start : start + n], known, out=change[first : first + n])
        used = self._inner.encode_batch(change, inside, out, at, seed=seed, step=step)
        inside[:, 0] = table[:, 4]
        self._inner.decode_batch(out, inside, at, used, state[OWN], add=True, step=step)
        return used

    def decode_batch(
        self, payload: Bytes, table: Ints, at: Ints, used: Ints, out: Floats, **options: Any
    ) -> None:
        self._inner.decode_batch(payload, table, at, used, out, **options)
