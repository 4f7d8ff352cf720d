"""Batches of specs that mix elements: piece after piece, round after round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compll.backends.reference import fields, pieces
from compll.backends.reference.array_runs import ArrayRun
from compll.ir.module import Module
from compll.ir.rounds import Before, rounds
from compll.ir.static import Number
from compll.numerics.types import F32, I64, U8
from compll.runtime.arrays import HostArrays
from compll.runtime.batches import Encoding, State, views


class ArrayKernels:
    """The backend's batch interface (see batches.Backend), piece after piece."""

    arrays = HostArrays()
    fuses = merges = False

    def __init__(self, module: Module, params: Mapping[str, Number]) -> None:
        self.module, self.params = module, dict(params)
        self.rounds = rounds(module)

    def run(self, n: int, **place: int) -> ArrayRun:
        """A fresh run over a piece of n elements."""
        return ArrayRun(self.module, self.params, n, **place)

    def encode_batch(
        self, x: F32, table: I64, out: U8, at: I64, state: State | None, how: Encoding
    ) -> I64:
        """Encode every piece by itself, as the only rank."""
        assert how.incoming is None
        used = np.zeros(len(table), np.int64)
        for i, (start, length, tensor, offset, first) in enumerate(table.tolist()):
            if length == 0:
                continue
            states = views(self.module, state, first, length, tensor)
            piece = x[start : start + length]
            place = {"step": how.step, "tensor": tensor, "offset": offset}
            run = self.run(length, seed=how.seed, **place)
            with np.errstate(all="ignore"):
                run.begin(piece, states, how.scale)
                payload = pieces.written(run, run.given)
                if states is not None or how.writeback:
                    decoded = self.run(length, **place).ready(payload)
                    run.finish(piece, states, decoded, write=how.writeback)
            out[at[i] : at[i] + len(payload)] = payload
            used[i] = len(payload)
        return used

    def decode_batch(
        self, payload: U8, table: I64, at: I64, used: I64, out: F32, *, add: bool, step: int = 0
    ) -> None:
        """Decode all pieces, then write them."""
        done = []
        for a, u, row in zip(at.tolist(), used.tolist(), table.tolist(), strict=True):
            start, length, tensor, offset, _ = row
            run = self.run(length, step=step, tensor=tensor, offset=offset)
            done.append((run, out[start : start + length], run.ready(payload[a : a + u])))
        for run, piece, value in done:
            run.write(piece, value, add=add)

    def raise_found(self) -> None:
        """Do nothing: a call raises for a bad payload itself."""

    # rounds

    def encode_round(
        self,
        number: int,
        x: F32,
        table: I64,
        out: U8,
        at: I64,
        before: Before,
        state: State | None,
        how: Encoding,
    ) -> I64:
        """Encode a round's payload for every piece; see Codec.encode_round."""
        used = np.zeros(len(table), np.int64)
        for i, (start, length, tensor, offset, first) in enumerate(table.tolist()):
            if length == 0:
                continue
            run = self.run(length, seed=how.seed, step=how.step, tensor=tensor, offset=offset)
            states = views(self.module, state, first, length, tensor)
            with np.errstate(all="ignore"):
                run.begin(x[start : start + length], states, 1.0)
                run.combined = self.combined(before, i, length, how.workers)
                payload = run.stored(self.rounds[number].field)
            out[at[i] : at[i] + len(payload)] = payload
            used[i] = len(payload)
        return used

    def decode_rounds(
        self, x: F32, table: I64, sums: Before, state: State | None, how: Encoding
    ) -> None:
        """Decode all ranks' sums and update the states; see Codec.decode_rounds."""
        for i, (start, length, tensor, offset, first) in enumerate(table.tolist()):
            if length == 0:
                continue
            piece = x[start : start + length]
            place = {"seed": how.seed, "step": how.step, "tensor": tensor, "offset": offset}
            decoder, run = self.run(length, **place), self.run(length, **place)
            run.combined = self.combined(sums, i, length, how.workers)
            decoder.inputs.update(run.combined)
            states = views(self.module, state, first, length, tensor)
            with np.errstate(all="ignore"):
                run.close(piece, states, decoder, self.run(length, **place))

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
