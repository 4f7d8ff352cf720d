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

[Note: a peer that is gone] When a connection ends, gloo fails the operations that have not begun,
but not the one whose bytes are moving: that one waits for its time-out, half an hour by default. On
a slow link such messages take most of a step. So a watch per peer, from the first message to or
from it on, waits for one that nobody sends. When its wait ends, a message from or to that peer for
which a waiter waits, now and still LOOK seconds later, will never come. Unfinished messages alone
prove nothing: a peer may have ended well, with all its messages here or on their way. A native
reduce may still be on its way through other ranks, which takes as long as their links do: it has
REDUCE_LOOKS, or any time if the peer is known to have done its part.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeAlias, cast

import torch

from casync.building.tasks import Recv, Reduce, ReduceRound, Send, Task
from casync.memory import Memory
from casync.runtime.lanes import Job, Progress
from casync.runtime.prepared import Channel
from casync.shutdown import start_thread
from casync.transports import Handle, Transport

__all__ = ["Communication", "ThreadLanes"]

_SENDS: Channel = ("sent", 0, 0)  # only a job's end waits for its sends: one waiter, once per job
LOOK = 2.0  # seconds in which a waiter takes an arrived message, on any busy machine
REDUCE_LOOKS = 10
_EVER = 1e9  # seconds

Posted: TypeAlias = tuple[Job, int, Handle, float]  # job, task, handle, time


def spawn(run: Callable[[], None], name: str, memory: Memory) -> threading.Thread:
    """Start a thread with the memory's device as its current one.

    A new thread begins with the machine's first device, on which each process would make a context.
    Denormal numbers are kept, whatever the caller's thread does: otherwise ranks would decode
    payloads to different bits.
    """

    def there() -> None:
        torch.set_flush_denormal(False)
        with memory.current():
            run()

    return start_thread(there, f"casync-{name}")


class _Waiter:
    """Waits for posted operations, in order. `current`: the present one, or None."""

    def __init__(self, progress: Progress, name: str, memory: Memory) -> None:
        self.current: Posted | None = None
        self._progress = progress
        self._queue: SimpleQueue[Sequence[Posted] | None] = SimpleQueue()
        self.put = self._queue.put
        self._thread = spawn(self._run, name, memory)

    def stop(self) -> None:
        self._queue.put(None)

    def join(self, patience: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)

    def _run(self) -> None:
        while (posted := self._queue.get()) is not None:
            for self.current in posted:
                if not self._progress.ended.is_set():
                    self._finish(*self.current)
            self.current = None
            del posted  # an idle waiter must not keep the last job's bucket alive

    def _finish(self, job: Job, index: int, handle: Handle, begin: float) -> None:
        """Wait for an operation, take what has arrived, and tell the executor."""
        task, options = job.tasks[index], self._progress.options
        try:
            with options.span(job.prepared.spans[index]):
                received = handle.wait(job.timeout)
            if options.delay is not None:
                options.delay(task.text())
            if isinstance(task, Recv):
                slot = job.prepared.payloads.messages[index]
                job.identity.check(task.payload, slot.identity)  # before anything is decoded
                slot.take_message(received)
            self._progress.done(job, (index,), begin)
        except Exception as error:
            self._progress.failed(job, index, error)


class Communication:
    """The communication lane and its waiters."""

    def __init__(self, progress: Progress, memory: Memory, transport: Transport) -> None:
        self._progress, self._memory, self._transport = progress, memory, transport
        self._queue: SimpleQueue[Job | tuple[Job, int] | None] = SimpleQueue()
        #: a job, whose receives are posted at once; or a send or reduce that is ready
        self.put: Callable[[Job | tuple[Job, int]], None] = self._queue.put
        self._waiters: dict[Channel, _Waiter] = {}
        self._thread = spawn(self._run, "communication", memory)
        self._watches: dict[int, threading.Thread] = {}  # by peer, of those with messages

    def close(self, patience: float) -> None:
        """Stop the threads."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)
        for waiter in list(self._waiters.values()):
            waiter.stop()
        end = time.monotonic() + patience
        for waiter in list(self._waiters.values()):
            waiter.join(max(0.0, end - time.monotonic()))
        for thread in list(self._watches.values()):
            if threading.current_thread() is not thread:
                thread.join(max(0.0, end - time.monotonic()))
        self._watches.clear()

    def _run(self) -> None:
        """The posting thread: a starting job's receives at once, sends and reduces in their turn.

        Their order is that of the program, on each lane, whichever gets ready first: the peer has
        posted its receives in that order.
        """
        turns: dict[Channel, deque[tuple[Job, int]]] = defaultdict(deque)
        while (item := self._queue.get()) is not None:
            if self._progress.ended.is_set():
                turns.clear()
            elif isinstance(item, Job):
                for index, channel in enumerate(item.prepared.channels):
                    if isinstance(item.tasks[index], Recv):
                        self._post(item, index)
                    elif channel is not None:
                        turns[channel].append((item, index))
            else:
                job, index = item
                job.ready.add(index)
                turn = turns[cast(Channel, job.prepared.channels[index])]
                while turn and turn[0][1] in turn[0][0].ready:
                    job, index = turn.popleft()
                    self._post(job, index)
                del job
            del item  # an idle lane must not keep the last job's bucket alive

    def _post(self, job: Job, index: int) -> None:
        """Post an operation, and hand it to its waiter: a thread, which an ending interpreter
        cannot start."""
        begin, task, prepared = time.perf_counter(), job.tasks[index], job.prepared
        delay, slot = self._progress.options.delay, prepared.payloads.messages[index]
        try:
            if delay is not None:
                delay(f"post {task.text()}")
            peers: Sequence[int]
            if isinstance(task, Recv):
                peers = (task.peer,)
                handle = self._transport.post_recv(slot.clear(), task.peer, task.channel)
            elif isinstance(task, Send):
                peers = (task.peer,)
                message = slot.message(job.identity.of(task.payload))
                handle = self._transport.post_send(message, task.peer, task.channel)
            else:
                assert isinstance(task, Reduce)
                peers = task.ranks
                op = task.op if isinstance(task, ReduceRound) else "sum"
                view = prepared.payloads.reduce_view(task, job.bucket)
                handle = self._transport.post_reduce(view, task.ranks, op)
            self._watch(peers)
            channel, posted = prepared.channels[index], [(job, index, handle, begin)]
            if isinstance(task, Send):  # its job's waiter gets all of them at once
                job.sent.append((index, handle, begin))
                if len(job.sent) < prepared.sends:
                    return
                channel, posted = _SENDS, [(job, *sent) for sent in job.sent]
            assert channel is not None
            if channel not in self._waiters:
                name = "-".join(map(str, channel))
                self._waiters[channel] = _Waiter(self._progress, name, self._memory)
            self._waiters[channel].put(posted)
        except Exception as error:
            self._progress.failed(job, index, error)

    def _watch(self, peers: Sequence[int]) -> None:
        """Watch those peers of an operation that are not watched yet: on a ring or a tree these are
        few, however many ranks there are."""
        own = self._transport.rank
        for peer in peers if self._progress.options.watch else ():
            if peer != own and peer not in self._watches:
                run = partial(watch, self._progress, self._transport, peer, self._waiting)
                self._watches[peer] = spawn(run, f"watch-{peer}", self._memory)

    def _waiting(self, peer: int) -> list[Posted]:
        """Operations that involve the peer and whose waiters wait now."""
        current = [waiter.current for waiter in list(self._waiters.values())]
        return [item for item in current if item and peer in _peers(item[0].tasks[item[1]])]


def _peers(task: Task) -> Sequence[int]:
    """Ranks of a message or reduce."""
    return task.ranks if isinstance(task, Reduce) else (cast(Send | Recv, task).peer,)


class ThreadLanes:
    """A compute lane, a communication lane and its waiters. Implements Lanes."""

    def __init__(self, progress: Progress, memory: Memory, transport: Transport) -> None:
        self._progress = progress
        self._communication = Communication(progress, memory, transport)
        self._ready: list[tuple[bool, int, int, Job]] = []  # a heap: the most urgent task first
        self._changed = threading.Condition()
        self._open = True
        self._thread = spawn(self._compute, "compute", memory)

    def start(self, job: Job) -> None:
        self._communication.put(job)

    def issue(self, job: Job, ready: Sequence[int]) -> None:
        for index in ready:
            task = job.tasks[index]
            if isinstance(task, Send | Reduce):
                self._communication.put((job, index))
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


def watch(
    progress: Progress, transport: Transport, peer: int, waiting: Callable[[int], list[Posted]]
) -> None:
    """Watch a peer, in a thread that ends after the executor and its connections. waiting: returns
    the operations that involve a peer and whose waiters wait now."""
    try:
        transport.watch(peer).wait(_EVER)
    except Exception as error:
        _look(progress, waiting, peer, error)


def _look(
    progress: Progress, waiting: Callable[[int], list[Posted]], peer: int, error: Exception
) -> None:
    """Fail an operation that waits for the peer, and still does at later looks."""
    looks: list[tuple[Posted, int]] = []  # operations, and earlier looks that found them waiting
    while not progress.ended.wait(LOOK):
        now = waiting(peer)
        looks = [(one, sum(count + 1 for other, count in looks if other is one)) for one in now]
        for (job, index, *_), count in looks:
            reduce = isinstance(job.tasks[index], Reduce)
            if reduce and progress.options.finished(peer):
                continue
            if count >= (REDUCE_LOOKS if reduce else 1):
                progress.failed(job, index, error)
                return
