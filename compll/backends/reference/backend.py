"""The reference backend: NumPy, one operator at a time. It defines the meaning of specs.

Speed is no goal. Every other backend is tested against this one, payload byte for payload byte.
numerics/bits.py has the operators on single elements, runs.py all others; pieces.py and fields.py
write and read payloads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from compll.backends.reference import fields, pieces
from compll.backends.reference.runs import Place, Run
from compll.ir.module import Module
from compll.ir.rounds import Before, rounds
from compll.ir.static import Number
from compll.numerics.types import F32, I64, U8
from compll.runtime.arrays import HostArrays
from compll.runtime.batches import Encoding, State, views


class Kernels:
    """The backend's batch interface (see batches.Backend)."""

    arrays = HostArrays()
    fuses = merges = False

    def __init__(self, module: Module, params: Mapping[str, Number]) -> None:
        self.module, self.params = module, dict(params)
        self.rounds = rounds(module)

    def runs(
        self, x: F32, table: I64, state: State | None, how: Encoding
    ) -> Iterator[tuple[int, Run, F32, State | None]]:
        """The number, a fresh run, the part of x and the states of every piece."""
        for i, (start, n, tensor, offset, first) in enumerate(table.tolist()):
            most = None if how.most is None else int(how.most[i])
            place = Place(how.seed, how.step, tensor, offset)
            states = views(self.module, state, first, n, tensor)
            yield i, Run(self.module, self.params, n, place, most), x[start : start + n], states

    def opened(self, x: F32) -> Run:
        """A run that has taken a gradient in, without states: for checks that look at values."""
        run = Run(self.module, self.params, len(x), Place(0, 0, 0, 0))
        pieces.begin(run, x, None, np.float32(1))
        return run

    def encode_batch(
        self, x: F32, table: I64, out: U8, at: I64, state: State | None, how: Encoding
    ) -> I64:
        """Encode piece after piece, as the only rank."""
        assert how.incoming is None
        used = np.zeros(len(table), np.int64)
        for i, run, piece, states in self.runs(x, table, state, how):
            payload = pieces.encode(run, piece, states, how)
            out[at[i] : at[i] + len(payload)] = payload
            used[i] = len(payload)
        return used

    def decode_batch(
        self, payload: U8, table: I64, at: I64, used: I64, out: F32, *, add: bool, step: int = 0
    ) -> None:
        """Decode all pieces, then write them."""
        values = []
        for i, run, piece, _ in self.runs(out, table, None, Encoding(0, step)):
            values.append((piece, pieces.decode(payload[at[i] : at[i] + used[i]], run)))
        for piece, value in values:
            piece[:] = piece + value if add else value

    def raise_found(self) -> None:
        """Do nothing: a call raises for a bad payload itself."""

    # rounds

    def encode_round(
        self, number: int, x: F32, table: I64, out: U8, at: I64, before: Before,
        state: State | None, how: Encoding,
    ) -> I64:  # fmt: skip
        """Encode a round's payload for every piece; see Codec.encode_round."""
        used = np.zeros(len(table), np.int64)
        for i, run, piece, states in self.runs(x, table, state, how):
            if run.n == 0:
                continue
            with np.errstate(all="ignore"):
                pieces.begin(run, piece, states, np.float32(1))
                run.combined = self.combined(before, i, run.n, how.workers)
                payload = run.stored(self.rounds[number].field)
            out[at[i] : at[i] + len(payload)] = payload
            used[i] = len(payload)
        return used

    def decode_rounds(
        self, x: F32, table: I64, sums: Before, state: State | None, how: Encoding
    ) -> None:
        """Decode all ranks' sums and update the states; see Codec.decode_rounds."""
        for i, run, piece, states in self.runs(x, table, state, how):
            if run.n == 0:
                continue
            with np.errstate(all="ignore"):
                run.combined = self.combined(sums, i, run.n, how.workers)
                pieces.close(run, piece, states)

    def combined(
        self, sums: Sequence[tuple[Any, Any]], piece: int, n: int, workers: int
    ) -> dict[str, Any]:
        """The means of the rounds so far, by field, for one piece. See [Note: combined]."""
        found = {}
        for one, (payload, at) in zip(self.rounds, sums, strict=False):
            data = payload[at[piece] : at[piece] + one.payload_bytes(n)]
            value = np.asarray(fields.loaded(one.field, data, n, 1, one.kept(n)), np.float32)
            with np.errstate(all="ignore"):
                found[one.name] = value if one.op == "max" else value / np.float32(workers)
        return found


def build(module: Module, params: Mapping[str, Number]) -> Kernels:
    """The backend's entry point."""
    return Kernels(module, params)
