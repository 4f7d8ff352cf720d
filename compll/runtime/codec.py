"""A compiled compressor: the result of `compll.compile`, which the synchronization layer uses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from compll.errors import UsageError
from compll.frontend.spec import Shape
from compll.ir.layout import FORMAT, Before, Round, cuts, draws, refused
from compll.ir.module import RESIDUAL, Module
from compll.ir.static import Number, evaluate
from compll.numerics.numbers import F32, I64, U8
from compll.runtime.arguments import Arguments, Inputs
from compll.runtime.arrays import INTS, fault, hold, is_held, on_stream
from compll.runtime.batches import Backend, Encoding, Incoming, State


class Codec:
    """A compressor for one set of parameters on one backend.

    Arrays are NumPy float32 (gradients), uint8 (payloads), and float32, float16 or uint16 with
    bfloat16 bits (states), C-contiguous, with one dimension. On a device they are the device's
    arrays, and gradients may also be float16 and bfloat16. Calls release the GIL and may run in any
    thread; two concurrent calls must not share state. On a device, the calls of threads on one
    stream come one after the other, and share what encode_batch returns.
    """

    def __init__(
        self, module: Module, params: Mapping[str, Number], target: str, text: str, backend: Backend
    ) -> None:
        self.module, self.target, self.backend = module, target, backend
        self.params: dict[str, Any] = dict(params) | dict(module.kept_as)
        self.arrays = backend.arrays
        self._arguments = Arguments(module, params, host=self.arrays.host)
        self._inputs = Inputs(module.name, self.arrays, self._arguments)
        #: true if encode_batch decodes `incoming` payloads in the pass that encodes
        self.fuses = backend.fuses
        #: true if decode_batch adds several payloads of each piece in one launch
        self.merges = backend.merges
        self.name = module.name
        self.align = module.group or 1
        self.fixed = self._arguments.fixed
        self.additive = module.fields[0].storage if module.merge == "sum" else None
        #: decoded values add up and are encoded once more, without states: signs that vote
        self.vote = module.merge == "vote"
        self.states, self.stateful = module.states, bool(module.states)
        #: with feedback of differences the share that references take up of one; else None
        self.difference = module.decay if module.differences else None
        #: a declared state (momentum, say) belongs to a worker's own gradient: no second encode
        self.reencodes = all(s.name == RESIDUAL for s in module.states)
        #: true if the mean of a decoded payload over its draws is the gradient, as the spec claims
        self.unbiased = module.unbiased
        #: payload fields that all ranks combine one after the other; () if payloads travel whole
        self.rounds: tuple[Round, ...] = self._arguments.all_rounds
        if self.rounds:
            self.reencodes = False
        #: true if no number that the host computes for a call depends on the step
        self.repeats = not module.follows_step
        #: true if encode takes a capacity: a state keeps elements that do not fit
        self.cuts = cuts(module)
        #: true if decode needs the step of the encode, because it repeats draws of encode
        self.needs_step = draws(module)
        #: makes the codec for a shape, if a shape decides parameters
        self.shaped: Callable[[Shape], Codec] | None = None
        #: a function, and its arguments, that compiles it again in another process
        self.origin: tuple[Callable[..., Codec], tuple[Any, ...]] | None = None
        #: digest of the meaning of payloads, and of the number of their format: it is the same for
        #: all types of states
        meaning = f"{FORMAT}\n{text}\n{sorted(params.items())}"
        self.digest = hashlib.sha256(meaning.encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        params = "".join(f", {k}={v!r}" for k, v in self.params.items())
        return f"Codec({self.name!r}{params}, target={self.target!r})"

    def __reduce__(self) -> tuple[Callable[..., Codec], tuple[Any, ...]]:
        """A pickle without kernels: loading it compiles the spec, or takes kernels from the
        cache."""
        if self.origin is None:
            raise TypeError(f"{self!r} was not made by compll.compile, which a pickle needs")
        make, args = self.origin
        return make, (*args, self.digest)

    def __deepcopy__(self, memo: object) -> Codec:
        """The codec itself: it does not change, and states are the caller's."""
        return self

    def __copy__(self) -> Codec:
        """The codec itself, as for a deep copy."""
        return self

    def hold(self, numbers: I64) -> I64:
        """A copy of int64 numbers that cannot be changed, for calls to take as `table`, `at`,
        `used` or `capacity`. They are checked once, and on a device copied and prepared once. All
        of that lives as long as the returned array, and so does a CUDA graph of these calls: keep
        it until the device is done with them. Raises UsageError."""
        if not is_held(numbers) and (wrong := fault(numbers, INTS, np.ndim(numbers))):
            raise UsageError(f"{self.name}: an array of int64 can be held, not {wrong}")
        return hold(numbers)

    def view(self, x: Any) -> Any:
        """A gradient, payload or state in the form that calls take fastest, with the same memory:
        an array in device memory that calls need not check again. Raises UsageError."""
        return self.arrays.view(x, self.name)

    @contextmanager
    def ticking(self, tick: Any) -> Iterator[None]:
        """A context in which calls that this thread captures add an int64 [1] in device memory to
        `step` when their kernels run, so that each replay of a CUDA graph draws new numbers. Only
        for backends of devices."""
        with cast(Any, self.backend).ticking(self.arrays.raw(tick, self.name)):
            yield

    @on_stream
    def prepare(self) -> None:
        """Compile kernels that only later calls need, such as encoding at an aggregator: with
        `incoming` payloads, or, if signs vote, without states."""
        x = self.arrays.zeros(1, "float32")
        if self.fuses:
            payload = self.encode(x, state=self.init_state(1) or None)
            incoming = Incoming(payload, np.zeros(1, np.int64), np.array([len(payload)]))
            state, out = self.init_state(1) or None, self.arrays.zeros(len(payload), "uint8")
            self.encode_batch(x, _one(1), out, incoming.at, state=state, incoming=incoming)
        elif self.vote and self.stateful:
            self.encode(x)

    def payload_bytes(self, n: int) -> int:
        """The most bytes that the payload of n elements takes; known before any data."""
        return self._arguments.payload_bytes(n)

    def scratch_bytes(self, n: int) -> int:
        """Device memory that calls for a tensor of n elements need besides payloads and states; 0
        on the host. All tensors share it."""
        needed = getattr(self.backend, "scratch_bytes", None)
        return 0 if needed is None else int(needed(self._arguments.count(n)))

    @on_stream
    def init_state(self, n: int, tensors: int = 1) -> dict[str, NDArray[Any]]:
        """Fresh state (zeros): float32 [n] per element, [tensors] per tensor; {} for a stateless
        codec.

        States of 16 bits are float16 [n], and uint16 [n] with bfloat16 bits. A matrix is stored in
        the first elements of its piece's n; a larger matrix is not kept.
        """
        n, tensors = self._arguments.count(n), self._arguments.tensors(tensors)
        sizes = {s.name: tensors if s.shape == "scalar" else n for s in self.module.states}
        return {
            s.name: self._allocate(self.arrays.zeros, sizes[s.name], s.dtype)
            for s in self.module.states
        }

    def _allocate(self, make: Callable[[int, str], Any], n: int, dtype: str) -> Any:
        """A new array of n elements. Raises UsageError if memory does not suffice."""
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
        same passes. Equal (x, state, seed, step) give equal bytes on every backend, except for the
        last bits of singular vectors. With NaN, infinity or overflow, decoded values are equal,
        except for the bits of a NaN. capacity: most bytes, see encode_batch.
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

        step: that of the encode, if decode repeats random draws of encode (`needs_step`). Payloads
        do not contain it, so another step gives other values. These draws are the same on all
        ranks: they do not depend on a seed, and decode takes none.
        """
        out: F32 = self._allocate(self.arrays.empty, self._arguments.count(n), "float32")
        self._decode(payload, out, add=False, step=step)
        return out

    @on_stream
    def decode_add(self, payload: U8, out: F32, *, step: int = 0) -> None:
        """Add the values of a payload to out, float32 [n]. Raises PayloadError and leaves out
        untouched.

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

        table: int64 [m, 5]; a piece is x[START : START + LENGTH], the part of tensor TENSOR from
        element OFFSET on (TENSOR, OFFSET, seed and step choose its random draws). Its per-element
        states are at STATE of the flat arrays in `state`, its per-tensor states at TENSOR. at:
        int64 [m], the start of each payload in `out` (with payload_bytes(LENGTH) bytes of room). x
        is multiplied by `scale` as it is read. writeback: x's piece becomes decode(encode(x)), in
        the same pass. incoming: payloads that are decoded and added to x before that, in the same
        pass if the codec allows it. They must not be part of `out`. Without writeback x's pieces
        are undefined afterwards. capacity: int64 [m], bytes of room for each payload, if that is
        less; for codecs with `cuts`, whose state keeps elements that do not fit. On a device the
        returned array belongs to the codec, and is valid until the next call with this table.
        """
        writes = writeback or incoming is not None
        x, state = self.arrays.vector(x, self.name, write=writes), self._inputs.states(state)
        out = self.arrays.payloads(out, self.name, "out", write=True)
        seed, step = self._arguments.seed(seed), self._arguments.step(step)
        table, at = self._arguments.table(table, at, len(x), "x")
        self._arguments.state(state, table)
        most = None if capacity is None else self._arguments.capacity(table, capacity, state)
        self._arguments.room(table, at, len(out), capacity)
        if incoming is not None:
            incoming = self._inputs.incoming(incoming, table, out, at)
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
        """Decode pieces (used: bytes of each) into out, or add them to it. Raises PayloadError.

        at and used may be int64 [k, m]: k payloads of each piece in one array. The first is decoded
        or added, and the others are added, in order; on a device most codecs of fixed length read
        and write `out` once for all of them. step: that of the encode, see decode.
        """
        out, step = self.arrays.vector(out, self.name, write=True), self._arguments.step(step)
        payload = self.arrays.payloads(payload, self.name, "payload")
        calls = self._inputs.decodes(
            payload, table, at, used, len(out), add=add, merges=self.backend.merges
        )
        for call in calls:
            self.backend.decode_batch(
                payload, call.table, call.at, call.used, out, add=call.add, step=step
            )

    def for_shape(self, shape: Shape) -> Codec:
        """The codec for tensors of this shape, which it still takes flat.

        It is another codec only if the spec takes parameters from the shape (`from:`) that were not
        given.
        """
        shape = self._arguments.shape(shape)
        return self if self.shaped is None else self.shaped(shape)

    def suits(self, n: int) -> bool:
        """True if a tensor of n elements is worth compressing, by the spec's `when:`."""
        when = self.module.when
        return when is None or bool(evaluate(when, {"n": self._arguments.count(n)}))

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
        """Encode the payload of round `number` for every piece; bytes used by each, int64 [m].

        before: the sums over all `workers` of the earlier rounds, in order: (payload, start of each
        piece). The state is read, not changed. The other arguments are encode_batch's.
        """
        out = self.arrays.payloads(out, self.name, "out", write=True)
        state, before = self._inputs.states(state), self._inputs.before(before)
        x = self._inputs.rounds(x, table, state, [*before, (out, at)], number + 1)
        workers = self._arguments.workers(workers)
        if reason := self.refuses_workers(workers):
            raise UsageError(f"{self.name}: {reason}")
        seed, step = self._arguments.seed(seed), self._arguments.step(step)
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
        """Overwrite x's pieces with the mean decoded from all rounds' sums; update the state."""
        state, sums = self._inputs.states(state), self._inputs.before(sums)
        x = self._inputs.rounds(x, table, state, sums, len(self.rounds), write=True)
        workers, seed = self._arguments.workers(workers), self._arguments.seed(seed)
        how = Encoding(seed, self._arguments.step(step), workers=workers)
        self.backend.decode_rounds(x, table, sums, state, how)

    def raise_found(self) -> None:
        """Raise PayloadError if an earlier decode_batch found a bad payload on a device, where it
        does not wait. This call waits."""
        self.backend.raise_found()

    def refuses_workers(self, workers: int) -> str | None:
        """The reason why `workers` ranks cannot add up payloads of a round; None if they can."""
        return refused(self.rounds, workers)


def _one(n: int) -> I64:
    return np.array([[0, n, 0, 0, 0]], np.int64)
