"""The reference backend: NumPy, one operator at a time. It defines the meaning of specs.

Speed is no goal. Every other backend is tested against this one, payload byte for payload byte.
elementwise.py, runs.py and array_runs.py define the operators; pieces.py and fields.py write and
read payloads.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compll.backends.reference import pieces
from compll.backends.reference.array_kernels import ArrayKernels
from compll.backends.reference.runs import Run
from compll.ir.matrices import mixes
from compll.ir.module import Module
from compll.ir.static import Number
from compll.numerics.types import F32, I64, U8
from compll.runtime.arrays import HostArrays
from compll.runtime.batches import Encoding, State, views


class Kernels:
    """The backend's batch interface (see batches.Backend)."""

    arrays = HostArrays()
    fuses = merges = False

    def __init__(self, module: Module, params: Mapping[str, Number]) -> None:
        self.module, self.params = module, params

    def encode_batch(
        self, x: F32, table: I64, out: U8, at: I64, state: State | None, how: Encoding
    ) -> I64:
        """Encode piece after piece."""
        assert how.incoming is None
        used = np.zeros(len(table), np.int64)
        for i, (start, length, tensor, offset, first) in enumerate(table.tolist()):
            states = views(self.module, state, first, length, tensor)
            payload = pieces.encode(
                self.module,
                self.params,
                x[start : start + length],
                states,
                how,
                tensor=tensor,
                offset=offset,
                most=None if how.most is None else int(how.most[i]),
            )
            out[at[i] : at[i] + len(payload)] = payload
            used[i] = len(payload)
        return used

    def decode_batch(
        self,
        payload: U8,
        table: I64,
        at: I64,
        used: I64,
        out: F32,
        *,
        add: bool,
        step: int = 0,
    ) -> None:
        """Decode all pieces, then write them."""
        values = []
        for a, u, (_, n, tensor, offset, _) in zip(
            at.tolist(), used.tolist(), table.tolist(), strict=True
        ):
            run = Run(self.module, self.params, n, step=step, tensor=tensor, offset=offset)
            values.append(pieces.decode(payload[a : a + u], run))
        for (start, length), value in zip(table[:, :2].tolist(), values, strict=True):
            piece = out[start : start + length]
            piece[:] = piece + value if add else value

    def raise_found(self) -> None:
        """Do nothing: a call raises for a bad payload itself."""


def build(module: Module, params: Mapping[str, Number]) -> Kernels | ArrayKernels:
    """The backend's entry point."""
    return ArrayKernels(module, params) if mixes(module) else Kernels(module, params)
