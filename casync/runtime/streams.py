"""Lanes on a device: streams.

[Note: streams] Encodes, merges and decodes have a stream each, and transfers have others. The host
does not wait here: the thread that makes a task ready issues it, one thread at a time, in the order
of jobs and of the program. A task's stream waits for the events of its predecessors on other
streams, but not for events that are known to come earlier; so of the program's edges only those
remain that no others imply. Two more rules hold: a run comes after its bucket is filled, and after
the last run of its program, whose buffers it uses.

Without tags a job is issued as a whole, in an order that is found once a program (see `issues`):
slots in theirs, each as a group, on the communication stream. With tags the transport is the
host's: payloads leave the device for pinned memory on one stream, and received payloads enter it on
another, while threads send and receive: see StagedSlot.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

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
)
from casync.errors import PeerTimeout
from casync.memory import Event, Memory, Stream
from casync.runtime.calls import TaskFn
from casync.runtime.lanes import DeviceRun, Job, Progress
from casync.runtime.prepared import Issue
from casync.runtime.threads import Communication
from casync.transports import SlotTransport, Transport

__all__ = ["StreamLanes"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A point on a stream, and the points that are known to come before it."""

    lane: object
    number: int  # later ones are larger, on all streams
    event: Event
    known: dict[object, int]  # by lane: number of the last mark before this one


class Lane:
    """A stream, and the last marks of other lanes that precede its next work."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.known: dict[object, int] = {}

    def after(self, marks: Iterable[Mark | None]) -> None:
        """Make later work wait for these marks; late ones first, as they often imply early ones."""
        there = {mark.number: mark for mark in marks if mark is not None}
        for number, mark in sorted(there.items(), reverse=True):
            if mark.lane is not self and self.known.get(mark.lane, -1) < number:
                self._stream.after(mark.event)
                known = self.known.copy()  # marks refer to the old one
                for lane, before in (*mark.known.items(), (mark.lane, number)):
                    if known.get(lane, -1) < before:
                        known[lane] = before
                self.known = known

    def forget(self, lane: object) -> None:
        """Forget marks of a lane for which nothing later waits, so that `known` stays short."""
        if lane in self.known:
            self.known = {other: number for other, number in self.known.items() if other != lane}

    def run(self, work: Callable[[], object]) -> None:
        """Implements Stream.run."""
        self._stream.run(work)

    def mark(self, number: int, event: Event) -> Mark:
        """A mark at the present end of the stream."""
        self._stream.record(event)
        return Mark(self, number, event, self.known)


_LOOK = 5e-5  # seconds between queries of an event
_ALL = 0  # in place of a task: without tags a job is issued as a whole
_LANES = {
    Encode: "encode", EncodeRound: "encode", Merge: "merge", Follow: "merge",
    Decode: "decode", DecodeRounds: "decode",
}  # fmt: skip


class StreamLanes:
    """Implements Lanes by streams; see [Note: streams]."""

    def __init__(
        self, progress: Progress, memory: Memory, transport: Transport | SlotTransport
    ) -> None:
        self._progress, self._memory = progress, memory
        self._numbers = count()
        names = ("encode", "merge", "decode", "leave", "enter", "exchange", "end", "graph")
        self._lanes = {
            name: Lane(memory.stream(urgent=name not in ("decode", "end"))) for name in names
        }
        self._ready: list[tuple[int, int, Job]] = []
        self._lock = threading.Lock()
        self._issuing = False
        self._finished: deque[Job] = deque()  # not known to be done
        self._captured: Job | None = None  # that is captured now, not run
        self._slots: SlotTransport | None = None
        self._communication: Communication | None = None
        if isinstance(transport, SlotTransport):
            self._slots = transport
        else:
            arrived = replace(progress, done=self._take_arrival)
            self._communication = Communication(arrived, memory, transport)

    def admit(self, job: Job) -> None:
        """Take a job whose bucket is filled, in the caller's stream."""
        mark = Lane(self._memory.caller()).mark(next(self._numbers), self._memory.event())
        begun = Mark(job.prepared.key, mark.number, mark.event, {})
        marks, captured = [None] * len(job.tasks), job is self._captured
        job.device = DeviceRun(begun, marks, captured=captured)
        if job.prepared.ended is None:
            job.prepared.ended = begun

    def start(self, job: Job) -> None:
        if self._communication is not None:
            self._communication.put(job)

    def issue(self, job: Job, ready: Sequence[int]) -> None:
        if self._communication is None:
            self._push(job, _ALL)
        else:
            for index in ready:
                if not isinstance(job.tasks[index], Send | Recv | Reduce):
                    self._push(job, index)
                elif not isinstance(job.tasks[index], Recv):
                    self._communication.put((job, index))
        self._run()

    def _run(self) -> None:
        """Issue the tasks that are ready, unless another thread does, or this one further up."""
        while (item := self._next()) is not None:
            try:
                self._issue(*item)
            finally:
                self._issuing = False

    def finish(self, job: Job, free: Callable[[], None], complete: Callable[[], None]) -> None:
        lane, prepared, device = self._lanes["end"], job.prepared, job.device
        with self._lock:
            lane.after(device.marks[i] for i in prepared.last)
            for each in self._lanes.values():
                each.forget(prepared.key)  # a later run has another beginning
            if prepared.varying:
                lane.run(prepared.remember)
            prepared.ended = lane.mark(next(self._numbers), job.events.end)
            if not device.captured:
                self._finished.append(job)
        free()
        if not device.captured:  # otherwise nothing runs yet, and CUDA refuses questions meanwhile
            self._forget_done()
            lane.run(complete)

    def join(self, job: Job) -> None:
        """Make the calling thread's stream wait for a job that has ended."""
        self._memory.caller().after(job.events.end)

    @contextmanager
    def capturing(self, job: Job) -> Iterator[None]:
        """A context that captures a job. Its work is not done then, so nothing later awaits it. Its
        launches come after all earlier calls, whose scratch memory a codec may have given to it."""
        ended, known = job.prepared.ended, {lane: lane.known for lane in self._lanes.values()}
        self._captured, job.prepared.ended = job, None
        try:
            yield
        finally:
            self._captured, job.prepared.ended = None, ended
            for lane, before in known.items():
                lane.known = before
        calls = [self._lanes[name] for name in sorted({*_LANES.values()})]
        number, event = self._numbers, self._memory.event
        self._lanes["graph"].after([lane.mark(next(number), event()) for lane in calls])

    def launch(
        self, job: Job, work: Sequence[Callable[[], object]], complete: Callable[[], None]
    ) -> None:
        """Launch all of a job at once, then call `complete`: see [Note: capture]."""
        lane, prepared = self._lanes["graph"], job.prepared
        lane.after([job.device.begun, prepared.ended])
        for each in work:
            lane.run(each)
        prepared.ended = lane.mark(next(self._numbers), prepared.end)
        with self._lock:
            self._finished.append(job)
        lane.run(complete)

    def settle(self, timeout: float, future: object = None) -> bool:
        """Block the host until all ended jobs are done, or the one of this future; a job that times
        out fails. Returns True if there may have been jobs since the last call. May be called from
        any thread."""
        limit, some = time.monotonic() + timeout, future is not None or bool(self._finished)
        while (job := self._undone(future)) is not None and not self._progress.ended.is_set():
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
        self._finished.clear()

    def _undone(self, future: object) -> Job | None:
        """The oldest ended job that is not done, or the one of this future if it is not done."""
        with self._lock:
            jobs = [job for job in self._finished if future is None or job.future is future]
        return next((job for job in jobs if not job.prepared.end.done()), None)

    def _forget_done(self) -> None:
        with self._lock:
            over = self._progress.ended.is_set()
            while self._finished and (over or self._finished[0].prepared.end.done()):
                self._finished.popleft()

    def _push(self, job: Job, index: int) -> None:
        with self._lock:
            heapq.heappush(self._ready, (job.sequence, index, job))

    def _next(self) -> tuple[Job, int] | None:
        with self._lock:
            if self._issuing or not self._ready:
                return None
            self._issuing = True
            _, index, job = heapq.heappop(self._ready)
        return job, index

    def _issue(self, job: Job, index: int) -> None:
        """Issue a task, or without tags the whole job."""
        begin = time.perf_counter()
        try:
            if self._slots is not None:
                self._issue_all(job, self._slots)
                return
            if isinstance(job.tasks[index], Recv | Reduce):
                self._enter(job, index)
            else:
                self._compute(job, index, job.prepared.after[index])
        except Exception as error:
            if job.device.captured:  # nothing runs: a failed capture fails no job
                raise
            self._progress.failed(job, index, error)
        else:
            self._progress.done(job, (index,), begin)

    def _issue_all(self, job: Job, transport: SlotTransport) -> None:
        times, first = list[tuple[Sequence[int], float, float]](), 0
        try:
            for issue in job.prepared.order:
                if self._progress.ended.is_set():
                    return
                first, begin = issue.members[0], time.perf_counter()
                if issue.transfers:
                    self._exchange(job, issue, transport)
                else:
                    self._compute(job, first, issue.after)
                times.append((issue.members, begin, time.perf_counter()))
        except Exception as error:
            if job.device.captured:
                raise
            self._progress.failed(job, first, error)
        else:
            self._progress.issued(job, times)

    def _compute(self, job: Job, index: int, after: Sequence[int]) -> None:
        """Issue an encode, merge or decode; payloads that travel then leave the device."""
        prepared = job.prepared
        step = prepared.steps[index]
        assert step is not None  # only transfers have none
        lane = self._lanes[_LANES[type(prepared.members[index][-1])]]
        lane.after([*self._before(job, after), job.device.begun])
        with self._progress.options.span(prepared.spans[index]):
            lane.run(partial(self._take_effect, job, index, step))
        mark = job.device.marks[index] = lane.mark(next(self._numbers), job.events.of(index))
        for slot in prepared.leaving[index]:
            leave = self._lanes["leave"]
            leave.after([mark])
            leave.run(slot.leave)
            leave.mark(next(self._numbers), slot.on_host)

    def _enter(self, job: Job, index: int) -> None:
        """Copy a received or reduced payload from host memory to the device."""
        lane = self._lanes["enter"]
        slot = job.prepared.payloads.staged[index]
        lane.after(self._before(job, job.prepared.after[index]))
        lane.run(slot.enter)
        job.device.marks[index] = lane.mark(next(self._numbers), slot.on_device)

    def _exchange(self, job: Job, slot: Issue, transport: SlotTransport) -> None:
        """Issue the transfers of a slot as a group."""
        lane = self._lanes["exchange"]
        lane.after(self._before(job, slot.after))
        transfers = [job.prepared.transfer(i, job.bucket) for i in slot.members]
        lane.run(partial(transport.exchange, transfers))
        self._exchange_exactly(job, slot.members, transport)
        mark = lane.mark(next(self._numbers), job.events.of(slot.members[0]))
        for i in slot.members:
            job.device.marks[i] = mark

    def _exchange_exactly(self, job: Job, members: list[int], transport: SlotTransport) -> None:
        """Exchange pieces of payloads by their lengths, for which the host waits."""
        buffers = job.prepared.payloads.buffers
        exact = {i: buffers[i] for i in members if buffers[i].exact}
        if exact:
            lane, there = self._lanes["exchange"], self._memory.event()
            for slot in dict.fromkeys(exact.values()):
                lane.run(slot.remember)
            lane.mark(next(self._numbers), there)
            there.wait()
            pieces = [(i, piece) for i, slot in exact.items() for piece in slot.pieces()]
            whole = {i: job.prepared.transfer(i, job.bucket) for i in exact}
            transfers = [replace(whole[i], data=piece) for i, piece in pieces]
            lane.run(partial(transport.exchange, transfers))

    def _take_effect(self, job: Job, index: int, step: TaskFn) -> None:
        """Run a step, in a stream."""
        if self._progress.options.delay is not None:
            self._progress.options.delay(job.tasks[index].text())
        step(job.inputs)

    def _before(self, job: Job, tasks: Sequence[int]) -> list[Mark | None]:
        """Marks of these tasks, and of the program's last run."""
        return [*(job.device.marks[i] for i in tasks), job.prepared.ended]

    def _take_arrival(self, job: Job, indices: Sequence[int], begin: float) -> None:
        """Take a message or reduce that is complete in host memory."""
        (index,) = indices
        if isinstance(job.tasks[index], Send):
            self._progress.done(job, indices, begin)
        else:
            self._push(job, index)
            self._run()

    def _time_out(self, job: Job, timeout: float) -> None:
        """Fail the first unfinished task of a job, a transfer if there is one."""
        unfinished = [
            i
            for i, mark in enumerate(job.device.marks)
            if mark is not None and not mark.event.done()
        ]
        moved = [i for i in unfinished if isinstance(job.tasks[i], Send | Recv | Reduce)]
        error = PeerTimeout(f"the device was not done with it after {timeout:g} s")
        self._progress.failed(job, (moved or unfinished or [0])[0], error)
