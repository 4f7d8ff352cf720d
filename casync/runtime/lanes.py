"""The executor's threads.

[Note: lanes] One compute lane runs encodes, decodes and merges, the most urgent ready one first:
what another rank waits for, then in job order. One communication lane posts, and never blocks:
receives when a job starts, sends and reduces when ready, FIFO per peer and channel. So the order
is the same on both sides, whatever the order in which payloads got ready. Waiters block on what
was posted, one per peer and channel, in that order; they cost nothing while they wait.

Fewer threads were tried. One waiter for all would need an answer to "which is done": gloo gives
none for messages (is_completed() stays False until wait(), get_future() is not implemented, and a
wait that times out breaks all connections). A second message to recv_anysource, as a bell, costs
more than it saves: 64 KB to and fro take 175 microseconds, 210 with a waiter's wake-up, 250 with
bells. Posting in the thread that makes a task ready keeps submit, and so the backward pass, for 0.3
to 3 ms instead of 0.1; where only sends were posted so, bench.tasks found nothing gained.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Protocol, TypeAlias

from casync.graph.tasks import Recv, Reduce, ReduceRound, Send, Task
from casync.runtime.jobs import Job
from casync.runtime.watch import Posted, Watch
from casync.transports import Handle, Transport

__all__ = ["Communication", "Compute", "Owner"]

_Lane: TypeAlias = tuple[str, int, int]
_SENDS: _Lane = ("sent", 0, 0)  # only a job's end waits for its sends: one waiter, once a job


class Owner(Protocol):
    """What lanes ask of the executor."""

    timeout: float
    delay: Callable[[str], None] | None
    span: Callable[[str], AbstractContextManager[object]]

    def finish(self, job: Job, index: int, begin: float) -> None:
        """A task is done."""
        ...

    def fail(self, job: Job, index: int, error: Exception) -> None:
        """A task broke."""
        ...

    def idle(self, seconds: float) -> None:
        """The compute lane had nothing to do."""
        ...

    @property
    def failed(self) -> bool:
        """Whether a task broke."""
        ...

    def ends(self, seconds: float) -> bool:
        """Whether the executor ends within so many seconds, or has ended."""
        ...


def _spawn(run: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=run, name=f"casync-{name}", daemon=True)
    thread.start()
    return thread


def _let_go(lane: object, thread: threading.Thread) -> None:
    """Forget what a lane that has ended no longer needs. In a cycle connections would live on until
    Python's collector finds them, maybe in a forked child, where their threads are missing."""
    if not thread.is_alive():
        vars(lane).pop("_owner", None)
        vars(lane).pop("_transport", None)


class Compute:
    """The compute lane."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._ready: list[tuple[bool, int, int, Job]] = []
        self._changed = threading.Condition()
        self._open = True
        self._thread = _spawn(self._run, "compute")

    def put(self, job: Job, index: int) -> None:
        """Run a ready task, in order of urgency, job and position."""
        with self._changed:
            key = (not job.prepared.urgent[index], job.sequence, index, job)
            heapq.heappush(self._ready, key)
            self._changed.notify()

    def drop(self) -> None:
        """Forget what has not begun."""
        with self._changed:
            self._ready.clear()

    def close(self, patience: float) -> None:
        """Stop the thread."""
        with self._changed:
            self._open = False
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)
        _let_go(self, self._thread)

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
            self._owner.idle(time.perf_counter() - begin)
        return None if item is None else (item[1], item[0])

    def _one(self, job: Job, index: int) -> None:
        step = job.prepared.steps[index]
        try:
            if self._owner.delay is not None:
                self._owner.delay(job.tasks[index].text())
            begin = time.perf_counter()
            if step is not None:
                with self._owner.span(job.prepared.spans[index]):
                    step(job)
            self._owner.finish(job, index, begin)
        except Exception as error:
            self._owner.fail(job, index, error)


class _Waiter:
    """Waits for posted operations, in order. `current`: which one, now."""

    def __init__(self, owner: Owner, name: str) -> None:
        self.current: Posted | None = None
        self._owner = owner
        self._queue: SimpleQueue[Sequence[Posted] | None] = SimpleQueue()
        self._thread = _spawn(self._run, name)

    def put(self, posted: Sequence[Posted]) -> None:
        self._queue.put(posted)

    def stop(self) -> None:
        self._queue.put(None)

    def join(self, patience: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)
        _let_go(self, self._thread)

    def _run(self) -> None:
        while (posted := self._queue.get()) is not None:
            self._all(posted)
            del posted  # an idle waiter must not keep the last job's bucket alive

    def _all(self, posted: Sequence[Posted]) -> None:
        for item in posted:
            if not self._owner.failed:
                self.current = item
                self._one(*item)
        self.current = None

    def _one(self, job: Job, index: int, handle: Handle, begin: float) -> None:
        task, slot = job.tasks[index], job.prepared.slots[index]
        try:
            with self._owner.span(job.prepared.spans[index]):
                received = handle.wait(self._owner.timeout)
            if self._owner.delay is not None:
                self._owner.delay(task.text())
            if isinstance(task, Recv):
                slot.arrived(received)
            self._owner.finish(job, index, begin)
        except Exception as error:
            self._owner.fail(job, index, error)


class Communication:
    """The communication lane and its waiters."""

    def __init__(self, owner: Owner, transport: Transport, watch: bool) -> None:
        self._owner = owner
        self._transport = transport
        self._queue: SimpleQueue[tuple[Job, int] | None] = SimpleQueue()
        self._order: dict[_Lane, deque[tuple[Job, int]]] = defaultdict(deque)
        self._waiters: dict[_Lane, _Waiter] = {}
        self._thread = _spawn(self._run, "communication")
        everybody = range(transport.world_size) if watch else ()
        peers = [each for each in everybody if each != transport.rank]
        self._watches = [Watch(owner, transport, peer, self._waiting) for peer in peers]

    def start(self, job: Job) -> None:
        """Post a job's receives and take its sends into the order; jobs in the same order."""
        self._queue.put((job, -1))

    def put(self, job: Job, index: int) -> None:
        """A send or reduce is ready."""
        self._queue.put((job, index))

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
        for watch in self._watches:
            watch.join(max(0.0, end - time.monotonic()))
        self._watches.clear()
        _let_go(self, self._thread)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._owner.failed:
                self._order.clear()
            elif item[1] < 0:
                self._start(item[0])
            else:
                self._ready(*item)
            del item

    def _start(self, job: Job) -> None:
        for index, task in enumerate(job.tasks):
            if isinstance(task, Recv):
                self._post(job, index, task)
            elif isinstance(task, Send | Reduce):
                self._order[_lane(task)].append((job, index))

    def _ready(self, job: Job, index: int) -> None:
        """Post it and what waits behind it, or leave it until it is its turn."""
        job.ready.add(index)
        order = self._order[_lane(job.tasks[index])]
        while order and order[0][1] in order[0][0].ready:
            first, number = order.popleft()
            self._post(first, number, first.tasks[number])

    def _post(self, job: Job, index: int, task: Task) -> None:
        begin = time.perf_counter()
        try:
            if self._owner.delay is not None:
                self._owner.delay(f"post {task.text()}")
            self._await(job, index, self._posted(job, index, task), begin)
        except Exception as error:
            self._owner.fail(job, index, error)

    def _await(self, job: Job, index: int, handle: Handle, begin: float) -> None:
        """Give it to its waiter: a thread, which an interpreter that is ending does not start."""
        task = job.tasks[index]
        if not isinstance(task, Send):
            self._waiter(_lane(task)).put(((job, index, handle, begin),))
            return
        job.sent.append((index, handle, begin))
        if len(job.sent) == job.prepared.sends:
            self._waiter(_SENDS).put([(job, *sent) for sent in job.sent])

    def _posted(self, job: Job, index: int, task: Task) -> Handle:
        slot = job.prepared.slots[index]
        if isinstance(task, Recv):
            return self._transport.post_recv(slot.clear(), task.peer, task.channel)
        if isinstance(task, Send):
            return self._transport.post_send(slot.message(), task.peer, task.channel)
        assert isinstance(task, Reduce)
        op = task.op if isinstance(task, ReduceRound) else "sum"
        return self._transport.post_reduce(job.prepared.reduce_view(job, index), task.ranks, op)

    def _waiting(self, peer: int) -> list[Posted]:
        """The messages from and to a peer for which waiters wait at this moment."""
        current = (waiter.current for waiter in list(self._waiters.values()))
        found = []
        for item in (each for each in current if each is not None):
            task = item[0].tasks[item[1]]
            if isinstance(task, Send | Recv) and task.peer == peer:
                found.append(item)
        return found

    def _waiter(self, lane: _Lane) -> _Waiter:
        if lane not in self._waiters:
            self._waiters[lane] = _Waiter(self._owner, "-".join(map(str, lane)))
        return self._waiters[lane]


def _lane(task: Task) -> _Lane:
    if isinstance(task, Send | Recv):
        return (task.verb, task.peer, task.channel)
    return (Reduce.verb, 0, 0)  # those of rounds and of some ranks, too: one order of all
