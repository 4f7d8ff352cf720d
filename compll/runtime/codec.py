"""A compiled compressor: what `compll.compile` returns and what the synchronization layer uses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from compll.errors import UsageError
from compll.frontend.shapes import Shape
from compll.ir.capacity import cuts
from compll.ir.module import Module
from compll.ir.rounds import Before, Round, draws
from compll.ir.static import Number, evaluate
from compll.numerics.held import hold, is_held, part
from compll.numerics.types import F32, I64, U8
from compll.passes.steps import follows_step
from compll.runtime.arguments import Arguments
from compll.runtime.arrays import INTS, fault, on_stream
from compll.runtime.batches import Backend, Encoding, Incoming, State


class Codec:
    """A compressor for one parameter set on one backend.

    Arrays are NumPy float32 (gradients), uint8 (payloads), and float32, float16 or uint16 with the
    bits of bfloat16 (states), C-contiguous, one dimension; on a device they are its arrays, and
    gradients may be float16 and bfloat16, too. Calls release the GIL and may run in any thread; two
    calls must not share state. On a device calls of a codec share memory, too: they are ordered by
    a stream, or by events.
    """

    def __init__(
        self, module: Module, params: Mapping[str, Number], target: str, text: str, backend: Backend
    ) -> None:
        self.module, self.target, self.backend = module, target, backend
        self.params: dict[str, Any] = dict(params) | dict(module.kept_as)
        self.arrays = backend.arrays
        self._given = Arguments(module, params, host=self.arrays.host)
        #: whether encode_batch takes `incoming` payloads in without a decode of their own
        self.fuses = backend.fuses
        #: whether decode_batch adds several payloads of each piece in one launch
        self.merges = backend.merges
        self.name = module.name
        self.align = module.group or 1
        self.fixed = self._given.fixed
        self.additive = module.fields[0].storage if module.merge == "sum" else None
        #: decoded values add up and are encoded once more, without states: signs that vote
        self.vote = module.merge == "vote"
        self.stateful = bool(module.states)
        #: a declared state (momentum, say) belongs to a worker's own gradient: no second encode
        self.reencodes = all(s.name == "residual" for s in module.states)
        #: payload fields that all ranks combine one after the other; () where payloads travel whole
        self.rounds: tuple[Round, ...] = self._given.all_rounds
        if self.rounds:
            self.reencodes = False
        #: whether nothing that the host computes for a call follows from its step
        self.repeats = not follows_step(module)
        #: whether encode takes a capacity: what does not fit stays in a state
        self.cuts = cuts(module)
        #: whether decode must be told the step of the encode, as it draws again what encode drew
        self.needs_step = draws(module)
        #: makes the codec for a shape, where that settles parameters
        self.shaped: Callable[[Shape], Codec] | None = None
        #: what compiles it again, in another process: a function and its arguments
        self.origin: tuple[Callable[..., Codec], tuple[Any, ...]] | None = None
        #: of what payloads mean: however states are kept, ranks understand each other
        self.digest = hashlib.sha256(f"{text}\n{sorted(params.items())}".encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        params = "".join(f", {k}={v!r}" for k, v in self.params.items())
        return f"Codec({self.name!r}{params}, target={self.target!r})"

    def __reduce__(self) -> tuple[Callable[..., Codec], tuple[Any, ...]]:
        """A pickle holds no kernels: who loads it compiles the spec, or takes it from the cache."""
        if self.origin is None:
            raise TypeError(f"{self!r} was not made by compll.compile, which a pickle needs")
        make, args = self.origin
        return make, (*args, self.digest)

    def __deepcopy__(self, memo: object) -> Codec:
        """Itself: a codec does not change, its states are the caller's."""
        return self

    def __copy__(self) -> Codec:
        """Itself, as a deep copy is."""
        return self

    def hold(self, numbers: I64) -> I64:
        """A copy of int64 numbers that cannot be changed, for calls to take as `table`, `at`,
        `used` or `capacity`: they are checked once, and on a device copied there and prepared for
        once; all that lives as long as what is returned, so a CUDA graph of such calls does, too.
        Raises UsageError."""
        if not is_held(numbers) and (wrong := fault(numbers, INTS, np.ndim(numbers))):
            raise UsageError(f"{self.name}: an array of int64 can be held, not {wrong}")
        return hold(numbers)

    def view(self, x: Any) -> Any:
        """A gradient, payload or state as calls take it quickest, with the same memory: an array in
        device memory that need not be looked at anew in each call. Raises UsageError."""
        return self.arrays.view(x, self.name)

    @contextmanager
    def ticking(self, tick: Any) -> Iterator[None]:
        """Encodes within add an int64 [1] in device memory to `step` when their kernels run: so a
        CUDA graph of them draws anew each time. Only for the backend of a device."""
        backend = cast(Any, self.backend)
        before, backend.tick = backend.tick, self.arrays.raw(tick, self.name)
        try:
            yield
        finally:
            backend.tick = before

    def prepare(self) -> None:
        """Compile what is else compiled by the first call that needs it: to encode at an
        aggregator, with `incoming` payloads or, where signs vote, without states."""
        x = self.arrays.zeros(1, "float32")
        if self.fuses:
            payload = self.encode(x, state=self.init_state(1) or None)
            table, at, used = (
                np.array([[0, 1, 0, 0, 0]]),
                np.zeros(1, np.int64),
                np.array([len(payload)]),
            )
            state, out = self.init_state(1) or None, self.arrays.zeros(len(payload), "uint8")
            self.encode_batch(x, table, out, at, state=state, incoming=Incoming(payload, at, used))
        elif self.vote and self.stateful:
            self.encode(x)

    def payload_bytes(self, n: int) -> int:
        """The most bytes that the payload of n elements takes; known before any data."""
        return self._given.payload_bytes(n)

    @on_stream
    def init_state(self, n: int, tensors: int = 1) -> dict[str, NDArray[Any]]:
        """Fresh state (zeros): float32 [n] per element, [tensors] per tensor; {} when stateless.

        States of 16 bits are float16 [n], and uint16 [n] with the bits of bfloat16. A matrix lies
        in the first elements of its piece's n; where it has more, it is not kept.
        """
        n, tensors = self._given.count(n), self._given.tensors(tensors)
        sizes = {s.name: tensors if s.shape == "scalar" else n for s in self.module.states}
        return {
            s.name: self._made(self.arrays.zeros, sizes[s.name], s.dtype)
            for s in self.module.states
        }

    def _made(self, make: Callable[[int, str], Any], n: int, dtype: str) -> Any:
        """An array of n elements."""
        try:
            return make(n, dtype)
        except (MemoryError, ValueError):
            raise UsageError(f"{self.name}: there is no memory for {n} elements") from None

    @on_stream
    def encode(
        self,
        x: F32,
        *,
        state: State | None = None,
        seed: int = 0,
        step: int = 0,
        capacity: int | None = None,
    ) -> U8:
        """The payload of x, float32 [n], as uint8.

        With a state (from init_state(n)), error feedback is applied and the state updated in the
        same passes. Equal (x, state, seed, step) give equal bytes on every backend, but for the
        last bits of singular vectors. With NaN, infinity or overflow, what decode gives is equal,
        but for the bits of a NaN. capacity: bytes at most, see encode_batch.
        """
        flat = self.arrays.vector(x, self.name)
        n = len(flat)
        out = self.arrays.empty(self.payload_bytes(n), "uint8")
        used = self.encode_batch(
            flat, _one(n), out, np.zeros(1, np.int64), state=state, seed=seed, step=step,
            capacity=None if capacity is None else np.array([capacity]),
        )  # fmt: skip
        payload: U8 = out[: int(used[0])]
        return payload

    @on_stream
    def decode(self, payload: U8, n: int, *, step: int = 0) -> F32:
        """The float32 [n] values of a payload. Raises PayloadError.

        step: that of the encode, where decode draws again what encode drew (`needs_step`); payloads
        do not hold it, so another one gives other values. Such draws are alike on all ranks: no
        seed chooses them, and decode takes none.
        """
        out: F32 = self._made(self.arrays.empty, self._given.count(n), "float32")
        self._decode(payload, out, add=False, step=step)
        return out

    @on_stream
    def decode_add(self, payload: U8, out: F32, *, step: int = 0) -> None:
        """Add the values of a payload to out, float32 [n]. Raises PayloadError, out untouched.

        step: that of the encode, see decode.
        """
        out = self.arrays.vector(out, self.name, write=True)
        self._decode(payload, out, add=True, step=step)

    def _decode(self, payload: U8, out: F32, *, add: bool, step: int) -> None:
        data, at = self.arrays.payload(payload, self.name), np.zeros(1, np.int64)
        used = np.array([len(data)])
        self.decode_batch(data, _one(len(out)), at, used, out, add=add, step=step)
        self.backend.raise_found()

    @on_stream
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
        capacity: I64 | None = None,
    ) -> I64:
        """Encode many pieces in one launch; bytes used by each, int64 [m].

        table: int64 [m, 5]; a piece is x[START : START + LENGTH], part of tensor TENSOR from
        element OFFSET on (these and seed, step choose its random draws), its per-element states at
        STATE of the flat arrays in `state`, its per-tensor states at TENSOR. at: int64 [m], where
        each payload begins in `out` (payload_bytes(LENGTH) bytes of room). x is multiplied by
        `scale` as it is read. writeback: x's piece becomes decode(encode(x)), in the same pass.
        incoming: payloads that are decoded and added to x before all that, in the same pass where
        the codec allows it, and which are not in `out`; without writeback x's pieces then hold
        nothing of use. capacity: int64 [m], bytes of room for each payload, where that is less; of
        codecs that `cuts` tells of, whose state then keeps what does not fit. On a device what is
        returned is the codec's own, until the next call with this table.
        """
        writes = writeback or incoming is not None
        x, state = self.arrays.vector(x, self.name, write=writes), self._states(state)
        out = self.arrays.payloads(out, self.name, "out", write=True)
        seed, step = self._given.seed(seed), self._given.step(step)
        table, at = self._given.table(table, at, len(x), "x")
        self._given.state(state, table)
        most = None if capacity is None else self._given.capacity(table, capacity, state)
        self._given.room(table, at, len(out), capacity)
        if incoming is not None:
            incoming = self._given.incoming(self._incoming(incoming), table)
            if self.arrays.overlap(incoming.payload, out):
                raise UsageError(
                    f"{self.name}: out is written while the incoming payloads are read, and the "
                    "two have memory in common"
                )
            if not self.backend.fuses:
                self.decode_batch(*incoming[:1], table, *incoming[1:], x, add=True, step=step)
                incoming = None
        how = Encoding(seed, step, scale, writeback, incoming, most)
        return self.backend.encode_batch(x, table, out, at, state, how)

    @on_stream
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

        at and used may be int64 [k, m]: k payloads of each piece in one array, of which the first
        is decoded or added and the others are added, in order; on a device most codecs of fixed
        length read and write `out` once for all of them. step: that of the encode, see decode.
        """
        out, step = self.arrays.vector(out, self.name, write=True), self._given.step(step)
        payload = self.arrays.payloads(payload, self.name, "payload")
        used = self._used(used)
        if np.ndim(at) == 2:
            self._decode_several(payload, table, at, used, out, add, step)
            return
        table, at = self._given.table(table, at, len(out), "out")
        self._given.lengths(payload, table, at, used)
        self._decode_one(payload, table, at, used, out, add, step)

    def _decode_several(
        self, payload: U8, table: I64, at: I64, used: Any, out: F32, add: bool, step: int
    ) -> None:
        """Payloads that are added to one another, all of them checked before any is."""
        if used.shape != at.shape:
            raise UsageError(f"{self.name}: at is {at.shape}, and used {used.shape}")
        calls = []
        for k in range(len(at)):
            given, begin = self._given.table(table, part(at, k), len(out), "out")
            self._given.lengths(payload, given, begin, part(used, k))
            calls.append((given, begin, part(used, k)))
        if not add and calls:
            self._decode_one(payload, *calls.pop(0), out, False, step)
            at, used = part(at, slice(1, None)), part(used, slice(1, None))
        if len(calls) > 1 and self.backend.merges:
            calls = [(table, at, used)]
        for each in calls:
            self._decode_one(payload, *each, out, True, step)

    def _decode_one(
        self, payload: U8, table: I64, at: I64, used: Any, out: F32, add: bool, step: int
    ) -> None:
        self.backend.decode_batch(payload, table, at, used, out, add=add, step=step)

    def for_shape(self, shape: Shape) -> Codec:
        """The codec for tensors of this shape, which it still takes flat.

        It is another one only where the spec takes parameters from the shape (`from:`) that were
        not given.
        """
        shape = self._given.shape(shape)
        return self if self.shaped is None else self.shaped(shape)

    def suits(self, n: int) -> bool:
        """True if a tensor of n elements is worth compressing, by the spec's `when:`."""
        when = self.module.when
        return when is None or bool(evaluate(when, {"n": self._given.count(n)}))

    @on_stream
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
        out = self.arrays.payloads(out, self.name, "out", write=True)
        state, before = self._states(state), self._before(before)
        x = self._check_rounds(x, table, state, [*before, (out, at)], number + 1)
        workers = self._given.workers(workers)
        if reason := self.refuses_workers(workers):
            raise UsageError(f"{self.name}: {reason}")
        seed, step = self._given.seed(seed), self._given.step(step)
        how = Encoding(seed, step, workers=workers)
        return self.backend.encode_round(number, x, table, out, at, before, state, how)

    @on_stream
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
        state, sums = self._states(state), self._before(sums)
        x = self._check_rounds(x, table, state, sums, len(self.rounds), write=True)
        workers, seed = self._given.workers(workers), self._given.seed(seed)
        how = Encoding(seed, self._given.step(step), workers=workers)
        self.backend.decode_rounds(x, table, sums, state, how)

    def raise_found(self) -> None:
        """Raise PayloadError where an earlier decode_batch met a bad payload, and did not wait: on
        a device. This waits."""
        self.backend.raise_found()

    def refuses_workers(self, workers: int) -> str | None:
        """The reason why that many ranks cannot add up their payloads of a round; None if they
        can."""
        for one in self.rounds:
            if one.most_workers and workers > one.most_workers:
                sent = one.field.most
                return (
                    f"{workers} ranks add up codes of 0 to {sent} to {workers * sent}, "
                    f"and a byte holds 255: at most {one.most_workers} ranks, or fewer bits"
                )
        return None

    def _states(self, state: State | None) -> State | None:
        """A caller's states as kernels take them; what is no mapping is refused later."""
        if self.arrays.host or not isinstance(cast(object, state), Mapping):
            return state
        return {name: self.arrays.raw(held, self.name) for name, held in (state or {}).items()}

    def _used(self, used: I64) -> I64:
        """Payloads' lengths, which the host may hold whatever the payloads are in."""
        if self.arrays.host or isinstance(cast(object, used), np.ndarray):
            return self._given.numbers(used, "used", 2 if np.ndim(used) == 2 else 1)
        return cast(I64, self.arrays.raw(used, self.name))

    def _incoming(self, incoming: Incoming) -> Incoming:
        """Payloads that come in, as kernels take them."""
        payload, at, used = incoming
        payload = self.arrays.payloads(payload, self.name, "the incoming payload")
        return Incoming(payload, at, self._used(used))

    def _before(self, payloads: Before) -> Before:
        """Payloads of rounds, as kernels take them."""
        what = "the payload of a round"
        return [(self.arrays.payloads(payload, self.name, what), at) for payload, at in payloads]

    def _check_rounds(
        self, x: F32, table: I64, state: State | None, payloads: Before, count: int,
        *, write: bool = False,
    ) -> F32:  # fmt: skip
        x = self.arrays.vector(x, self.name, write=write)
        self._given.rounds(payloads, count, len(x), table)
        self._given.state(state, table)
        return x


def _one(n: int) -> I64:
    return np.array([[0, n, 0, 0, 0]], np.int64)
