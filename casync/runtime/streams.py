"""Lanes on a device: streams.

[Note: streams] Encodes, merges and decodes have a stream each, and transfers have others. The host
does not wait here: the thread that makes a task ready issues it, one thread at a time, in the order
of jobs and of the program. A task's stream waits for the events of its predecessors on other
streams, but not for events that are known to come earlier; so of the program's edges only those
remain that no others imply. Two more rules hold: a run comes after its bucket is filled, and after
the last run of its program, whose buffers it uses.

Without tags, slots are issued in their order, each as a group, on the communication stream. With
tags the transport is the host's: payloads leave the device for pinned memory on one stream, and
received payloads enter it on another, while threads send and receive: see StagedSlot.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import cast

from casync.building.tasks import (
    Decode,
    DecodeRounds,
    Encode,
    EncodeRound,
    Follow,
    Merge,
    Recv,
    Reduce,
    Send,
    Task,
    members,
)
from casync.errors import DeadlockError, PeerTimeout
from casync.memory import Memory
from casync.memory.slots import Buffer, StagedSlot
from casync.runtime.communication import Communication
from casync.runtime.jobs import Job
from casync.runtime.lanes import Hooks
from casync.runtime.steps import TaskFn
from casync.runtime.stream_order import Lane, Mark
from casync.transports import SlotTransport, Transport

__all__ = ["StreamLanes"]

_LOOK = 5e-5  # seconds between queries of an event
_LANES = {
    Encode: "encode", EncodeRound: "encode", Merge: "merge", Follow: "merge",
    Decode: "decode", DecodeRounds: "decode",
}  # fmt: skip


class StreamLanes:
    """Implements Lanes by streams; see [Note: streams]."""

    def __init__(
        self, hooks: Hooks, memory: Memory, transport: Transport | SlotTransport, watch: bool
    ) -> None:
        self._hooks, self._memory = hooks, memory
        self._numbers = count()
        made = (("encode", True), ("merge", True), ("decode", False), ("leave", True),
                ("enter", True), ("exchange", True), ("end", False),
                ("graph", True))  # fmt: skip
        self._lanes = {name: Lane(memory.stream(urgent=urgent)) for name, urgent in made}
        self._ready: list[tuple[int, int, Job]] = []
        self._lock = threading.Lock()
        self._issuing = False
        self._ended: deque[Job] = deque()
        self._slots: SlotTransport | None = None
        self._communication: Communication | None = None
        if isinstance(transport, SlotTransport):
            self._slots = transport
        else:
            arrived = replace(hooks, on_done=self._arrived)
            self._communication = Communication(arrived, memory, transport, watch)

    def begin(self, job: Job) -> None:
        caller = Lane(self._memory.caller())
        mark = caller.mark(next(self._numbers), self._memory.event())
        job.begun = Mark(job.prepared.key, mark.number, mark.event, {})
        if job.prepared.ended is None:
            job.prepared.ended = job.begun

    def start(self, job: Job) -> None:
        if self._communication is not None:
            self._communication.start(job)

    def put(self, job: Job, index: int) -> None:
        task = job.tasks[index]
        if not isinstance(task, Send | Recv | Reduce):
            self._push(job, index)
        elif self._communication is None:
            self._put_transfer(job, index)
        elif not isinstance(task, Recv):
            self._communication.put(job, index)

    def run(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._issue(*item)
            finally:
                self._issuing = False

    def end(self, job: Job) -> None:
        lane, prepared = self._lanes["end"], job.prepared
        lane.after(job.marks[i] for i, following in enumerate(job.unlocks) if not following)
        if prepared.varying:
            lane.run(prepared.remember)
        prepared.ended = lane.mark(next(self._numbers), job.events.end)
        if job.taken:
            return  # nothing runs yet, and CUDA refuses questions meanwhile
        self._forget_done()
        with self._lock:
            self._ended.append(job)

    def complete(self, job: Job, work: Callable[[], None]) -> None:
        self._lanes["end"].run(work)

    def join(self, job: Job) -> None:
        """Make the calling thread's stream wait for a job that has ended."""
        self._memory.caller().after(job.events.end)

    @contextmanager
    def taking(self, job: Job) -> Iterator[None]:
        """A context that captures a job. Its work is not done then, so nothing later awaits it."""
        ended, known = job.prepared.ended, {lane: lane.known for lane in self._lanes.values()}
        job.taken, job.prepared.ended = True, None
        try:
            yield
        finally:
            job.prepared.ended, job.marks = ended, [None] * len(job.tasks)
            for lane, before in known.items():
                lane.known = before

    def launch(self, job: Job, work: Callable[[], None], complete: Callable[[], None]) -> None:
        """Launch all of a job at once, then call `complete`: see [Note: capture]."""
        lane, prepared = self._lanes["graph"], job.prepared
        lane.after([job.begun, prepared.ended])
        lane.run(work)
        prepared.ended = lane.mark(next(self._numbers), prepared.end)
        self._ended.append(job)
        lane.run(complete)

    def settle(self, timeout: float, future: object = None) -> bool:
        """Block the host until all ended jobs are done, or the one of this future; a job that times
        out fails. Returns True if there may have been jobs since the last call. May be called from
        any thread."""
        limit, some = time.monotonic() + timeout, future is not None or bool(self._ended)
        while (job := self._undone(future)) is not None and not self._hooks.ended.is_set():
            if time.monotonic() > limit:
                self._time_out(job, timeout)
                return some
            time.sleep(_LOOK)
        self._forget_done()
        return some

    def drop(self) -> None:
        with self._lock:
            self._ready.clear()

    def close(self, patience: float) -> None:
        if self._communication is not None:
            self._communication.close(patience)
            self._communication = None  # which refers back to this
        self._ended.clear()

    def _undone(self, future: object) -> Job | None:
        """The oldest ended job that is not done, or the one of this future if it is not done."""
        with self._lock:
            jobs = [job for job in self._ended if future is None or job.future is future]
        return next((job for job in jobs if not job.prepared.end.done()), None)

    def _forget_done(self) -> None:
        with self._lock:
            over = self._hooks.ended.is_set()
            while self._ended and (over or self._ended[0].prepared.end.done()):
                self._ended.popleft()

    def _push(self, job: Job, index: int) -> None:
        with self._lock:
            heapq.heappush(self._ready, (job.sequence, index, job))

    def _put_transfer(self, job: Job, index: int) -> None:
        """Push the first and the last ready transfer of each group: the last issues it, and after
        the first `_refuse_stuck` looks for the others."""
        number = job.prepared.group_of[index]
        first = job.missing[number] == len(job.prepared.groups[number].members)
        job.missing[number] -= 1
        if first or not job.missing[number]:
            self._push(job, index)

    def _next(self) -> tuple[Job, int] | None:
        with self._lock:
            if self._issuing or not self._ready:
                return None
            self._issuing = True
            _, index, job = heapq.heappop(self._ready)
        return job, index

    def _issue(self, job: Job, index: int) -> None:
        task = job.tasks[index]
        try:
            if not isinstance(task, Send | Recv | Reduce):
                self._compute(job, index, task)
            elif self._slots is None:
                self._enter(job, index)
            else:
                self._exchange(job, self._slots)
            self._refuse_stuck(job)
        except Exception as error:
            self._hooks.on_error(job, index, error)

    def _compute(self, job: Job, index: int, task: Task) -> None:
        """Issue an encode, merge or decode; payloads that travel then leave the device."""
        begin, prepared = time.perf_counter(), job.prepared
        step = prepared.steps[index]
        assert step is not None  # only transfers have none
        lane = self._lanes[_LANES[type(members(task)[-1])]]
        lane.after([*self._before(job, job.prepared.after[index]), job.begun])
        with self._hooks.span(prepared.spans[index]):
            lane.run(partial(self._take_effect, job, index, step))
        mark = job.marks[index] = lane.mark(next(self._numbers), job.events.of(index))
        for slot in prepared.leaving[index]:
            leave = self._lanes["leave"]
            leave.after([mark])
            leave.run(slot.leave)
            leave.mark(next(self._numbers), slot.left)
        self._hooks.on_done(job, (index,), begin)

    def _enter(self, job: Job, index: int) -> None:
        """Copy a received or reduced payload from host memory to the device."""
        begin, lane = time.perf_counter(), self._lanes["enter"]
        slot = cast(StagedSlot, job.prepared.slots[index])
        lane.after(self._before(job, job.prepared.after[index]))
        lane.run(slot.enter)
        job.marks[index] = lane.mark(next(self._numbers), slot.entered)
        self._hooks.on_done(job, (index,), begin)

    def _exchange(self, job: Job, transport: SlotTransport) -> None:
        """Issue the groups whose turn it is and whose members are all ready."""
        begin, lane, groups = time.perf_counter(), self._lanes["exchange"], job.prepared.groups
        while job.turn < len(groups) and not job.missing[job.turn]:
            group = groups[job.turn]
            job.turn += 1
            lane.after(self._before(job, group.after))
            transfers = [job.prepared.transfer(i, job.bucket) for i in group.members]
            lane.run(partial(transport.exchange, transfers))
            self._exchange_exactly(job, group.members, transport)
            mark = lane.mark(next(self._numbers), job.events.of(group.members[0]))
            for i in group.members:
                job.marks[i] = mark
            self._hooks.on_done(job, group.members, begin)

    def _exchange_exactly(self, job: Job, members: list[int], transport: SlotTransport) -> None:
        """Exchange pieces of payloads by their lengths, for which the host waits."""
        slots = {i: cast(Buffer, job.prepared.slots[i]) for i in members}
        exact = {i: slot for i, slot in slots.items() if slot.exact}
        if exact:
            lane, there = self._lanes["exchange"], self._memory.event()
            for slot in dict.fromkeys(exact.values()):
                lane.run(slot.remember)
            lane.mark(next(self._numbers), there)
            there.wait()
            pieces = [(i, piece) for i, slot in exact.items() for piece in slot.pieces()]
            made = [(job.prepared.transfer(i, job.bucket), piece) for i, piece in pieces]
            transfers = [replace(transfer, data=piece) for transfer, piece in made]
            lane.run(partial(transport.exchange, transfers))

    def _take_effect(self, job: Job, index: int, step: TaskFn) -> None:
        """Run a step, in a stream."""
        if self._hooks.delay is not None:
            self._hooks.delay(job.tasks[index].text())
        step(job.inputs)

    def _before(self, job: Job, tasks: Sequence[int]) -> list[Mark | None]:
        """Marks of these tasks, and of the program's last run."""
        return [*(job.marks[i] for i in tasks), job.prepared.ended]

    def _refuse_stuck(self, job: Job) -> None:
        """Raise DeadlockError if a slot's turn has come and no remaining task can get it ready."""
        if job.turn == len(job.prepared.groups):
            return
        with self._lock:
            more = bool(self._ready) and self._ready[0][0] == job.sequence
        if not more:
            late = [job.tasks[i] for i in job.prepared.groups[job.turn].members if job.waits[i]]
            first = late[0]
            assert isinstance(first, Send | Recv | Reduce)
            raise DeadlockError(
                f"rank {first.rank} is at slot {first.slot} and cannot send `{first.text()}`, "
                "which needs data of a later slot",
                tuple(task.text() for task in late),
            )

    def _arrived(self, job: Job, indices: Sequence[int], begin: float) -> None:
        """Take a message or reduce that is complete in host memory."""
        (index,) = indices
        if isinstance(job.tasks[index], Send):
            self._hooks.on_done(job, indices, begin)
        else:
            self._push(job, index)
            self.run()

    def _time_out(self, job: Job, timeout: float) -> None:
        """Fail the first unfinished task of a job, a transfer if there is one."""
        left = [i for i, mark in enumerate(job.marks) if mark is not None and not mark.event.done()]
        moved = [i for i in left if isinstance(job.tasks[i], Send | Recv | Reduce)]
        error = PeerTimeout(f"the device was not done with it after {timeout:g} s")
        self._hooks.on_error(job, (moved or left or [0])[0], error)
