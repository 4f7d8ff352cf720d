"""A program prepared once, and one run of it.

[Note: buffers belong to the program] Tables, message buffers and their torch views are made when
a program is first submitted and used by every later run; so runs of one program never overlap:
the executor starts the next one when the last is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
import torch

from casync.codec import Codec, Floats, State
from casync.errors import PlanError
from casync.estimates import copy_of
from casync.graph.fusion import fused, in_place
from casync.graph.graph import Program
from casync.graph.layout import Layout
from casync.graph.tasks import (
    SIDES,
    Decode,
    DecodeRounds,
    Encode,
    EncodeRound,
    Follow,
    Merge,
    Recv,
    ReduceRound,
    Send,
    Side,
    Task,
)
from casync.memory.slots import Slot
from casync.raw import with_raw
from casync.regions import whole_key
from casync.rounds import as_rounds
from casync.runtime.deferral import Deferred, defer, restore, zero_pieces
from casync.transports import Handle

__all__ = ["Job", "Prepared", "States", "mix_seed"]

States: TypeAlias = Mapping[tuple[str, str], State]
Step: TypeAlias = Callable[["Job"], None]
_NO_NAMES: Mapping[str, Sequence[str]] = {}


def mix_seed(seed: int, rank: int, side: Side) -> int:
    """A 63-bit seed that differs by rank and side (splitmix64 of the three)."""
    value = seed + 0x9E3779B97F4A7C15 * (1 + 2 * rank + SIDES.index(side))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value &= 0xFFFFFFFFFFFFFFFF
        value = (value ^ (value >> shift)) * factor
    value &= 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 1


class Job:
    """One run of a program on a bucket."""

    __slots__ = (
        "array",
        "bucket",
        "deferred",
        "future",
        "left",
        "prepared",
        "ready",
        "sent",
        "sequence",
        "started",
        "states",
        "step",
        "tasks",
        "unlocks",
        "waits",
    )  # fmt: skip

    def __init__(
        self,
        sequence: int,
        program: Program,
        prepared: Prepared,
        bucket: torch.Tensor,
        states: States,
        step: int,
    ) -> None:
        self.sequence = sequence
        self.tasks = program.tasks
        self.unlocks = program.unlocks
        self.waits = list(program.waits)
        self.left = len(program.tasks)
        self.prepared = prepared
        self.bucket = bucket
        self.array: Floats = _flat(bucket, prepared.elements)
        self.states = states
        self.deferred: dict[int, Deferred] = {}  # by part: during its rounds
        self.step = step
        self.ready: set[int] = set()  # sends and reduces that may be posted
        self.sent: list[tuple[int, Handle, float]] = []  # posted sends, and when
        self.started = time.perf_counter()
        self.future: torch.futures.Future[torch.Tensor] = torch.futures.Future()


def _flat(bucket: torch.Tensor, elements: int) -> Floats:
    good = bucket.dtype == torch.float32 and bucket.dim() == 1 and bucket.device.type == "cpu"
    if not good or not bucket.is_contiguous() or len(bucket) < elements:
        raise PlanError(
            f"the bucket must be a flat contiguous float32 CPU tensor of at least {elements} "
            f"elements, not {bucket.dtype} {tuple(bucket.shape)} on {bucket.device}"
        )
    return cast(Floats, bucket.detach().numpy())


class Prepared:
    """All that does not change between runs. See [Note: buffers belong to the program]."""

    def __init__(
        self,
        program: Program,
        codecs: Mapping[str, Codec],
        seed: int,
        deferred: Mapping[str, Sequence[str]] = _NO_NAMES,
        *,
        checksum: bool = False,
    ) -> None:
        """`deferred`: names of states by codec, see [Note: deferred feedback]. `checksum`: of
        every message."""
        self._checksum = checksum
        self.busy = False
        self._deferred = deferred
        self._rank, self._world_size = program.rank, program.world_size
        self._codecs = with_raw(codecs)
        self._seeds = {side: mix_seed(seed, program.rank, side) for side in SIDES}
        self._parts = program.parts
        self._layouts: dict[tuple[int, str], Layout] = {}
        self._tables = [np.array(p.rows, np.int64).reshape(-1, 5) for p in program.parts]
        self.elements = max((r[0] + r[1] for p in program.parts for r in p.rows), default=0)
        self._slots: dict[int, Slot] = {}
        self._rounds: dict[int, list[Slot]] = {}  # by part: of its rounds, in order
        self._sent = {task.payload for task in program.tasks if isinstance(task, Send)}
        self.urgent = program.urgent
        self._in_place = in_place(program)
        self.slots = [self._slot(task) for task in program.tasks]
        self._taken = fused(program, self._codecs)
        self.steps = [self._step(i, task) for i, task in enumerate(program.tasks)]
        self.sends = sum(isinstance(task, Send) for task in program.tasks)
        self.first = [i for i, waits in enumerate(program.waits) if waits == 0]
        self.spans = [f"{task.verb} {task.codec}" for task in program.tasks]

    def reduce_view(self, job: Job, index: int) -> torch.Tensor:
        """What the native all-reduce combines: the payload, or the bucket in place of one."""
        task = job.tasks[index]
        if task.payload in self._in_place:
            start, length = self._parts[task.part].rows[0][:2]
            return job.bucket.detach()[start : start + length]
        codec = self._codecs[task.codec]
        name = codec.rounds[task.round].dtype if isinstance(task, ReduceRound) else codec.additive
        return self.slots[index].tensor.view(_DTYPES[name or ""])

    def _slot(self, task: Task) -> Slot:
        """Every payload of this rank has one; it is empty where the bucket is used."""
        if isinstance(task, EncodeRound):
            self._slots[task.payload] = self._round_slot(task)
        if task.payload not in self._slots:
            layout = _EMPTY if task.payload in self._in_place else self._layout(task)
            source = task.peer if isinstance(task, Recv) else task.rank
            sent = task.payload in self._sent
            self._slots[task.payload] = Slot(layout, source, sent, checksum=self._checksum)
        return self._slots[task.payload]

    def _layout(self, task: Task) -> Layout:
        key = (task.part, task.codec)
        if key not in self._layouts:
            self._layouts[key] = Layout.of(self._parts[task.part], self._codecs[task.codec])
        return self._layouts[key]

    def _round_slot(self, task: EncodeRound) -> Slot:
        """Of a round's payload, which the encode of the round makes."""
        layout = Layout.of_round(self._parts[task.part], self._codecs[task.codec], task.round)
        slot = Slot(layout, task.rank, travels=False)
        self._rounds.setdefault(task.part, []).append(slot)
        return slot

    def _step(self, index: int, task: Task) -> Step | None:
        """What the compute lane calls for this task; None for those of other lanes."""
        if isinstance(task, EncodeRound):
            return self._encode_round(task, self.slots[index])
        if isinstance(task, DecodeRounds):
            return self._decode_rounds(task)
        if task.payload in self._in_place:
            return self._scale(task) if isinstance(task, Encode) else _nothing
        if isinstance(task, Encode):
            before = self._taken.get(index)
            taken = None if before is None else self.slots[before]
            return self._encode(task, self.slots[index], taken)
        if index in self._taken.values():
            return _nothing
        if isinstance(task, Decode | Merge):
            return self._decode(task, self.slots[index], isinstance(task, Merge))
        if isinstance(task, Follow):
            return self._follow(task, self.slots[index])
        return None

    def _encode(self, task: Encode, slot: Slot, taken: Slot | None) -> Step:
        table, scale = self._tables[task.part], self._factor(task)
        codec, names = self._codecs[task.codec], self._deferred.get(whole_key(task.codec)[0], ())
        encode, decode, stateful = codec.encode_batch, codec.decode_batch, codec.stateful
        key = self._parts[task.part].codec, task.side  # of the states, whatever this side's codec
        seed, writeback = self._seeds[task.side], task.writeback
        out, at = slot.array, slot.layout.at

        def step(job: Job) -> None:
            more = {} if taken is None else {"incoming": (taken.array, *taken.contents[:2])}
            state, deferred = job.states.get(key) if stateful else None, None
            if names and state and (pieces := zero_pieces(job.array, table)):
                if taken is not None:  # what it is merged with may not be zero
                    place, used, _ = taken.contents
                    decode(taken.array, table, place, used, job.array, add=True, step=job.step)
                    more, pieces = {}, zero_pieces(job.array, table)
                deferred = defer(state, names, pieces)
            slot.fill(
                encode(
                    job.array, table, out, at, state=state,
                    seed=seed, step=job.step, scale=scale, writeback=writeback, **more,
                )
            )  # fmt: skip
            if deferred:
                restore(deferred)

        return step

    def _factor(self, task: Encode) -> float:
        return 1.0 / self._world_size if task.average else 1.0

    def _scale(self, task: Encode) -> Step:
        """Encoding in place."""
        start, length = self._parts[task.part].rows[0][:2]
        factor = np.float32(self._factor(task))

        def step(job: Job) -> None:
            piece = job.array[start : start + length]
            np.multiply(piece, factor, out=piece)

        return step

    def _encode_round(self, task: EncodeRound, slot: Slot) -> Step:
        key, table = task.codec, self._tables[task.part]
        encode, seed, workers = (
            as_rounds(self._codecs[key]).encode_round, self._seeds["worker"], self._world_size,
        )  # fmt: skip
        sums = [(s.array, s.layout.at) for s in self._rounds[task.part][: task.round]]
        number, out, at = task.round, slot.array, slot.layout.at
        names = self._deferred.get(key, ())

        def step(job: Job) -> None:
            state = job.states.get((key, "worker"))
            if names and state and number == 0:
                job.deferred[task.part] = defer(state, names, zero_pieces(job.array, table))
            slot.fill(
                encode(
                    number, job.array, table, out, at, sums, workers=workers,
                    state=state, seed=seed, step=job.step,
                )
            )  # fmt: skip

        return step

    def _decode_rounds(self, task: DecodeRounds) -> Step:
        key, table = task.codec, self._tables[task.part]
        decode, seed, workers = (
            as_rounds(self._codecs[key]).decode_rounds, self._seeds["worker"], self._world_size,
        )  # fmt: skip
        sums = [(s.array, s.layout.at) for s in self._rounds[task.part]]

        def step(job: Job) -> None:
            state = job.states.get((key, "worker"))
            decode(job.array, table, sums, workers=workers, state=state, seed=seed, step=job.step)
            restore(job.deferred.pop(task.part, []))

        return step

    def _decode(self, task: Decode | Merge, slot: Slot, add: bool) -> Step:
        decode, table = self._codecs[task.codec].decode_batch, self._tables[task.part]

        def step(job: Job) -> None:
            at, used, _ = slot.contents
            decode(slot.array, table, at, used, job.array, add=add, step=job.step)

        return step

    def _follow(self, task: Follow, slot: Slot) -> Step:
        decode, table = self._codecs[task.codec].decode_batch, self._tables[task.part].copy()
        table[:, 0] = table[:, 4]  # where pieces are in the state's arrays
        key, name = (self._parts[task.part].codec, "worker"), copy_of(task.peer)

        def step(job: Job) -> None:
            (at, used, _), copy = slot.contents, job.states[key][name]
            decode(slot.array, table, at, used, copy, add=True, step=job.step)

        return step


def _nothing(job: Job) -> None:
    """The step of a merge that an encode takes in, and of a decode in place."""


_NOTHING = np.zeros(0, np.int64)
_EMPTY = Layout(True, 0, _NOTHING, _NOTHING, 0)
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}
