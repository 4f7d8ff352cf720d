"""The reference backend: NumPy, one operator at a time. It defines the meaning of specs.

Speed is no goal. Every other backend is tested against this one, payload byte for payload byte.
numerics/bits.py has the operators on single elements, runs.py all others; backend.py and fields.py
write and read payloads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.backends.reference import fields
from compll.backends.reference.runs import Place, Run
from compll.errors import PayloadError
from compll.frontend import feedback
from compll.ir.expr import Type
from compll.ir.layout import Before, header, layout, rounds
from compll.ir.module import Field, Module
from compll.ir.static import Number, extents
from compll.numerics import halves
from compll.numerics.numbers import F32, I64, U8
from compll.runtime.arrays import HostArrays
from compll.runtime.batches import Encoding, State, views

# ---- pieces -------------------------------------------------------------------------------------
# A piece of a gradient: its payload, decoding, and new states.


def encode(run: Run, x: F32, states: State | None, how: Encoding) -> U8:
    """Encode one piece: x and states are views that are updated in place."""
    module = run.module
    if run.n == 0:
        return np.zeros(0, np.uint8)
    if states is None and module.updates and not module.rounds:
        sizes = {s.name: run.n if s.per == "element" else 1 for s in module.states}
        states = {s.name: np.zeros(sizes[s.name], s.dtype) for s in module.states}
    with np.errstate(all="ignore"):
        begin(run, x, states, np.float32(how.scale))
        payload = written(run)
        # a decode that is no function of single elements is run for the residual, too
        needed = states is not None and module.feedback and module.decoded is None
        decoded = decode(payload, run.again()) if how.writeback or needed else None
        if states is not None:
            settle(run, states, decoded)
    if how.writeback:
        x[:] = decoded
    return payload


def begin(run: Run, x: F32, states: State | None, scale: np.float32) -> None:
    """Set the input, with feedback, and the states."""
    module = run.module
    for s in module.states:
        run.inputs[s.name] = _state(run, s, None if states is None else states[s.name])
    run.inputs["g"] = x * scale
    if module.feedback and states is not None:
        held = run.inputs[module.feedback_state]
        if module.differences:
            run.inputs["g"] = x * scale - held
        else:
            run.inputs["g"] = x * scale + held * np.float32(module.decay)


def _state(run: Run, item: Field, held: NDArray[Any] | None) -> Any:
    """A state's value. A matrix that has no room in its piece is not kept."""
    if item.shape == "scalar":
        return np.float64(0.0 if held is None else held[0])
    if item.shape == "n":
        return np.zeros(run.n, np.float32) if held is None else halves.read(held)
    rows, cols = extents(item.dims, run.n)
    if held is None or rows * cols > run.n:
        return np.zeros((rows, cols), np.float32)
    return held[: rows * cols].reshape(rows, cols)


def settle(run: Run, states: State, decoded: F32 | None) -> None:
    """Store new values of states that have room; none takes up a NaN or infinity. decoded: the
    values that the residual subtracts, if the module has no expression of them."""
    module = run.module
    new = dict(module.updates)
    if module.feedback and module.decoded is not None:
        g = module.pool.make("input", (), Type("float", "n"), "g")
        new[module.feedback_state] = feedback.update(module, g, module.decoded)
    # copies: a value may be a state's own memory, which another update overwrites
    values = {n: np.array(run.value(e), np.float32).reshape(-1) for n, e in new.items()}
    if module.feedback and module.decoded is None:
        assert decoded is not None
        halves.keep(states["residual"], run.inputs["g"] - decoded)
    for name, value in values.items():
        if len(value) <= len(states[name]):
            halves.keep(states[name][: len(value)], value)


def close(run: Run, x: F32, states: State | None) -> None:
    """Overwrite the piece with the value decoded from all ranks' combined fields, and update the
    states."""
    module, decoder, sent = run.module, run.again(), run.again()
    decoder.inputs |= run.combined
    value = result(decoder)
    if states is not None:
        begin(run, x, states, np.float32(1))
        left = value
        if module.own:
            # a maximum is the ranks' one, since all ranks need it to decode
            for name, f in run.fields.items():
                shared = name in run.extremes
                sent.inputs[name] = run.combined[name] if shared else run.own_value(f)
            left = result(sent)
        settle(run, states, left)
    x[:] = value


def written(run: Run) -> U8:
    """The payload, with a status byte that says whether the input was finite if there is one."""
    module = run.module
    kept = {s.name: len(run.pick(s.name)) for s in module.selections}
    stored = {f.name: run.stored(f) for f in module.fields}
    counted, gaps = header(module)
    lengths = {name: len(stored[name]) for name in gaps}
    starts = layout(module, run.n, kept, lengths)
    out = np.zeros(starts[-1], np.uint8)
    head = [kept[name] for name in counted] + [lengths[name] for name in gaps]
    out[: 4 * len(head)] = np.array(head, "<u4").view(np.uint8)
    for start, data in zip(starts, stored.values(), strict=False):
        out[start : start + len(data)] = data
    if module.status:
        out[-1] = not np.isfinite(run.inputs["g"]).all()
    return out


def decode(payload: U8, run: Run) -> F32:
    """The float32 [n] values of a payload, computed by `run`. Raises PayloadError."""
    module, n = run.module, run.n
    if n == 0 and len(payload) == 0:
        return np.zeros(0, np.float32)
    read(module, payload, n, run)
    with np.errstate(all="ignore"):
        out = result(run)
    return np.full(n, np.nan, np.float32) if module.status and payload[-1] else out


def result(run: Run) -> F32:
    """The decoded value of the fields that a run was given."""
    return np.asarray(run.value(run.module.decode), np.float32)


def read(module: Module, payload: U8, n: int, run: Run) -> None:
    """Give `run` the fields of a payload. Raises PayloadError."""
    kept, lengths = fields.read_header(module, run.env, payload, n)
    starts = layout(module, n, kept, lengths)
    if len(payload) != starts[-1]:
        raise PayloadError(
            f"{module.name}: a payload of {n} elements has {starts[-1]} bytes here, "
            f"this one {len(payload)}"
        )
    drawn = {s.name for s in module.selections if s.kind == "drawn"}
    run.picked = {name: np.arange(count) for name, count in kept.items() if name not in drawn}
    for field, start in zip(module.fields, starts, strict=False):
        data = payload[start : start + lengths.get(field.name, len(payload))]
        size = kept.get(module.among(field.of), n)
        run.inputs[field.name] = fields.loaded(field, data, size, run.tile, kept.get(field.of, 0))
    fields.check_indices(module, run.inputs, n, kept)


# ---- backend ------------------------------------------------------------------------------------


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
        begin(run, x, None, np.float32(1))
        return run

    def encode_batch(
        self, x: F32, table: I64, out: U8, at: I64, state: State | None, how: Encoding
    ) -> I64:
        """Encode piece after piece, as the only rank."""
        assert how.incoming is None
        used = np.zeros(len(table), np.int64)
        for i, run, piece, states in self.runs(x, table, state, how):
            payload = encode(run, piece, states, how)
            out[at[i] : at[i] + len(payload)] = payload
            used[i] = len(payload)
        return used

    def decode_batch(
        self, payload: U8, table: I64, at: I64, used: I64, out: F32, *, add: bool, step: int = 0
    ) -> None:
        """Decode all pieces, then write them."""
        values = []
        for i, run, piece, _ in self.runs(out, table, None, Encoding(0, step)):
            values.append((piece, decode(payload[at[i] : at[i] + used[i]], run)))
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
                begin(run, piece, states, np.float32(1))
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
                close(run, piece, states)

    def combined(
        self, sums: Sequence[tuple[Any, Any]], piece: int, n: int, workers: int
    ) -> dict[str, Any]:
        """The means of the rounds so far, by field, for one piece. See [Note: combined]."""
        result = {}
        for round_, (payload, at) in zip(self.rounds, sums, strict=False):
            data = payload[at[piece] : at[piece] + round_.payload_bytes(n)]
            value = np.asarray(fields.loaded(round_.field, data, n, 1, round_.kept(n)), np.float32)
            with np.errstate(all="ignore"):
                result[round_.name] = value if round_.op == "max" else value / np.float32(workers)
        return result


def build(module: Module, params: Mapping[str, Number]) -> Kernels:
    """The backend's entry point."""
    return Kernels(module, params)
