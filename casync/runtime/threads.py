"""Lanes in host memory: threads.

[Note: threads] One compute lane runs encodes, decodes and merges, the most urgent ready one first:
tasks for which another rank waits, then in job order. One communication lane posts, and never
blocks: receives when a job starts, sends and reduces when ready, FIFO per peer and channel. So the
order is the same on both sides, in whatever order payloads get ready. Waiters block on posted
operations, one per peer and channel, in that order; they cost nothing while they wait.

Fewer threads were tried. One waiter for all would need to know which operation is done: gloo cannot
tell for messages (in torch 2.13, too, is_completed() stays False until wait() although the bytes
are there, get_future() is not implemented, and a wait that times out breaks all connections). One
waiter in the order of posts needs to know nothing: with bench.tasks' programs on 4 ranks and 2
cores a single bucket then took 2.8 ms instead of 4.1, but four at a time 19 instead of 12, since
messages wait behind earlier ones of slower ranks. A second message to recv_anysource, as a bell,
costs more than it saves: a round trip of 64 KB takes 175 microseconds, 210 with a waiter's wake-up,
250 with bells. Posting in the thread that makes a task ready lengthens submit, and so the backward
pass, from 0.1 to 0.3 to 3 ms; with only sends posted that way, bench.tasks showed no gain.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence

from casync.building.tasks import Recv, Reduce, Send
from casync.memory import Memory
from casync.runtime.communication import Communication, spawn
from casync.runtime.jobs import HostRun, Job
from casync.runtime.lanes import Progress
from casync.transports import Transport

__all__ = ["ThreadLanes"]


class ThreadLanes:
    """A compute lane, a communication lane and its waiters. Implements Lanes."""

    def __init__(self, progress: Progress, memory: Memory, transport: Transport) -> None:
        self._progress = progress
        self._communication = Communication(progress, memory, transport)
        self._ready: list[tuple[bool, int, int, Job]] = []  # a heap: the most urgent task first
        self._changed = threading.Condition()
        self._open = True
        self._thread = spawn(self._compute, "compute", memory)

    def admit(self, job: Job) -> None:
        job.host = HostRun()

    def start(self, job: Job) -> None:
        self._communication.start(job)

    def issue(self, job: Job, ready: Sequence[int]) -> None:
        for index in ready:
            task = job.tasks[index]
            if isinstance(task, Send | Reduce):
                self._communication.put(job, index)
            elif not isinstance(task, Recv):  # which its job's start has posted
                urgent = job.prepared.program.urgent[index]
                with self._changed:
                    heapq.heappush(self._ready, (not urgent, job.sequence, index, job))
                    self._changed.notify()

    def finish(self, job: Job, free: Callable[[], None], complete: Callable[[], None]) -> None:
        free()
        complete()

    def drop(self) -> None:
        with self._changed:
            self._ready.clear()

    def close(self, patience: float) -> None:
        with self._changed:
            self._open = False
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)
        self._communication.close(patience)

    def _compute(self) -> None:
        """The compute lane: take the most urgent task that is ready, run it, tell the executor."""
        progress, options = self._progress, self._progress.options
        while True:
            with self._changed:
                since, idle = time.perf_counter(), not self._ready
                while self._open and not self._ready:
                    self._changed.wait()
                if not self._open:
                    return
                *_, index, job = heapq.heappop(self._ready)
            if idle:
                progress.idle(time.perf_counter() - since)
            if progress.ended.is_set():  # a bucket belongs to its caller again
                continue
            try:
                if options.delay is not None:
                    options.delay(job.tasks[index].text())
                step, begin = job.prepared.steps[index], time.perf_counter()
                if step is not None:
                    with options.span(job.prepared.spans[index]):
                        step(job.inputs)
                progress.done(job, (index,), begin)
            except Exception as error:
                progress.failed(job, index, error)
            del job  # an idle lane must not keep the last job's bucket alive
