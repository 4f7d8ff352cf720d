"""Executor of programs: takes jobs, returns averaged buckets. See [Note: lanes] in lanes.py."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from casync.memory.identity import Identity, digest_of
from casync.runtime.bad_payload import culprit, found_bad
from casync.runtime.capture import Captures
from casync.runtime.counters import Counters
from casync.runtime.jobs import FLOATS, Job, Jobs, Prepared
from casync.runtime.lanes import Ended, Hooks, Lanes
from casync.runtime.naming import named_error, rank_names
from casync.runtime.pieces import States
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
        *,
        memory: Memory | None = None,
        seed: int = 0,
        timeout: float = 300.0,
        trace: list[TraceEvent] | None = None,
        delay: Callable[[str], None] | None = None,
        span: Callable[[str], AbstractContextManager[object]] = nullcontext,
        ranks: Sequence[int] | None = None,
        watch: bool = False,
        deferred: Mapping[str, Sequence[str]] | None = None,
        checksum: bool = False,
        waits: bool = False,
        capture: bool = False,
        owns: bool = False,
        bulk: bool = True,
        epoch: int = 0,
    ) -> None:
        """Start the lanes.

        Args:
            codecs: looked up when a program's buffers are made.
            memory: of buckets and states; by default the host's. On a device with a transport of
                the host, payloads are staged in pinned memory.
            timeout: seconds that a peer may take.
            trace: gets an event per task and job.
            span: for profilers: called with verb and codec of each task that computes or waits for
                a message, in its thread; the returned context is entered meanwhile.
            ranks: global numbers of the transport's ranks, for errors.
            delay: for tests that expose missing waits: called with the text of each task in its
                lane before the task takes effect.
            owns: close() also closes the transport; otherwise that is up to the caller.
            watch: notice within seconds that a peer is gone, also amid a message. It takes a thread
                per peer, and close() breaks the transport's connections.
            deferred: states, by codec, that wait while the input of an encode is zero; see
                [Note: deferred feedback].
            checksum: send a CRC-32 with every message; a damaged message raises PayloadError. The
                native all-reduce has none.
            waits: without tags, the host may wait within a step for the lengths of payloads; see
                [Note: lengths that vary] in capacity.py.
            capture: launch programs as CUDA graphs if possible; see [Note: capture].
            bulk: tasks share calls of their codecs, see [Note: bulk]; False is for tests.
            epoch: number of this executor among those of its ranks: see [Note: identity].
        """
        self.timeout = timeout
        self.trace = trace
        self._names = rank_names(transport.world_size, ranks)
        self._transport: Transport | SlotTransport | None = transport
        self._memory = memory or HostMemory()
        self._tags = not isinstance(transport, SlotTransport)
        self._here = (transport.rank, transport.world_size)
        self._make = partial(
            Prepared, codecs=codecs, seed=seed, deferred=dict(deferred or {}),
            memory=self._memory, tags=self._tags, checksum=checksum, waits=waits, bulk=bulk,
        )  # fmt: skip
        self._owns, self._epoch = owns, epoch
        self._bucket_names: dict[int, str] = {}  # by digest
        self.counters = Counters(transport.world_size)  # live; dataclasses.replace copies
        self._process = os.getpid()  # see [Note: fork] in shutdown.py
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._ended = threading.Event()
        self._watches = watch
        self._prepared: WeakKeyDictionary[Program, Prepared] = WeakKeyDictionary()
        self._jobs = Jobs()
        self._sequence = self._step = 0
        hooks = Hooks(self._done, self._fail, self._idle, self._ended, timeout, delay, span)
        self._lanes: Lanes
        self._streams: StreamLanes | None = None
        if self._memory.host and not isinstance(transport, SlotTransport):
            self._lanes = ThreadLanes(hooks, self._memory, transport, watch)
        else:
            self._lanes = self._streams = StreamLanes(hooks, self._memory, transport, watch)
        self._captures: Captures | None = None
        if capture and self._streams is not None and not self._tags:
            self._captures = Captures(self._memory, self._streams, self.counters)
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
    def failed(self) -> bool:
        """True if an error or close() has ended this executor."""
        return self._error is not None

    def submit(
        self, program: Program, bucket: torch.Tensor, states: States, step: int, name: str = ""
    ) -> torch.futures.Future[torch.Tensor]:
        """Synchronize `bucket` in place; the future's value is the bucket.

        bucket: flat, of float32, float16 or bfloat16; for 16 bits see [Note: 16-bit gradients] in
        pieces.py.
        states: arenas by (codec key, "worker" | "aggregator"), updated in place. Runs of one
        program do not overlap; those of different programs do.
        name: of the bucket, the same on all ranks: see [Note: identity].

        Never wait for this future in a
        callback of another. Raises the error that ended the executor, if any.
        """
        if self._forked:
            raise ExecutorClosed(
                f"rank {self._names[self._here[0]]}: process {os.getpid()} is a fork of "
                f"{self._process}, whose threads and connections it does not have"
            )
        with self._lock:
            self._check(program)
            prepared = self._prepare(program, bucket.dtype)
            if name:
                self._bucket_names[digest_of(name)] = name
            identity = Identity(self._epoch, self._sequence, name, self._bucket_names)
            job = Job(identity, prepared, bucket, states, step)
            self._sequence, self._step = self._sequence + 1, step
            self.counters.jobs += 1
            empty = not job.left  # checked now: a started job may end at any time
            captured = self._captures is not None and self._captures.takes(program, job)
            if not empty and not captured:
                self._begin(job)
        if self._captures is not None and captured:
            issue, complete = partial(self._issue, job), partial(self._complete, job)
            self._captures.run(program, job, issue, complete)
        self._lanes.run()
        if empty:
            job.future.set_result(bucket)
        return job.future

    def _begin(self, job: Job) -> None:
        self._lanes.begin(job)
        self._jobs.add(job)
        self._start()

    def _issue(self, job: Job) -> None:
        """Issue all tasks of a job, to capture them."""
        with self._lock:
            self._begin(job)
        self._lanes.run()
        with self._lock:
            if self._error is not None:
                raise copy_to_raise(self._error)

    def prepare(self, program: Program, dtype: torch.dtype = torch.float32) -> None:
        """Make a program's buffers now rather than in its first submit. dtype: of its buckets."""
        with self._lock:
            self._check(program)
            self._prepare(program, dtype)

    def settle(self, future: torch.futures.Future[torch.Tensor] | None = None) -> None:
        """Wait until the device, if there is one, has done all submitted work.

        Raises errors of the device: a peer's time-out, or a bad payload.

        future: of `submit`, and done: wait for that bucket alone, while others still travel.
        """
        streams = self._streams
        if streams is None:
            return  # futures have told of all work of threads
        if streams.settle(self.timeout, future) and not self._memory.host:
            with self._lock:
                programs = list(self._prepared.values())
            bad = found_bad(programs, self._memory, self._here[0], self._step, self._names)
            if bad is not None:
                self._end(bad)
        if self._error is not None:
            raise copy_to_raise(self._error)

    def abort(self, error: Exception) -> None:
        """End by an error that came before any task could run."""
        self._end(error)

    def close(self) -> None:
        """Stop the threads; jobs under way fail with ExecutorClosed. Does nothing in a fork."""
        if self._forked:
            return
        name = self._names[self._here[0]]
        self._end(ExecutorClosed(f"rank {name}: the executor was closed"))
        self._lanes.close(_PATIENCE)
        transport = self._transport
        self._let_go()
        if self._owns and transport is not None:
            transport.close()

    def _let_go(self) -> None:
        """Forget what refers back to this. In a cycle connections would live on until Python's
        collector finds them, maybe in a forked child, where their threads are missing."""
        self._lanes, self._streams, self._captures = Ended(), None, None
        self._transport = None

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    def _check(self, program: Program) -> None:
        if self._error is not None:
            raise copy_to_raise(self._error)
        if (program.rank, program.world_size) != self._here:
            raise PlanError(
                f"a program for rank {program.rank} of {program.world_size} "
                f"on rank {self._here[0]} of {self._here[1]}"
            )

    def _prepare(self, program: Program, dtype: torch.dtype) -> Prepared:
        if program not in self._prepared:
            known = dtype if dtype in FLOATS else torch.float32
            self._prepared[program] = self._make(program, known)
        return self._prepared[program]

    def _start(self) -> None:
        """Start the jobs that may start now."""
        for job in self._jobs.startable():
            self.counters.bytes_unused = job.prepared.adapt(self.counters.bytes_unused)
            self._lanes.start(job)
            for index in job.prepared.first:
                self._lanes.put(job, index)

    def _idle(self, seconds: float) -> None:
        """Implements Hooks.on_idle. Called when work has come, so a job is under way now."""
        with self._lock:
            self.counters.wait_seconds += min(seconds, self._jobs.seconds())

    def _done(self, job: Job, indices: Sequence[int], begin: float) -> None:
        """Implements Hooks.on_done."""
        end = time.perf_counter()
        with self._lock:
            if self._error is not None:
                return
            for index in indices:
                if self.trace is not None:
                    self.trace.append(TraceEvent(job.sequence, job.tasks[index], begin, end))
                self.counters.count(job, index, end - begin)
                for ready in job.done(index):
                    self._lanes.put(job, ready)
            over = not job.left
            if over:
                self._over(job, end)
        self._lanes.run()
        if over and not job.taken:
            self._lanes.complete(job, partial(self._complete, job))

    def _over(self, job: Job, end: float) -> None:
        """All of a job was done, or issued."""
        self._jobs.end(job)
        self.counters.job_seconds += end - job.started
        if self.trace is not None:
            self.trace.append(TraceEvent(job.sequence, None, job.started, end))
        self._lanes.end(job)
        self._start()

    def _complete(self, job: Job) -> None:
        try:
            job.future.set_result(job.bucket)
        except Exception:  # of a done-callback; it must not end a lane
            _log.exception("a callback of the bucket's future raised")

    def _fail(self, job: Job, index: int, error: Exception) -> None:
        """Implements Hooks.on_error."""
        if isinstance(error, TransportAborted):
            self._ended.wait(_ECHO)
        task = culprit(job.prepared, index, self._memory, job.inputs.step)
        source = job.prepared.payloads.by_payload[task.payload].source
        named = named_error(error, task, job.inputs.step, source, self._names)
        if not isinstance(error, TransportError | DeadlockError):  # whose texts are complete
            named.__cause__ = error
        self._end(named)

    def _end(self, error: Exception) -> None:
        if self._forked:
            return
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            self._ended.set()
            jobs = self._jobs.clear()
        self._lanes.drop()
        broken = bool(jobs) or not isinstance(error, ExecutorClosed)
        if self._transport is not None and (broken or (self._watches and self._tags)):
            self._transport.abort()  # before callers go on: it may still write to their buckets
        for job in jobs:
            job.future.set_exception(error)  # type: ignore[arg-type] # torch types it as a value
