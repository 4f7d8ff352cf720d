"""The communication lane of transports with tags: a posting thread, and waiting threads."""

from __future__ import annotations

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
from casync.memory.slots import Slot, StagedSlot
from casync.runtime.jobs import Job
from casync.runtime.lanes import Hooks
from casync.runtime.watch import Posted, watch
from casync.shutdown import start_thread
from casync.transports import Handle, Transport

__all__ = ["Communication", "spawn"]

_Lane: TypeAlias = tuple[str, int, int]
_SENDS: _Lane = ("sent", 0, 0)  # only a job's end waits for its sends: one waiter, once per job


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

    def __init__(self, hooks: Hooks, name: str, memory: Memory) -> None:
        self.current: Posted | None = None
        self._hooks = hooks
        self._queue: SimpleQueue[Sequence[Posted] | None] = SimpleQueue()
        self._thread = spawn(self._run, name, memory)

    def put(self, posted: Sequence[Posted]) -> None:
        self._queue.put(posted)

    def stop(self) -> None:
        self._queue.put(None)

    def join(self, patience: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(patience)

    def _run(self) -> None:
        while (posted := self._queue.get()) is not None:
            self._all(posted)
            del posted  # an idle waiter must not keep the last job's bucket alive

    def _all(self, posted: Sequence[Posted]) -> None:
        for item in posted:
            if not self._hooks.ended.is_set():
                self.current = item
                self._one(*item)
        self.current = None

    def _one(self, job: Job, index: int, handle: Handle, begin: float) -> None:
        task, slot = job.tasks[index], job.prepared.slots[index]
        try:
            with self._hooks.span(job.prepared.spans[index]):
                received = handle.wait(self._hooks.timeout)
            if self._hooks.delay is not None:
                self._hooks.delay(task.text())
            if isinstance(task, Recv):
                arrived = cast(Slot | StagedSlot, slot)
                job.identity.check(task.payload, arrived.identity)
                arrived.arrived(received)
            self._hooks.on_done(job, (index,), begin)
        except Exception as error:
            self._hooks.on_error(job, index, error)


class Communication:
    """The communication lane and its waiters."""

    def __init__(self, hooks: Hooks, memory: Memory, transport: Transport, watches: bool) -> None:
        self._hooks, self._memory = hooks, memory
        self._transport = transport
        self._queue: SimpleQueue[tuple[Job, int] | None] = SimpleQueue()
        self._order: dict[_Lane, deque[tuple[Job, int]]] = defaultdict(deque)
        self._waiters: dict[_Lane, _Waiter] = {}
        self._thread = spawn(self._run, "communication", memory)
        self._watches = [
            spawn(partial(watch, hooks, transport, peer, self._waiting), f"watch-{peer}", memory)
            for peer in (range(transport.world_size) if watches else ())
            if peer != transport.rank
        ]

    def start(self, job: Job) -> None:
        """Post a job's receives and queue its sends; jobs in the same order on all ranks."""
        self._queue.put((job, -1))

    def put(self, job: Job, index: int) -> None:
        """Post a send or reduce, which is ready."""
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
        for thread in self._watches:
            if threading.current_thread() is not thread:
                thread.join(max(0.0, end - time.monotonic()))
        self._watches.clear()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._hooks.ended.is_set():
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
        """Post a ready task in its turn, and those that are ready behind it."""
        job.ready.add(index)
        order = self._order[_lane(job.tasks[index])]
        while order and order[0][1] in order[0][0].ready:
            first, number = order.popleft()
            self._post(first, number, first.tasks[number])

    def _post(self, job: Job, index: int, task: Task) -> None:
        begin = time.perf_counter()
        try:
            if self._hooks.delay is not None:
                self._hooks.delay(f"post {task.text()}")
            self._await(job, index, self._posted(job, index, task), begin)
        except Exception as error:
            self._hooks.on_error(job, index, error)

    def _await(self, job: Job, index: int, handle: Handle, begin: float) -> None:
        """Hand an operation to its waiter, a thread, which an ending interpreter cannot start."""
        task = job.tasks[index]
        if not isinstance(task, Send):
            self._waiter(_lane(task)).put(((job, index, handle, begin),))
            return
        job.sent.append((index, handle, begin))
        if len(job.sent) == job.prepared.sends:
            self._waiter(_SENDS).put([(job, *sent) for sent in job.sent])

    def _posted(self, job: Job, index: int, task: Task) -> Handle:
        slot = cast(Slot | StagedSlot, job.prepared.slots[index])
        if isinstance(task, Recv):
            return self._transport.post_recv(slot.clear(), task.peer, task.channel)
        if isinstance(task, Send):
            return self._transport.post_send(
                slot.message(job.identity.of(task.payload)), task.peer, task.channel
            )
        assert isinstance(task, Reduce)
        op = task.op if isinstance(task, ReduceRound) else "sum"
        view = job.prepared.payloads.reduce_view(task, job.bucket)
        return self._transport.post_reduce(view, task.ranks, op)

    def _waiting(self, peer: int) -> list[Posted]:
        """Operations that involve the peer and whose waiters wait now."""
        current = [waiter.current for waiter in list(self._waiters.values())]
        return [item for item in current if item and peer in _peers(item[0].tasks[item[1]])]

    def _waiter(self, lane: _Lane) -> _Waiter:
        if lane not in self._waiters:
            name = "-".join(map(str, lane))
            self._waiters[lane] = _Waiter(self._hooks, name, self._memory)
        return self._waiters[lane]


def _peers(task: Task) -> Sequence[int]:
    """Ranks of a message or reduce."""
    return task.ranks if isinstance(task, Reduce) else (cast(Send | Recv, task).peer,)


def _lane(task: Task) -> _Lane:
    if isinstance(task, Send | Recv):
        return (task.verb, task.peer, task.channel)
    return (Reduce.verb, 0, 0)  # also of rounds and of some ranks: one order of all
