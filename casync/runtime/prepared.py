"""A program with all that its runs share.

[Note: buffers belong to the program] Tables, message buffers and their torch views are made when a
program is first submitted, and every later run uses them. So runs of one program never overlap: the
executor starts the next when the last is complete or, on a device, when all of it is issued; the
next then waits for the event `ended`.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn, TypeAlias

import torch

from casync.building.tasks import Encode, Recv, Reduce, ReduceRound, Send, Task, members
from casync.codec import Codec
from casync.errors import DeadlockError
from casync.graph.graph import Program
from casync.graph.joining import Bulk, join_tasks
from casync.graph.plan import BATCH_BYTES
from casync.memory import Event, Memory
from casync.memory.slots import StagedSlot
from casync.raw import with_raw
from casync.runtime.calls import Calls, TaskFn
from casync.runtime.options import RunOptions
from casync.runtime.payloads import Payloads
from casync.transports import Member

__all__ = ["FLOATS", "Channel", "Context", "Events", "Issue", "Prepared", "prepare"]

#: operations that complete in the order of their posts: verb, peer, and the peer's channel
Channel: TypeAlias = tuple[str, int, int]

#: types of buckets
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Context:
    """Codecs, memory and options that all programs of an executor share."""

    codecs: Mapping[str, Codec]
    memory: Memory
    tags: bool  # True if the transport has tags, and messages of any length
    options: RunOptions


def prepare(program: Program, dtype: torch.dtype, context: Context) -> Prepared:
    """Join a program's tasks, place its payloads in memory, and bind its tasks to codec calls.

    dtype: of the buckets, one of FLOATS. Codecs are looked up now.
    """
    codecs, halves = with_raw(context.codecs), dtype != torch.float32
    program = _join(program, codecs, context, halves=halves)
    payloads = Payloads(
        program, codecs, memory=context.memory, tags=context.tags,
        checksum=context.options.checksum, waits=context.options.waits, halves=halves,
    )  # fmt: skip
    calls = Calls(
        program, codecs, payloads, context.options.seed, context.options.deferred, context.memory,
        halves=halves,
    )  # fmt: skip
    after = _after(program)
    return Prepared(
        program=program,
        memory=context.memory,
        dtype=dtype,
        codecs={key: codecs[key] for key in sorted({task.codec for task in program.tasks})},
        payloads=payloads,
        steps=[calls.of(i, task) for i, task in enumerate(program.tasks)],
        after=after,
        constant=not context.tags and not payloads.varying,
    )


def _join(
    program: Program, codecs: Mapping[str, Codec], context: Context, *, halves: bool
) -> Program:
    """The program with tasks joined: see [Note: bulk]."""
    if not context.options.bulk:
        return program
    on_host, deferred = context.memory.host, context.options.deferred
    most = BATCH_BYTES if on_host else math.inf
    together = Bulk(most, apart=halves, at_once=not context.tags)
    return join_tasks(program, codecs, together, lambda t: on_host or not deferred.get(t.codec))


class Events:
    """Events at the end of tasks on their streams, and at the end of the whole program. A program
    has others for a capture: CUDA refuses to query or await an event that was last recorded there.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory, self.end = memory, memory.event()
        self._events: dict[int, Event] = {}

    def of(self, index: int) -> Event:
        """The event at the end of a task."""
        if index not in self._events:
            self._events[index] = self._memory.event()
        return self._events[index]


@dataclass(eq=False)
class Prepared:
    """A program's tables and buffers: see [Note: buffers belong to the program]. Lists are by
    task."""

    program: Program  # with tasks joined
    memory: Memory
    dtype: torch.dtype  # of the buckets
    codecs: Mapping[str, Codec]
    payloads: Payloads
    steps: list[TaskFn | None]  # None for tasks of other lanes
    after: list[list[int]]  # positions of the tasks that each waits for
    constant: bool  # True if messages have the same bytes in every step
    busy: bool = False  # True while a run is under way
    ended: Any = None  # on a device: the mark at the end of the last run
    key: object = field(default_factory=object)  # lane of the mark at which a bucket is filled

    def __post_init__(self) -> None:
        program, memory = self.program, self.memory
        self.parts, self.tasks = program.parts, program.tasks
        self.halves = self.dtype != torch.float32
        self.elements = max((r[0] + r[1] for p in program.parts for r in p.rows), default=0)
        self.slots, self.varying = self.payloads.slots, self.payloads.varying
        self.run_events, self.capture_events = Events(memory), Events(memory)
        self.end = self.run_events.end
        self.first = [i for i, waits in enumerate(program.waits) if waits == 0]
        self.members = [members(task) for task in program.tasks]
        self.channels = [_channel(task) for task in program.tasks]
        self.sends = sum(isinstance(task, Send) for task in program.tasks)
        self.spans = [f"{task.verb} {task.codec}" for task in program.tasks]
        self.leaving = [_leaving(task, self.payloads) for task in program.tasks]
        self.last = [i for i, following in enumerate(program.unlocks) if not following]
        self.counted: dict[int, tuple[str | None, Mapping[str, int]]] = {}  # see Counters.count
        self._names: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        self._transfers: dict[int, Member] = {}

    @cached_property
    def order(self) -> list[Issue]:
        """Without tags: all work, in the order in which it is issued. Raises DeadlockError."""
        return issues(self.program, self.after)

    def remember(self) -> None:
        """Copy lengths to the host after a run: [Note: lengths that vary] in capacity.py."""
        for slot, *_ in self.varying:
            slot.remember()

    def adapt(self, unused: Mapping[str, int]) -> Mapping[str, int]:
        """Adapt capacities for the next run; return `unused` plus the last run's unused bytes."""
        self.end.wait()
        more = Counter(unused)
        for slot, codec, sends in self.varying:
            more[codec] += sends * slot.adapt()
        return more

    def size(self, index: int) -> int:
        """Bytes of a task's payloads."""
        size = self._sizes.get(index)
        if size is None:
            every = self.payloads.by_payload
            size = sum(every[each.payload].size for each in self.members[index])
            if self.constant:
                self._sizes[index] = size
        return size

    def transfer(self, index: int, bucket: torch.Tensor) -> Member:
        """A send, receive or reduce, as a transport without tags takes it."""
        known = self._transfers.get(index)
        if known is None:
            known = self._transfer(index, bucket)
            if self.constant and not self.payloads.in_bucket(self.tasks[index]):
                self._transfers[index] = known
        return known

    def _transfer(self, index: int, bucket: torch.Tensor) -> Member:
        task, name = self.tasks[index], self.name(index)
        if isinstance(task, Reduce):
            op = task.op if isinstance(task, ReduceRound) else "sum"
            data = self.payloads.reduce_view(task, bucket)
            shares = tuple(size // data.itemsize for size in self.payloads.shares(task))
            return Member("reduce", task.ranks, data, name, op, shares)
        assert isinstance(task, Send | Recv)
        data = self.payloads.numbers(task)
        return Member("send" if isinstance(task, Send) else "recv", (task.peer,), data, name)

    def name(self, index: int) -> str:
        """A task's text, computed once."""
        if index not in self._names:
            self._names[index] = self.tasks[index].text()
        return self._names[index]


def _after(program: Program) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in program.tasks]
    for i, following in enumerate(program.unlocks):
        for j in following:
            after[j].append(i)
    return after


def _channel(task: Task) -> Channel | None:
    """The channel of an operation of the transport; None for tasks that compute."""
    if isinstance(task, Send | Recv):
        return (task.verb, task.peer, task.channel)
    # one for all reduces, also of rounds and of some ranks
    return (Reduce.verb, 0, 0) if isinstance(task, Reduce) else None


def _leaving(task: Task, payloads: Payloads) -> Sequence[StagedSlot]:
    """Slots that are copied to the host once a task has encoded them."""
    slots = (payloads.by_payload[t.payload] for t in members(task) if isinstance(t, Encode))
    return [slot for slot in slots if isinstance(slot, StagedSlot) and slot.leaves]


@dataclass(frozen=True)
class Issue:
    """Work that is issued at once: a task that computes, or the transfers of a slot."""

    members: list[int]  # positions of tasks
    after: list[int]  # positions of those that all of them wait for
    transfers: bool


def issues(program: Program, after: Sequence[Sequence[int]]) -> list[Issue]:
    """A rank's work without tags, in the order in which it is always issued: tasks in the program's
    order, as soon as all that they wait for is issued, and slots in theirs.

    Raises DeadlockError if a slot's turn has come and no remaining task can get it ready.
    """
    groups, waits = _groups(program.tasks, after), [*program.waits]
    group_of = {i: number for number, group in enumerate(groups) for i in group.members}
    missing = [sum(waits[i] > 0 for i in group.members) for group in groups]
    ready = [i for i, count in enumerate(waits) if not count and i not in group_of]
    order, turn = list[Issue](), 0
    while ready or turn < len(groups):
        whole = turn < len(groups) and not missing[turn]
        if whole and not (ready and ready[0] < groups[turn].members[0]):
            issue, turn = groups[turn], turn + 1
        elif ready:
            index = heapq.heappop(ready)
            issue = Issue([index], [*after[index]], transfers=False)
        else:
            _refuse_stuck([program.tasks[i] for i in groups[turn].members if waits[i]])
        order.append(issue)
        for following in chain.from_iterable(program.unlocks[i] for i in issue.members):
            waits[following] -= 1
            if waits[following]:
                continue
            if following in group_of:
                missing[group_of[following]] -= 1
            else:
                heapq.heappush(ready, following)
    return order


def _refuse_stuck(late: Sequence[Task]) -> NoReturn:
    first = late[0]
    assert isinstance(first, Send | Recv | Reduce)
    raise DeadlockError(
        f"rank {first.rank} is at slot {first.slot} and cannot send `{first.text()}`, "
        "which needs data of a later slot",
        tuple(task.text() for task in late),
    )


def _groups(tasks: Sequence[Task], after: Sequence[Sequence[int]]) -> list[Issue]:
    """The transfers of each slot, in the order of slots."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        if isinstance(task, Send | Recv | Reduce):
            groups[task.slot].append(i)
    ways = {i: (tasks[i].part, tasks[i].payload) for group in groups.values() for i in group}
    every = [sorted(groups[slot], key=ways.__getitem__) for slot in sorted(groups)]
    return [
        Issue(group, sorted({j for i in group for j in after[i]}), transfers=True)
        for group in every
    ]
