"""A program prepared once, and one run of it.

[Note: buffers belong to the program] Tables, message buffers and their torch views are made when
a program is first submitted and used by every later run; so runs of one program never overlap:
the executor starts the next one when the last is complete, or, on a device, all of it issued; there
`ended` is the event that the next one waits for.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from casync.codec import FLOAT_BYTES, Codec, State
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
    Reduce,
    ReduceRound,
    Send,
    Side,
    Task,
)
from casync.memory import Event, Memory
from casync.memory.slots import Buffer, Slot, StagedSlot
from casync.raw import with_raw
from casync.regions import whole_key
from casync.rounds import as_rounds
from casync.runtime.deferral import Deferred, defer, restore, zero_pieces
from casync.transports import Handle

__all__ = ["Job", "Prepared", "States", "Step", "mix_seed"]

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
        "begun",
        "bucket",
        "deferred",
        "future",
        "groups",
        "left",
        "marks",
        "prepared",
        "ready",
        "sent",
        "sequence",
        "started",
        "states",
        "step",
        "taken",
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
        self.array: Any = _flat(bucket, prepared)
        self.marks: list[Any] = [None] * len(program.tasks)  # where on its stream each task ends
        self.begun: Any = None  # on a device: the mark from which on the bucket is there
        self.groups = deque(prepared.groups)  # of slots that have not been issued
        self.states = states
        self.deferred: dict[int, Deferred] = {}  # by part: during its rounds
        self.step = step
        self.taken = False  # whether its tasks are taken down, not run: see capture.py
        self.ready: set[int] = set()  # sends and reduces that may be posted
        self.sent: list[tuple[int, Handle, float]] = []  # posted sends, and when
        self.started = time.perf_counter()
        self.future = prepared.memory.future()


def _flat(bucket: torch.Tensor, prepared: Prepared) -> Any:
    """The bucket as codecs take it."""
    memory, elements = prepared.memory, prepared.elements
    good = bucket.dtype == torch.float32 and bucket.dim() == 1 and bucket.device == memory.device
    if not good or not bucket.is_contiguous() or len(bucket) < elements:
        raise PlanError(
            f"the bucket must be a flat contiguous float32 tensor on {memory.device} of at least "
            f"{elements} elements, not {bucket.dtype} {tuple(bucket.shape)} on {bucket.device}"
        )
    return memory.array(bucket)


class Prepared:
    """All that does not change between runs. See [Note: buffers belong to the program]."""

    def __init__(
        self,
        program: Program,
        codecs: Mapping[str, Codec],
        seed: int,
        deferred: Mapping[str, Sequence[str]] = _NO_NAMES,
        *,
        memory: Memory,
        tags: bool,
        checksum: bool = False,
        waits: bool = False,
    ) -> None:
        """`deferred`: names of states by codec, see [Note: deferred feedback]. `tags`: whether the
        transport has them, and messages a length of their own. `checksum`: of every such message.
        `waits`: whether the host may wait for lengths, see [Note: lengths that vary] in room.py.
        """
        self.memory, self._tags, self._checksum, self._waits = memory, tags, checksum, waits
        self.key = object()  # of `begun` in marks, see streams.py
        self.end, self.ended = memory.event(), cast(Any, None)  # the latter: its mark
        self._events: dict[int, Event] = {}
        self._tasks, self._names = program.tasks, dict[int, str]()
        self.busy = False
        self._deferred = deferred
        self._rank, self._world_size = program.rank, program.world_size
        self._codecs = with_raw(codecs)
        self._seeds = {side: mix_seed(seed, program.rank, side) for side in SIDES}
        self._parts = program.parts
        self._layouts: dict[tuple[int, str], Layout] = {}
        self._tables = [np.array(p.rows, np.int64).reshape(-1, 5) for p in program.parts]
        self.elements = max((r[0] + r[1] for p in program.parts for r in p.rows), default=0)
        self._slots: dict[int, Slot | Buffer] = {}
        self._rounds: dict[int, list[Slot | Buffer]] = {}  # by part: of its rounds, in order
        self._sent = {task.payload for task in program.tasks if isinstance(task, Send)}
        self._leave = {t.payload for t in program.tasks if isinstance(t, Send | Reduce)}
        self.urgent = program.urgent
        staged = tags and not memory.host
        self._in_place = frozenset[int]() if staged else in_place(program)
        self.slots = [self._slot(task) for task in program.tasks]
        self._taken = fused(program, self._codecs)
        self.steps = [self._step(i, task) for i, task in enumerate(program.tasks)]
        self.sends = sum(isinstance(task, Send) for task in program.tasks)
        self.first = [i for i, waits in enumerate(program.waits) if waits == 0]
        self.after, self.groups = _after(program), _groups(program.tasks)
        self.spans = [f"{task.verb} {task.codec}" for task in program.tasks]
        self.varying = [] if tags else _varying(program, self._slots)

    def codecs(self, tasks: Iterable[Task]) -> list[Codec]:
        """Of the payloads of tasks."""
        return [self._codecs[key] for key in sorted({task.codec for task in tasks})]

    def remember(self) -> None:
        """Behind a run, in a stream: see [Note: lengths that vary] in memory/room.py."""
        for slot, *_ in self.varying:
            slot.remember()

    def adapt(self, unused: Mapping[str, int]) -> Mapping[str, int]:
        """Before the next run: the bytes, by codec, that were sent and held nothing."""
        if not self.varying:
            return unused
        self.end.wait()
        more = Counter(unused)
        for slot, codec, sends in self.varying:
            more[codec] += sends * slot.adapt()
        return more

    def name(self, index: int) -> str:
        """A task's text, which takes its time."""
        if index not in self._names:
            self._names[index] = self._tasks[index].text()
        return self._names[index]

    def event(self, index: int) -> Event:
        """Of the end of a task."""
        if index not in self._events:
            self._events[index] = self.memory.event()
        return self._events[index]

    def reduce_view(self, job: Job, index: int) -> torch.Tensor:
        """What the native all-reduce combines: the payload, or the bucket in place of one."""
        task = job.tasks[index]
        if task.payload in self._in_place:
            start, length = self._parts[task.part].rows[0][:2]
            return job.bucket.detach()[start : start + length]
        codec = self._codecs[task.codec]
        name = codec.rounds[task.round].dtype if isinstance(task, ReduceRound) else codec.additive
        return self.slots[index].numbers().view(_DTYPES[name or ""])

    def reduce_bytes(self, task: Task) -> int:
        """Bytes of what the native all-reduce combines."""
        if task.payload in self._in_place:
            return FLOAT_BYTES * self._parts[task.part].rows[0][1]
        return self._slots[task.payload].layout.size

    def _slot(self, task: Task) -> Slot | Buffer:
        """Every payload of this rank has one; it is empty where the bucket is used."""
        if isinstance(task, EncodeRound):
            self._slots[task.payload] = self._round_slot(task)
        if task.payload not in self._slots:
            layout = _EMPTY if task.payload in self._in_place else self._layout(task)
            source = task.peer if isinstance(task, Recv) else task.rank
            cuts = self._codecs[task.codec].cuts
            self._slots[task.payload] = self._new_slot(layout, source, task.payload, cuts)
        return self._slots[task.payload]

    def _new_slot(
        self, layout: Layout, source: int, payload: int, cuts: bool = False
    ) -> Slot | Buffer:
        """See [Note: three kinds of slots]."""
        if not self._tags:
            return Buffer(layout, source, self.memory, cuts=cuts, waits=self._waits)
        sent, checksum = payload in self._sent, self._checksum
        if self.memory.host:
            return Slot(layout, source, sent, self.memory, checksum=checksum)
        leaves = payload in self._leave
        return StagedSlot(layout, source, sent, leaves, self.memory, checksum=checksum)

    def _layout(self, task: Task) -> Layout:
        key = (task.part, task.codec)
        if key not in self._layouts:
            self._layouts[key] = Layout.of(self._parts[task.part], self._codecs[task.codec])
        return self._layouts[key]

    def _round_slot(self, task: EncodeRound) -> Slot | Buffer:
        """Of a round's payload, which the encode of the round makes."""
        layout = Layout.of_round(self._parts[task.part], self._codecs[task.codec], task.round)
        slot = self._new_slot(layout, task.rank, task.payload)
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

    def _encode(self, task: Encode, slot: Slot | Buffer, taken: Slot | Buffer | None) -> Step:
        table, scale = self._tables[task.part], self._factor(task)
        codec, names = self._codecs[task.codec], self._deferred.get(whole_key(task.codec)[0], ())
        encode, decode, stateful = codec.encode_batch, codec.decode_batch, codec.stateful
        key = self._parts[task.part].codec, task.side  # of the states, whatever this side's codec
        seed, writeback = self._seeds[task.side], task.writeback
        out = slot.array

        def step(job: Job) -> None:
            at, room = slot.places()
            more: dict[str, Any] = dict(room)
            if taken is not None:
                more["incoming"] = (taken.array, *taken.contents[:2])
            state, deferred = job.states.get(key) if stateful else None, None
            if names and state and (pieces := zero_pieces(job.array, table)):
                if taken is not None:  # what it is merged with may not be zero
                    place, used, _ = taken.contents
                    decode(taken.array, table, place, used, job.array, add=True, step=job.step)
                    del more["incoming"]
                    pieces = zero_pieces(job.array, table)
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
        factor = float(np.float32(self._factor(task)))

        def step(job: Job) -> None:
            piece = job.array[start : start + length]
            piece *= factor

        return step

    def _encode_round(self, task: EncodeRound, slot: Slot | Buffer) -> Step:
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

    def _decode(self, task: Decode | Merge, slot: Slot | Buffer, add: bool) -> Step:
        decode, table = self._codecs[task.codec].decode_batch, self._tables[task.part]

        def step(job: Job) -> None:
            at, used, _ = slot.contents
            decode(slot.array, table, at, used, job.array, add=add, step=job.step)

        return step

    def _follow(self, task: Follow, slot: Slot | Buffer) -> Step:
        decode, table = self._codecs[task.codec].decode_batch, self._tables[task.part].copy()
        table[:, 0] = table[:, 4]  # where pieces are in the state's arrays
        key, name = (self._parts[task.part].codec, "worker"), copy_of(task.peer)

        def step(job: Job) -> None:
            (at, used, _), copy = slot.contents, job.states[key][name]
            decode(slot.array, table, at, used, copy, add=True, step=job.step)

        return step


def _nothing(job: Job) -> None:
    """The step of a merge that an encode takes in, and of a decode in place."""


def _after(program: Program) -> list[list[int]]:
    """By task: what it waits for."""
    after: list[list[int]] = [[] for _ in program.tasks]
    for i, following in enumerate(program.unlocks):
        for j in following:
            after[j].append(i)
    return after


def _varying(program: Program, slots: Mapping[int, Slot | Buffer]) -> list[tuple[Buffer, str, int]]:
    """Payloads whose lengths vary, their codecs, and how often each is sent."""
    sends = Counter(task.payload for task in program.tasks if isinstance(task, Send))
    codecs = {task.payload: whole_key(task.codec)[0] for task in program.tasks}
    return [
        (slot, codecs[payload], sends[payload])
        for payload, slot in slots.items()
        if isinstance(slot, Buffer) and not slot.layout.fixed
    ]


def _groups(tasks: Sequence[Task]) -> list[list[int]]:
    """What travels in each slot, in the order of slots."""
    found: dict[int, list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        if isinstance(task, Send | Recv | Reduce):
            found[task.slot].append(i)
    return [found[slot] for slot in sorted(found)]


_NOTHING = np.zeros(0, np.int64)
_EMPTY = Layout(True, 0, _NOTHING, _NOTHING, 0)
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}
