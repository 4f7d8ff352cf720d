"""A program prepared once, and a run of it.

[Note: buffers belong to the program] Tables, message buffers and their torch views are made when a
program is first submitted, and every later run uses them. So runs of one program never overlap: the
executor starts the next when the last is complete or, on a device, when all of it is issued; the
next then waits for the event `ended`.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from casync.building.tasks import Encode, Recv, Reduce, ReduceRound, Send, Task, members
from casync.codec import Codec
from casync.errors import PlanError
from casync.graph.graph import Program
from casync.graph.joining import Bulk, joined
from casync.graph.plan import BATCH_BYTES
from casync.memory import Event, Memory
from casync.memory.identity import Identity
from casync.memory.slots import StagedSlot
from casync.raw import with_raw
from casync.runtime.payloads import Payloads
from casync.runtime.pieces import Inputs, States
from casync.runtime.steps import Steps
from casync.transports import Handle, Transfer

__all__ = ["FLOATS", "Job", "Jobs", "Prepared"]

#: types of buckets
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Job:
    """A run of a program on a bucket."""

    def __init__(
        self,
        identity: Identity,
        prepared: Prepared,
        bucket: torch.Tensor,
        states: States,
        step: int,
    ) -> None:
        self.identity, self.sequence = identity, identity.job
        program = prepared.program
        self.tasks = program.tasks
        self.unlocks = program.unlocks
        self.waits = list(program.waits)
        self.left = len(program.tasks)
        self.prepared = prepared
        self.bucket = bucket
        self.inputs = Inputs(bucket.detach(), _flat(bucket, prepared), states, step)
        self.marks: list[Any] = [None] * len(program.tasks)  # the end of each task on its stream
        self.begun: Any = None  # on a device: the mark after which the bucket is filled
        self.turn = 0  # number of the first group of transfers that is not issued yet
        self.missing = [len(group.members) for group in prepared.groups]  # not ready yet, by group
        self.taken = False  # True while its tasks are captured, not run: see capture.py
        self.ready: set[int] = set()  # sends and reduces that may be posted
        self.sent: list[tuple[int, Handle, float]] = []  # posted sends, and their times
        self.started = time.perf_counter()
        self.future = prepared.memory.future()

    @property
    def events(self) -> Events:
        """The events that this run records."""
        return self.prepared.taken if self.taken else self.prepared.real

    def done(self, index: int) -> list[int]:
        """A task is done; returns the tasks that waited for it last."""
        self.left -= 1
        ready = []
        for following in self.unlocks[index]:
            self.waits[following] -= 1
            if not self.waits[following]:
                ready.append(following)
        return ready


def _flat(bucket: torch.Tensor, prepared: Prepared) -> Any:
    """The bucket as codecs take it; None if its type needs conversion. PlanError for a bad one."""
    memory, elements, dtype = prepared.memory, prepared.elements, prepared.dtype
    good = bucket.dtype == dtype and bucket.dim() == 1 and bucket.device == memory.device
    if not good or not bucket.is_contiguous() or len(bucket) < elements:
        kind = str(dtype).removeprefix("torch.")
        raise PlanError(
            f"the bucket must be a flat contiguous {kind} tensor on {memory.device} of at least "
            f"{elements} elements, not {bucket.dtype} {tuple(bucket.shape)} on {bucket.device}"
        )
    return None if memory.host and prepared.halves else memory.array(bucket)


class Events:
    """Events at the end of tasks on their streams, and at the end of the whole program. CUDA
    refuses to query or await an event that was last recorded in a capture."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self.end = memory, memory.event()
        self._made: dict[int, Event] = {}

    def of(self, index: int) -> Event:
        """The event at the end of a task."""
        if index not in self._made:
            self._made[index] = self._memory.event()
        return self._made[index]


class Prepared:
    """All of a program that does not change between runs. See
    [Note: buffers belong to the program]."""

    def __init__(
        self,
        program: Program,
        dtype: torch.dtype,
        codecs: Mapping[str, Codec],
        seed: int,
        deferred: Mapping[str, Sequence[str]],
        *,
        memory: Memory,
        tags: bool,
        checksum: bool,
        waits: bool,
        bulk: bool,
    ) -> None:
        """dtype: of the buckets, one of FLOATS. deferred: names of states by codec, see
        [Note: deferred feedback]. tags: True if the transport has tags, and messages of any length.
        checksum: of every message. waits: True if the host may wait for lengths, see
        [Note: lengths that vary] in capacity.py. bulk: True if tasks share calls, see
        [Note: bulk]."""
        every, halves = with_raw(codecs), dtype != torch.float32
        if bulk:
            most = BATCH_BYTES if memory.host else math.inf
            together = Bulk(most, apart=halves, at_once=not tags)
            program = joined(
                program, every, together, lambda task: memory.host or not deferred.get(task.codec)
            )
        self.program = program
        self.memory = memory
        self.key = object()  # lane of the mark `begun`, see streams.py
        self.real, self.taken = Events(memory), Events(memory)  # of runs, and of a capture
        self.end, self.ended = self.real.end, cast(Any, None)  # `ended`: the mark of `end`
        self.parts, self.tasks = program.parts, program.tasks
        self._names: dict[int, str] = {}
        self.busy = False
        self.codecs = {key: every[key] for key in sorted({t.codec for t in program.tasks})}
        self.elements = max((r[0] + r[1] for p in program.parts for r in p.rows), default=0)
        self.urgent = program.urgent
        self.dtype, self.halves = dtype, halves
        self.payloads = Payloads(
            program, every, memory=memory, tags=tags, checksum=checksum, waits=waits,
            halves=self.halves,
        )  # fmt: skip
        self.slots = self.payloads.slots
        steps = Steps(program, every, self.payloads, seed, deferred, memory, halves=self.halves)
        self.steps = [steps.of(i, task) for i, task in enumerate(program.tasks)]
        self.sends = sum(isinstance(task, Send) for task in program.tasks)
        self.first = [i for i, waits in enumerate(program.waits) if waits == 0]
        self.after = _after(program)
        self.groups = [] if tags else _groups(program.tasks, self.after)
        self.group_of = {i: n for n, group in enumerate(self.groups) for i in group.members}
        self._sizes: dict[int, int] = {}
        self._transfers: dict[int, Transfer] = {}
        self.spans = [f"{task.verb} {task.codec}" for task in program.tasks]
        self.leaving = [_leaving(task, self.payloads) for task in program.tasks]
        self.varying = self.payloads.varying
        self._constant = not tags and not self.varying  # messages are the same bytes in every step

    def remember(self) -> None:
        """Copy lengths to the host after a run: [Note: lengths that vary] in capacity.py."""
        for slot, *_ in self.varying:
            slot.remember()

    def adapt(self, unused: Mapping[str, int]) -> Mapping[str, int]:
        """Adapt capacities for the next run; return `unused` plus the last run's unused bytes."""
        if not self.varying:
            return unused
        self.end.wait()
        more = Counter(unused)
        for slot, codec, sends in self.varying:
            more[codec] += sends * slot.adapt()
        return more

    def size(self, index: int) -> int:
        """Bytes of a task's payloads."""
        size = self._sizes.get(index)
        if size is None:
            size = self.payloads.size(self.tasks[index])
            if self._constant:
                self._sizes[index] = size
        return size

    def transfer(self, index: int, bucket: torch.Tensor) -> Transfer:
        """A send, receive or reduce, as a transport without tags takes it."""
        made = self._transfers.get(index)
        if made is None:
            made = self._transfer(index, bucket)
            if self._constant and not self.payloads.in_bucket(self.tasks[index]):
                self._transfers[index] = made
        return made

    def _transfer(self, index: int, bucket: torch.Tensor) -> Transfer:
        task, name = self.tasks[index], self.name(index)
        if isinstance(task, Reduce):
            op = task.op if isinstance(task, ReduceRound) else "sum"
            data = self.payloads.reduce_view(task, bucket)
            shares = tuple(size // data.itemsize for size in self.payloads.shares(task))
            return Transfer("reduce", task.ranks, data, name, op, shares)
        assert isinstance(task, Send | Recv)
        data = self.payloads.numbers(task)
        return Transfer("send" if isinstance(task, Send) else "recv", (task.peer,), data, name)

    def name(self, index: int) -> str:
        """A task's text, computed once."""
        if index not in self._names:
            self._names[index] = self.tasks[index].text()
        return self._names[index]


class Jobs:
    """Jobs under way, in the order in which they were submitted."""

    def __init__(self) -> None:
        self._queued: deque[Job] = deque()
        self.running: dict[int, Job] = {}

    def add(self, job: Job) -> None:
        """Queue a submitted job."""
        self._queued.append(job)

    def startable(self) -> Iterator[Job]:
        """Jobs to start now: up to the first whose program is still running."""
        while self._queued and not self._queued[0].prepared.busy:
            job = self._queued.popleft()
            job.prepared.busy = True
            self.running[job.sequence] = job
            yield job

    def end(self, job: Job) -> None:
        """Remove a job; its program may run again."""
        del self.running[job.sequence]
        job.prepared.busy = False

    def clear(self) -> list[Job]:
        """Remove and return all jobs."""
        jobs = [*self.running.values(), *self._queued]
        self.running.clear()
        self._queued.clear()
        return jobs

    def seconds(self) -> float:
        """Seconds since the oldest running job started."""
        begin = min((job.started for job in self.running.values()), default=None)
        return 0.0 if begin is None else time.perf_counter() - begin


def _after(program: Program) -> list[list[int]]:
    """Positions of the tasks that each task waits for."""
    after: list[list[int]] = [[] for _ in program.tasks]
    for i, following in enumerate(program.unlocks):
        for j in following:
            after[j].append(i)
    return after


def _leaving(task: Task, payloads: Payloads) -> Sequence[StagedSlot]:
    """Slots that are copied to the host once a task has encoded them."""
    made = (payloads.by_payload[t.payload] for t in members(task) if isinstance(t, Encode))
    return [slot for slot in made if isinstance(slot, StagedSlot) and slot.leaves]


@dataclass(frozen=True)
class Group:
    """Transfers of a slot: their positions, and those of all tasks that they wait for."""

    members: list[int]
    after: list[int]


def _groups(tasks: Sequence[Task], after: Sequence[Sequence[int]]) -> list[Group]:
    """The group of each slot, in the order of slots."""
    found: dict[int, list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        if isinstance(task, Send | Recv | Reduce):
            found[task.slot].append(i)
    ways = {i: (tasks[i].part, tasks[i].payload) for group in found.values() for i in group}
    every = [sorted(found[slot], key=ways.__getitem__) for slot in sorted(found)]
    return [Group(group, sorted({j for i in group for j in after[i]})) for group in every]
