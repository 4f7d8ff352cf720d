"""Raw float32 as a codec: the identity, so that nothing else needs to know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from casync.codec import FLOAT_BYTES, Bytes, Codec, CodecDefaults, Floats, Ints, State
from casync.regions import Codecs

__all__ = ["RAW", "Raw", "with_raw"]

RAW = "raw"  # its key in every mapping of codecs


class Raw(CodecDefaults):
    """Payloads are the float32 values. See Codec for its members."""

    name = digest = RAW
    fixed = True
    additive = "float32"
    reencodes = True

    def payload_bytes(self, n: int) -> int:
        """See Codec."""
        return FLOAT_BYTES * n

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
    ) -> Ints:
        """See Codec."""
        assert incoming is None  # it does not fuse
        for piece, payload in _pairs(x, table, out, at):
            np.multiply(piece, np.float32(scale), out=payload)
            if writeback:
                piece[:] = payload
        return table[:, 1] * FLOAT_BYTES

    def decode_batch(
        self,
        payload: Bytes,
        table: Ints,
        at: Ints,
        used: Ints,
        out: Floats,
        *,
        add: bool = False,
        step: int = 0,
    ) -> None:
        """See Codec."""
        for piece, values in _pairs(out, table, payload, at):
            if add:
                piece += values
            else:
                piece[:] = values


def _pairs(x: Floats, table: Ints, data: Bytes, at: Ints) -> Sequence[tuple[Floats, Floats]]:
    """Each piece of x, and its payload as numbers."""
    return [
        (x[start : start + n], data[first : first + FLOAT_BYTES * n].view(np.float32))
        for (start, n, *_), first in zip(table.tolist(), at.tolist(), strict=True)
    ]


def with_raw(codecs: Mapping[str, Codec]) -> Codecs:
    """The codecs of a caller, raw, and regions of them."""
    return Codecs({RAW: Raw(), **codecs})
