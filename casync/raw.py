"""Raw float32 as a codec, the identity: callers need no special case for uncompressed data.

Accepts NumPy arrays, and tensors of any device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import torch

from casync.codec import (
    FLOAT_BYTES,
    Bytes,
    Codec,
    CodecDefaults,
    DecodeOptions,
    EncodeOptions,
    Floats,
    Ints,
    State,
)

__all__ = ["RAW", "Raw", "with_raw"]

RAW = "raw"  # its key in every mapping of codecs


class Raw(CodecDefaults):
    """Payloads are the float32 values. Implements Codec."""

    name = digest = RAW
    fixed = True
    additive = "float32"
    reencodes = True

    def payload_bytes(self, n: int) -> int:
        return FLOAT_BYTES * n

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
        assert "incoming" not in options  # it does not fuse
        factor = float(np.float32(options.get("scale", 1.0)))
        for piece, payload in _pairs(x, table, out, at):
            payload[:] = piece
            if factor != 1.0:
                payload *= factor
            if options.get("writeback"):
                piece[:] = payload
        return table[:, 1] * FLOAT_BYTES

    def decode_batch(
        self,
        payload: Bytes,
        table: Ints,
        at: Ints,
        used: Ints,
        out: Floats,
        **options: Unpack[DecodeOptions],
    ) -> None:
        for piece, values in _pairs(out, table, payload, at):
            if options.get("add"):
                piece += values
            else:
                piece[:] = values


def _pairs(x: Any, table: Ints, data: Any, at: Ints) -> Sequence[tuple[Any, Any]]:
    """Each piece of x with its payload as float32; arrays of NumPy, or tensors of any device."""
    floats = torch.float32 if isinstance(data, torch.Tensor) else np.float32
    return [
        (x[start : start + n], data[first : first + FLOAT_BYTES * n].view(floats))
        for (start, n, *_), first in zip(table.tolist(), at.tolist(), strict=True)
    ]


def with_raw(codecs: Mapping[str, Codec]) -> dict[str, Codec]:
    """The caller's codecs and `raw`."""
    return {RAW: Raw(), **codecs}
