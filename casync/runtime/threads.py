"""Lanes in host memory: threads.

[Note: threads] One compute lane runs encodes, decodes and merges, the most urgent ready one first:
tasks for which another rank waits, then in job order. One communication lane posts, and never
blocks: receives when a job starts, sends and reduces when ready, FIFO per peer and channel. So the
order is the same on both sides, in whatever order payloads get ready. Waiters block on posted
operations, one per peer and channel, in that order; they cost nothing while they wait.

Fewer threads were tried. One waiter for all would need to know which operation is done: gloo cannot
tell for messages (is_completed() stays False until wait(), get_future() is not implemented, and a
wait that times out breaks all connections). A second message to recv_anysource, as a bell, costs
more than it saves: a round trip of 64 KB takes 175 microseconds, 210 with a waiter's wake-up, 250
with bells. Posting in the thread that makes a task ready lengthens submit, and so the backward
pass, from 0.1 to 0.3 to 3 ms; with only sends posted that way, bench.tasks showed no gain.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable

from casync.building.tasks import Recv, Reduce, Send
from casync.memory import Memory
from casync.runtime.communication import Communication, spawn
from casync.runtime.jobs import Job
from casync.runtime.lanes import Hooks
from casync.transports import Transport

__all__ = ["ThreadLanes"]


class ThreadLanes:
    """A compute lane, a communication lane and its waiters. Implements Lanes."""

    def __init__(self, hooks: Hooks, memory: Memory, transport: Transport, watch: bool) -> None:
        self._compute = Compute(hooks, memory)
        self._communication = Communication(hooks, memory, transport, watch)

    def begin(self, job: Job) -> None:
        """Implements Lanes.begin."""

    def start(self, job: Job) -> None:
        self._communication.start(job)

    def put(self, job: Job, index: int) -> None:
        task = job.tasks[index]
        if isinstance(task, Send | Reduce):
            self._communication.put(job, index)
        elif not isinstance(task, Recv):
            self._compute.put(job, index)

    def run(self) -> None:
        """Implements Lanes.run: the compute thread issues tasks."""

    def end(self, job: Job) -> None:
        """Implements Lanes.end."""

    def complete(self, job: Job, work: Callable[[], None]) -> None:
        work()

    def drop(self) -> None:
        self._compute.drop()

    def close(self, patience: float) -> None:
        self._compute.close(patience)
        self._communication.close(patience)


class Compute:
    """The compute lane: a thread that runs ready tasks."""

    def __init__(self, hooks: Hooks, memory: Memory) -> None:
        self._hooks = hooks
        self._ready: list[tuple[bool, int, int, Job]] = []
        self._changed = threading.Condition()
        self._open = True
        self._thread = spawn(self._run, "compute", memory)

    def put(self, job: Job, index: int) -> None:
        """Queue a ready task, by urgency, job and position."""
        with self._changed:
            key = (not job.prepared.urgent[index], job.sequence, index, job)
            heapq.heappush(self._ready, key)
            self._changed.notify()

    def drop(self) -> None:
        """Forget tasks that have not begun."""
        with self._changed:
            self._ready.clear()

    def close(self, patience: float) -> None:
        """Stop the thread."""
        with self._changed:
            self._open = False
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            self._one(*item)
            del item  # an idle lane must not keep the last job's bucket alive

    def _next(self) -> tuple[Job, int] | None:
        with self._changed:
            begin = time.perf_counter()
            idle = not self._ready
            while self._open and not self._ready:
                self._changed.wait()
            item = heapq.heappop(self._ready)[2:] if self._open else None
        if idle:
            self._hooks.on_idle(time.perf_counter() - begin)
        return None if item is None else (item[1], item[0])

    def _one(self, job: Job, index: int) -> None:
        step = job.prepared.steps[index]
        try:
            if self._hooks.delay is not None:
                self._hooks.delay(job.tasks[index].text())
            begin = time.perf_counter()
            if step is not None:
                with self._hooks.span(job.prepared.spans[index]):
                    step(job.inputs)
            self._hooks.on_done(job, (index,), begin)
        except Exception as error:
            self._hooks.on_error(job, index, error)
