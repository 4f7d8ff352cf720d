"""A compiled compressor: what `compll.compile` returns and what the synchronization layer uses."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from compll import layout as lay
from compll.arrays import Arrays
from compll.errors import PayloadError, UsageError
from compll.ir import Module
from compll.rounds import Before, Round, draws, rounds
from compll.shapes import Shape
from compll.static import Number, evaluate

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
#: float32, or 16 bits a value: float16, and bfloat16 as the uint16 of its bits
State = Mapping[str, NDArray[Any]]

#: Columns of a batch's table, a row per piece (see Codec.encode_batch).
START, LENGTH, TENSOR, OFFSET, STATE = range(5)


class Incoming(NamedTuple):
    """Payloads of a batch's pieces: uint8, where each begins, and the bytes of each (int64 [m])."""

    payload: Any
    at: Any
    used: Any


class Backend(Protocol):
    """What a file in compll/backends offers: kernels over a batch of pieces."""

    #: the memory that gradients, states and payloads are in
    arrays: Arrays
    #: whether encode_batch takes `incoming` payloads in
    fuses: bool

    def encode_batch(
        self,
        x: Any,
        table: I64,
        out: Any,
        at: I64,
        state: State | None,
        *,
        seed: int,
        step: int,
        scale: float,
        writeback: bool,
        incoming: Incoming | None = None,
    ) -> I64:
        """Encode every piece, after adding what `incoming` decodes to; used bytes, int64 [m]."""

    def decode_batch(
        self, payload: Any, table: I64, at: I64, used: I64, out: Any, *, add: bool
    ) -> None:
        """Decode every piece into out, or add it. Raises PayloadError before any write.

        A backend on a device does not wait: a bad piece is left out, and told by raise_found.
        """

    def raise_found(self) -> None:
        """Raise PayloadError for a bad payload that an earlier decode met; may wait."""


class ArrayBackend(Protocol):
    """What a backend offers besides for specs computed an array at a time; see the Codec's methods.

    encode_round and decode_rounds: where the spec has rounds.
    """

    def decode_batch(
        self, payload: Any, table: I64, at: I64, used: I64, out: Any, *, add: bool, step: int
    ) -> None:
        """Decode every piece, of this step, into out, or add it."""

    def encode_round(
        self,
        number: int,
        x: Any,
        table: I64,
        out: Any,
        at: I64,
        before: Before,
        state: State | None,
        *,
        workers: int,
        seed: int,
        step: int,
    ) -> I64:
        """Encode what a round adds up."""

    def decode_rounds(
        self,
        x: Any,
        table: I64,
        sums: Before,
        state: State | None,
        *,
        workers: int,
        seed: int,
        step: int,
    ) -> None:
        """Decode what all rounds added up, update the states."""


class Codec:
    """A compressor for one parameter set on one backend.

    Arrays are NumPy float32 (gradients, states) and uint8 (payloads), C-contiguous, one
    dimension. Calls release the GIL and may run in any thread; two calls must not share state.
    """

    def __init__(
        self, module: Module, params: Mapping[str, Number], target: str, text: str, backend: Backend
    ) -> None:
        self.module, self.target, self.backend = module, target, backend
        self.params: dict[str, Any] = dict(params) | dict(module.kept_as)
        self.arrays = backend.arrays
        #: whether encode_batch takes `incoming` payloads in without a decode of their own
        self.fuses = backend.fuses
        self.name = module.name
        self.align = module.group or 1
        self.fixed = lay.is_fixed(module)
        self.additive = module.fields[0].storage if module.merge == "sum" else None
        #: decoded values add up and are encoded once more, without states: signs that vote
        self.vote = module.merge == "vote"
        self.stateful = bool(module.states)
        #: a declared state (momentum, say) belongs to a worker's own gradient: no second encode
        self.reencodes = all(s.name == "residual" for s in module.states)
        #: payload fields that all ranks combine one after the other; () where payloads travel whole
        self.rounds: tuple[Round, ...] = rounds(module)
        if self.rounds:
            self.reencodes = False
        #: whether decode must be told the step of the encode, as it draws again what encode drew
        self.needs_step = draws(module)
        #: under which optimizers it was measured to keep the loss: any, sgd, none or unknown
        self.optimizers = module.optimizers
        #: makes the codec for a shape, where that settles parameters
        self.shaped: Callable[[Shape], Codec] | None = None
        self._bounds: dict[int, int] = {}
        #: of what payloads mean: however states are kept, ranks understand each other
        self.digest = hashlib.sha256(f"{text}\n{sorted(params.items())}".encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        params = "".join(f", {k}={v!r}" for k, v in self.params.items())
        return f"Codec({self.name!r}{params}, target={self.target!r})"

    def payload_bytes(self, n: int) -> int:
        """The most bytes that the payload of n elements takes; known before any data."""
        n = self._count(n)
        if n not in self._bounds:
            if len(self._bounds) > 4096:
                self._bounds.clear()
            self._bounds[n] = lay.payload_bytes(self.module, n, self.params)
        return self._bounds[n]

    def init_state(self, n: int, tensors: int = 1) -> dict[str, NDArray[Any]]:
        """Fresh state (zeros): float32 [n] per element, [tensors] per tensor; {} when stateless.

        States of 16 bits are float16 [n], and uint16 [n] with the bits of bfloat16. A matrix lies
        in the first elements of its piece's n; where it has more, it is not kept.
        """
        n = self._count(n)
        return {
            s.name: self.arrays.zeros(tensors if s.shape == "scalar" else n, s.dtype)
            for s in self.module.states
        }

    def encode(self, x: F32, *, state: State | None = None, seed: int = 0, step: int = 0) -> U8:
        """The payload of x, float32 [n], as uint8.

        With a state (from init_state(n)), error feedback is applied and the state updated in the
        same passes. Equal (x, state, seed, step) give equal bytes on every backend.
        """
        flat = self.arrays.vector(x, self.name)
        n = len(flat)
        out = self.arrays.empty(self.payload_bytes(n), "uint8")
        used = self.encode_batch(
            flat, _one(n), out, np.zeros(1, np.int64), state=state, seed=seed, step=step
        )
        payload: U8 = out[: int(used[0])]
        return payload

    def decode(self, payload: U8, n: int, *, step: int = 0) -> F32:
        """The float32 [n] values of a payload. Raises PayloadError.

        step: that of the encode, which specs with drawn selections need (`needs_step`).
        """
        n = self._count(n)
        try:
            out: F32 = self.arrays.empty(n, "float32")
        except (MemoryError, ValueError):
            raise UsageError(f"{self.name}: there is no memory for {n} elements") from None
        self._decode(payload, out, add=False, step=step)
        return out

    def decode_add(self, payload: U8, out: F32, *, step: int = 0) -> None:
        """Add the values of a payload to out, float32 [n]. Raises PayloadError, out untouched."""
        out = self.arrays.vector(out, self.name, write=True)
        self._decode(payload, out, add=True, step=step)

    def _decode(self, payload: U8, out: F32, *, add: bool, step: int) -> None:
        data, at = self.arrays.payload(payload, self.name), np.zeros(1, np.int64)
        used = np.array([len(data)])
        self.decode_batch(data, _one(len(out)), at, used, out, add=add, step=step)
        self.backend.raise_found()

    def encode_batch(
        self,
        x: F32,
        table: I64,
        out: U8,
        at: I64,
        *,
        state: State | None = None,
        seed: int = 0,
        step: int = 0,
        scale: float = 1.0,
        writeback: bool = False,
        incoming: Incoming | None = None,
    ) -> I64:
        """Encode many pieces in one launch; bytes used by each, int64 [m].

        table: int64 [m, 5]; a piece is x[START : START + LENGTH], part of tensor TENSOR from
        element OFFSET on (these and seed, step choose its random draws), its per-element states at
        STATE of the flat arrays in `state`, its per-tensor states at TENSOR. at: int64 [m], where
        each payload begins in `out` (payload_bytes(LENGTH) bytes of room). x is multiplied by
        `scale` as it is read. writeback: x's piece becomes decode(encode(x)), in the same pass.
        incoming: payloads that are decoded and added to x before all that, in the same pass where
        the codec allows it; without writeback x's pieces then hold nothing of use.
        """
        writes = writeback or incoming is not None
        x = self.arrays.vector(x, self.name, write=writes)
        seed, step = self._draws(seed, step)
        self._check_table(table, at, len(x), "x")
        self._check_state(state, table)
        room = at + np.array([self.payload_bytes(int(n)) for n in table[:, LENGTH]], np.int64)
        if len(room) and int(room.max()) > len(out):
            raise UsageError(
                f"{self.name}: the payloads need {int(room.max())} bytes, out has {len(out)}"
            )
        if incoming is not None:
            self._check_lengths(*incoming[:1], table, *incoming[1:])
            if not self.backend.fuses:
                self.decode_batch(*incoming[:1], table, *incoming[1:], x, add=True, step=step)
                incoming = None
        return self.backend.encode_batch(
            x,
            table,
            out,
            at,
            state,
            seed=seed,
            step=step,
            scale=scale,
            writeback=writeback,
            incoming=incoming,
        )

    def decode_batch(
        self,
        payload: U8,
        table: I64,
        at: I64,
        used: I64,
        out: F32,
        *,
        add: bool = False,
        step: int = 0,
    ) -> None:
        """Decode pieces (used: bytes of each) into out, or add them. Raises PayloadError.

        step: that of the encode, which specs with drawn selections need (`needs_step`).
        """
        out = self.arrays.vector(out, self.name, write=True)
        self._check_table(table, at, len(out), "out")
        self._check_lengths(payload, table, at, used)
        if self.module.arrays:
            arrays = cast(ArrayBackend, self.backend)
            arrays.decode_batch(payload, table, at, used, out, add=add, step=step)
        else:
            self.backend.decode_batch(payload, table, at, used, out, add=add)

    def for_shape(self, shape: Shape) -> Codec:
        """The codec for tensors of this shape, which it still takes flat.

        It is another one only where the spec takes parameters from the shape (`from:`) that were
        not given.
        """
        return self if self.shaped is None else self.shaped(shape)

    def suits(self, n: int) -> bool:
        """Whether a tensor of n elements is worth compressing, by the spec's `when:`."""
        when = self.module.when
        return when is None or bool(evaluate(when, {"n": self._count(n)}))

    def encode_round(
        self,
        number: int,
        x: F32,
        table: I64,
        out: U8,
        at: I64,
        before: Before = (),
        *,
        workers: int,
        state: State | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> I64:
        """Encode what round `number` adds up, for every piece; bytes used by each, int64 [m].

        before: the sums over all `workers` of the earlier rounds, in order: (payload, where each
        piece begins). The state is read, not changed. The other arguments are encode_batch's.
        """
        x = self._check_rounds(x, table, state, [*before, (out, at)], number + 1)
        if reason := self.refuses_workers(workers):
            raise UsageError(f"{self.name}: {reason}")
        return cast(ArrayBackend, self.backend).encode_round(
            number, x, table, out, at, before, state, workers=workers,
            seed=seed & (2**64 - 1), step=step,
        )  # fmt: skip

    def decode_rounds(
        self,
        x: F32,
        table: I64,
        sums: Before,
        *,
        workers: int,
        state: State | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> None:
        """Overwrite x's pieces by the mean that the sums of all rounds give; update the state."""
        x = self._check_rounds(x, table, state, sums, len(self.rounds), write=True)
        cast(ArrayBackend, self.backend).decode_rounds(
            x, table, sums, state, workers=workers, seed=seed & (2**64 - 1), step=step
        )

    def refuses_workers(self, workers: int) -> str | None:
        """Why so many ranks cannot combine what they send in rounds, or None."""
        for one in self.rounds:
            if one.most_workers and workers > one.most_workers:
                sent = one.field.most
                return (
                    f"{workers} ranks add up codes of 0 to {sent} to {workers * sent}, "
                    f"and a byte holds 255: at most {one.most_workers} ranks, or fewer bits"
                )
        return None

    def _check_rounds(
        self, x: F32, table: I64, state: State | None, payloads: Before, count: int,
        *, write: bool = False,
    ) -> F32:  # fmt: skip
        if not 1 <= len(payloads) == count <= len(self.rounds):
            raise UsageError(
                f"{self.name}: round {count - 1} of {len(self.rounds)} with "
                f"{len(payloads) - 1} before it"
            )
        x = self.arrays.vector(x, self.name, write=write)
        for one, (payload, at) in zip(self.rounds, payloads, strict=False):
            self._check_table(table, at, len(x), "x")
            sizes = [one.payload_bytes(int(n)) for n in table[:, LENGTH]]
            if any(a + size > len(payload) for a, size in zip(at.tolist(), sizes, strict=True)):
                raise PayloadError(f"{self.name}: round {one.name!r} ends early")
        self._check_state(state, table)
        return x

    def _draws(self, seed: int, step: int) -> tuple[int, int]:
        """What chooses random draws: 64 bits of the seed, and the step. Raises UsageError."""
        try:
            seed, step = operator.index(seed) & (2**64 - 1), operator.index(step)
        except TypeError:
            raise UsageError(
                f"{self.name}: seed and step are whole numbers, not {seed!r} and {step!r}"
            ) from None
        if not -(2**63) <= step < 2**63:
            raise UsageError(f"{self.name}: step {step} is no int64")
        return seed, step

    def _count(self, n: int) -> int:
        """A number of elements. Raises UsageError."""
        try:
            count = operator.index(n)
        except TypeError:
            raise UsageError(f"{self.name}: {n!r} is no number of elements") from None
        if count < 0:
            raise UsageError(f"{self.name}: {n} elements")
        if count > 2**32 and self.module.selections:
            raise UsageError(
                f"{self.name}: positions have 32 bits, too few for {n} elements; encode in parts"
            )
        return count

    def _check_lengths(self, payload: U8, table: I64, at: I64, used: Any) -> None:
        if not isinstance(used, np.ndarray):
            return  # in device memory, where decode kernels look at them
        if len(used) != len(at) or (
            len(at) and (int(used.min()) < 0 or int((at + used).max()) > len(payload))
        ):
            raise PayloadError(f"{self.name}: the payload ends early, at byte {len(payload)}")
        for row, size in zip(table, used, strict=True) if self.fixed else ():
            if size != self.payload_bytes(int(row[LENGTH])):
                raise PayloadError(
                    f"{self.name}: a payload of {row[LENGTH]} elements has "
                    f"{self.payload_bytes(int(row[LENGTH]))} bytes, this one {size}"
                )

    def _check_table(self, table: I64, at: I64, length: int, name: str) -> None:
        if (
            table.dtype != np.int64
            or table.ndim != 2
            or table.shape[1] != 5
            or len(at) != len(table)
        ):
            raise UsageError(f"{self.name}: the table is int64 [m, 5] with m positions")
        if len(table) == 0:
            return
        if int(at.min()) < 0:
            raise UsageError(f"{self.name}: a payload begins at byte {int(at.min())}")
        ends = table[:, START] + table[:, LENGTH]
        if int(table.min()) < 0 or int(ends.max()) > length:
            raise UsageError(
                f"{self.name}: a piece ends at {int(ends.max())}, {name} has {length} elements"
            )

    def _check_state(self, state: State | None, table: I64) -> None:
        if state is None or len(table) == 0:
            return
        if not isinstance(cast(object, state), Mapping):
            kind = type(state).__name__
            raise UsageError(f"{self.name}: the state comes from init_state(n); this is {kind}")
        for item in self.module.states:
            held: Any = state.get(item.name)
            given = str(getattr(held, "dtype", type(held).__name__))
            if held is not None and given != item.dtype:
                raise UsageError(
                    f"{self.name}: state {item.name!r} is {item.storage}, an array of "
                    f"{item.dtype}, not {given}; init_state(n) makes it"
                )
            have = len(state[item.name]) if item.name in state else -1
            need = int(
                table[:, TENSOR].max() + 1
                if item.shape == "scalar"
                else (table[:, STATE] + table[:, LENGTH]).max()
            )
            if have < need:
                raise UsageError(
                    f"{self.name}: state {item.name!r} has {max(have, 0)} elements, "
                    f"{need} are needed"
                )


def _one(n: int) -> I64:
    return np.array([[0, n, 0, 0, 0]], np.int64)
