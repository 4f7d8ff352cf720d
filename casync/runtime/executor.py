"""Executor of programs: takes jobs, returns averaged buckets. See [Note: lanes] in lanes.py."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from casync.building.tasks import Task
from casync.codec import Codec
from casync.errors import (
    DeadlockError,
    ExecutorClosed,
    PlanError,
    TransportAborted,
    TransportError,
    copy_to_raise,
)
from casync.graph.graph import Program
from casync.memory import Memory
from casync.memory.host import HostMemory
from casync.memory.identity import Identity
from casync.runtime.capture import Captures
from casync.runtime.counters import Counters
from casync.runtime.failures import find_bad_payload, find_culprit, named_error, rank_names
from casync.runtime.lanes import Job, Lanes, Progress
from casync.runtime.options import Capture, RunOptions
from casync.runtime.pieces import States
from casync.runtime.prepared import FLOATS, Context, Prepared, prepare
from casync.runtime.streams import StreamLanes
from casync.runtime.threads import ThreadLanes
from casync.shutdown import close_at_exit
from casync.transports import SlotTransport, Transport

__all__ = ["Executor", "TraceEvent"]


class TraceEvent(NamedTuple):
    """A task that ran, or a whole job. Times by time.perf_counter."""

    job: int  # number in the order of submits
    task: Task | None  # None: the job, from its submit to its averages
    begin: float
    end: float


class Lifecycle(Enum):
    """States of an executor; a failed one is closed later, an open one perhaps at once."""

    OPEN = auto()
    FAILED = auto()  # by an error, which every later submit raises
    CLOSED = auto()


_log = logging.getLogger("casync")
_PATIENCE = 5.0  # seconds that close() waits for a thread
_ECHO = 1.0  # seconds that an echo of an error leaves to the error itself


class Executor:
    """The runtime of one rank. All ranks must submit programs of the same graphs in the same order.

    After an error every job under way fails with it; the transport's connections are broken, so
    that peers fail as well; and every later submit raises it: start anew with new executors.
    """

    def __init__(
        self,
        transport: Transport | SlotTransport,
        codecs: Mapping[str, Codec],
        options: RunOptions | None = None,
        *,
        memory: Memory | None = None,
        ranks: Sequence[int] | None = None,
        trace: list[TraceEvent] | None = None,
    ) -> None:
        """Start the lanes.

        Args:
            codecs: looked up when a program's buffers are made.
            memory: of buckets and states; by default the host's. On a device with a transport of
                the host, payloads are staged in pinned memory.
            ranks: global numbers of the transport's ranks, for errors.
            trace: gets an event per task and job.
        """
        self.options = options = options or RunOptions()
        self.trace = trace
        self._counters = Counters(transport.world_size)
        self._names = rank_names(transport.world_size, ranks)
        self._here = (transport.rank, transport.world_size)
        self._memory = memory or HostMemory()
        self._tags = not isinstance(transport, SlotTransport)
        self._context = Context(codecs, self._memory, self._tags, options)
        self._process = os.getpid()  # see [Note: fork] in shutdown.py
        self._lock = threading.Lock()
        self._state = Lifecycle.OPEN
        self._error: Exception | None = None  # that ended it, unless it is open
        self._ended = threading.Event()
        self._prepared: WeakKeyDictionary[Program, Prepared] = WeakKeyDictionary()
        self._bucket_names: dict[int, str] = {}  # by digest
        # jobs under way, in the order in which they were submitted
        self._queued, self._running = deque[Job](), dict[int, Job]()
        self._sequence = self._step = 0
        self._capture_error = ""
        progress = Progress(
            self._advance, self._after_issue, self._fail, self._count_wait, self._ended, options
        )
        # None once closed: see close()
        self._transport: Transport | SlotTransport | None = transport
        self._lanes: Lanes | None
        self._streams: StreamLanes | None = None
        self._captures: Captures | None = None
        if self._memory.host and not isinstance(transport, SlotTransport):
            self._lanes = ThreadLanes(progress, self._memory, transport)
        else:
            self._lanes = self._streams = StreamLanes(progress, self._memory, transport)
            if not self._tags:
                self._captures = Captures(self._memory, self._streams, self._counters, self._lock)
        close_at_exit(self)

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rotates(self) -> bool:
        """True if programs should have a slot for each turn of a phase: see casync.build. NCCL
        orders a group itself, and each group costs the host time."""
        return self._tags

    @property
    def _where(self) -> str:
        """Text for errors."""
        return f"rank {self._names[self._here[0]]}"

    @property
    def counters(self) -> Counters:
        """A copy of the sums so far."""
        with self._lock:
            return replace(self._counters)

    @property
    def failed(self) -> bool:
        """True if an error or close() has ended this executor."""
        return self._state is not Lifecycle.OPEN

    def submit(
        self,
        program: Program,
        bucket: torch.Tensor,
        states: States,
        step: int,
        name: str = "",
        *,
        capture: Capture = Capture.NEVER,
        timeout: float | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Synchronize `bucket` in place; the future's value is the bucket.

        bucket: flat, of float32, float16 or bfloat16; for 16 bits see [Note: 16-bit gradients] in
        pieces.py.
        states: arenas by (codec key, "worker" | "aggregator"), updated in place. Runs of one
        program do not overlap; those of different programs do.
        name: of the bucket, the same on all ranks: see [Note: identity] in identity.py.
        capture: for a transport without tags; others have no graphs.
        timeout: seconds that a peer may take, if other than by the options; for messages in host
        memory.

        Never wait for this future in a callback of another. Raises the error that ended the
        executor, if any.
        """
        with self._lock:
            lanes = self._open_lanes(program)
            prepared = self._prepare(program, bucket.dtype)
            identity = Identity(self.options.epoch, self._sequence, name, self._bucket_names)
            seconds = self.options.timeout if timeout is None else timeout
            job = Job(identity, prepared, bucket, states, step, seconds)
            self._sequence, self._step = self._sequence + 1, step
            self._counters.jobs += 1
            captures = self._captures if job.tasks else None
            by_graph = captures is not None and captures.uses_graph(program, job, capture)
            if job.tasks and not by_graph:
                self._queue(job)
        if captures is not None and by_graph:
            self._run_captured(captures, program, job, capture)
        elif job.tasks:
            self._start(lanes)
        else:  # a single rank: the bucket is its own average
            job.future.set_result(bucket)
        return job.future

    def _start(self, lanes: Lanes) -> None:
        """Start jobs, up to the first whose program is still running."""
        jobs = list[Job]()
        with self._lock:
            # their messages may arrive in this order only, so no other thread may come between
            while self._queued and not self._queued[0].prepared.busy:
                job = self._queued.popleft()
                job.prepared.busy = True
                self._running[job.sequence] = job
                jobs.append(job)
                if job.prepared.varying:
                    unused = self._counters.bytes_unused
                    self._counters.bytes_unused = job.prepared.adapt(unused)
                lanes.start(job)
        for job in jobs:
            lanes.issue(job, job.prepared.first)

    def _advance(self, job: Job, done: Sequence[int], begin: float) -> None:
        """Go on after tasks that a lane has done, or issued: count them, issue those that waited
        for them last, and after the job's last task complete it and start the next.

        Lanes call this from any thread, for different tasks of a job at the same time.
        """
        end, ready = time.perf_counter(), list[int]()
        with self._lock:
            lanes = self._lanes
            if lanes is None or self._state is not Lifecycle.OPEN:
                return  # buckets belong to their callers again
            self._count(job, done, begin, end)
            waits, unlocks = job.waits, job.prepared.program.unlocks
            for index in done:
                for following in unlocks[index]:
                    waits[following] -= 1
                    if not waits[following]:
                        ready.append(following)
            job.remaining -= len(done)
            over = not job.remaining  # for one thread only
        if ready:
            lanes.issue(job, ready)
        if over:
            self._finish(lanes, job, end)

    def _after_issue(self, job: Job, times: Sequence[tuple[Sequence[int], float, float]]) -> None:
        """Go on after a lane has issued all tasks of a job."""
        with self._lock:
            lanes = self._lanes
            if lanes is None or self._state is not Lifecycle.OPEN:
                return
            for done, begin, end in times:
                self._count(job, done, begin, end)
        self._finish(lanes, job, times[-1][2])

    def _count(self, job: Job, done: Sequence[int], begin: float, end: float) -> None:
        self._counters.count(job, done, end - begin)
        if self.trace is not None:
            self.trace += [TraceEvent(job.sequence, job.tasks[i], begin, end) for i in done]

    def _finish(self, lanes: Lanes, job: Job, end: float) -> None:
        """Complete a job whose tasks are all done, or issued, and start the next."""
        with self._lock:
            self._counters.job_seconds += end - job.started
            if self.trace is not None:
                self.trace.append(TraceEvent(job.sequence, None, job.started, end))
        lanes.finish(job, partial(self._free, job), partial(self._complete, job))
        self._start(lanes)

    def _free(self, job: Job) -> None:
        """Let the job's program run again."""
        with self._lock:
            if self._state is Lifecycle.OPEN:
                del self._running[job.sequence]
                job.prepared.busy = False

    def _complete(self, job: Job) -> None:
        try:
            job.future.set_result(job.bucket)
        except Exception:  # of a done-callback; it must not end a lane
            _log.exception("a callback of the bucket's future raised")

    def _run_captured(
        self, captures: Captures, program: Program, job: Job, capture: Capture
    ) -> None:
        """Capture the tasks of a job, unless that is done; then launch the graph, or issue them.

        If the capture fails, that ends nothing unless the graph was to be launched.
        """
        if not captures.has_graph(program, job):
            inputs = job.inputs
            twin = Job(
                job.identity, job.prepared, job.bucket, inputs.states, inputs.step, job.timeout
            )
            try:
                captures.make(program, twin, partial(self._issue, twin))
            except Exception as error:
                self._capture_error = f"{type(error).__name__}: {error}"
                _log.warning("a capture failed: %s", self._capture_error)
                if capture is Capture.LAUNCH:
                    named = PlanError(f"{self._where}: a capture failed: {self._capture_error}")
                    self._end(named)
                    raise copy_to_raise(named) from error
        if capture is Capture.LAUNCH:
            captures.launch(program, job, partial(self._complete, job))
        else:
            self._issue(job)

    def _queue(self, job: Job) -> None:
        if self._streams is not None:
            self._streams.admit(job)
        self._queued.append(job)

    def _issue(self, job: Job) -> None:
        """Issue all tasks of a job, maybe while they are captured."""
        with self._lock:
            lanes = self._open_lanes(job.prepared.program)
            self._queue(job)
        try:
            self._start(lanes)
        except Exception:
            self._free(job)  # of a capture
            raise
        with self._lock:
            if self._error is not None:
                raise copy_to_raise(self._error)

    def pop_capture_error(self) -> str:
        """Return and forget the reason why a capture failed; "" if none did."""
        why, self._capture_error = self._capture_error, ""
        return why

    def _count_wait(self, seconds: float) -> None:
        """Count the time in which the compute lane waited for work; a job is under way now."""
        with self._lock:
            oldest = next(iter(self._running.values()), None)
            if oldest is not None:
                under_way = time.perf_counter() - oldest.started
                self._counters.wait_seconds += min(seconds, under_way)

    def prepare(self, program: Program, dtype: torch.dtype = torch.float32) -> None:
        """Make a program's buffers now rather than in its first submit. dtype: of its buckets."""
        with self._lock:
            self._open_lanes(program)
            self._prepare(program, dtype)

    def settle(self, future: torch.futures.Future[torch.Tensor] | None = None) -> None:
        """Wait until the device, if there is one, has done all submitted work.

        Raises errors of the device: a peer's time-out, or a bad payload.

        future: of `submit`, and done: wait for that bucket alone, while others still travel.
        """
        streams = self._streams
        if streams is None:
            return  # futures have told of all work of threads
        if streams.settle(self.options.timeout, future) and not self._memory.host:
            with self._lock:
                programs = list(self._prepared.values())
            bad = find_bad_payload(programs, self._memory, self._here[0], self._step, self._names)
            if bad is not None:
                self._end(bad)
        if self._error is not None:
            raise copy_to_raise(self._error)

    def abort(self, error: Exception) -> None:
        """End by an error that came before any task could run."""
        self._end(error)

    def close(self) -> None:
        """Stop the threads; jobs under way fail with ExecutorClosed. Does nothing in a fork."""
        if os.getpid() != self._process or self._state is Lifecycle.CLOSED:
            return
        self._end(ExecutorClosed(f"{self._where}: the executor was closed"))
        lanes, transport = self._lanes, self._transport
        # Forget what refers back to this. In a cycle connections would live on until Python's
        # collector finds them, maybe in a forked child, where their threads are missing.
        self._state = Lifecycle.CLOSED
        self._lanes = self._streams = self._captures = self._transport = None
        if lanes is not None:
            lanes.close(_PATIENCE)
        if self.options.owns and transport is not None:
            transport.close()

    def _open_lanes(self, program: Program) -> Lanes:
        """The lanes; raises the error that ended this executor, and PlanError for a program of
        another rank."""
        if os.getpid() != self._process:
            raise ExecutorClosed(
                f"{self._where}: process {os.getpid()} is a fork of "
                f"{self._process}, whose threads and connections it does not have"
            )
        if self._error is not None:
            raise copy_to_raise(self._error)
        if (program.rank, program.world_size) != self._here:
            raise PlanError(
                f"a program for rank {program.rank} of {program.world_size} "
                f"on rank {self._here[0]} of {self._here[1]}"
            )
        assert self._lanes is not None  # it is open
        return self._lanes

    def _prepare(self, program: Program, dtype: torch.dtype) -> Prepared:
        if program not in self._prepared:
            known = dtype if dtype in FLOATS else torch.float32
            self._prepared[program] = prepare(program, known, self._context)
        return self._prepared[program]

    def _fail(self, job: Job, index: int, error: Exception) -> None:
        """End by the error of a task."""
        if isinstance(error, TransportAborted):
            self._ended.wait(_ECHO)
        task = find_culprit(job.prepared, index, self._memory, job.inputs.step)
        source = job.prepared.payloads.by_payload[task.payload].source
        named = named_error(error, task, job.inputs.step, source, self._names)
        if not isinstance(error, TransportError | DeadlockError):  # whose texts are complete
            named.__cause__ = error
        self._end(named)

    def _end(self, error: Exception) -> None:
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._state is not Lifecycle.OPEN:
                return
            self._state, self._error = Lifecycle.FAILED, error
            self._ended.set()
            jobs, lanes, transport = [], self._lanes, self._transport
            jobs += [*self._running.values(), *self._queued]
            self._running.clear()
            self._queued.clear()
        if lanes is not None:
            lanes.drop()
        broken = bool(jobs) or not isinstance(error, ExecutorClosed)
        if transport is not None and (broken or (self.options.watch and self._tags)):
            transport.abort()  # before callers go on: it may still write to their buckets
        for job in jobs:
            job.future.set_exception(error)  # type: ignore[arg-type] # torch types it as a value
