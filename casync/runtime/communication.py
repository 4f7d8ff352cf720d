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
from casync.runtime.lanes import Progress
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
                received = handle.wait(options.timeout)
            if options.delay is not None:
                options.delay(task.text())
            if isinstance(task, Recv):
                slot = cast(Slot | StagedSlot, job.prepared.slots[index])
                job.identity.check(task.payload, slot.identity)  # before anything is decoded
                slot.arrived(received)
            self._progress.done(job, (index,), begin)
        except Exception as error:
            self._progress.failed(job, index, error)


class Communication:
    """The communication lane and its waiters."""

    def __init__(self, progress: Progress, memory: Memory, transport: Transport) -> None:
        self._progress, self._memory, self._transport = progress, memory, transport
        self._queue: SimpleQueue[Job | tuple[Job, int] | None] = SimpleQueue()
        self._waiters: dict[_Lane, _Waiter] = {}
        self._thread = spawn(self._run, "communication", memory)
        watches = progress.options.watch
        self._watches = [
            spawn(partial(watch, progress, transport, peer, self._waiting), f"watch-{peer}", memory)
            for peer in (range(transport.world_size) if watches else ())
            if peer != transport.rank
        ]

    def start(self, job: Job) -> None:
        """Post a job's receives and queue its sends; jobs in the same order on all ranks."""
        self._queue.put(job)

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
        """The posting thread: a starting job's receives at once, sends and reduces in their turn.

        Their order is that of the program, on each lane, whichever gets ready first: the peer has
        posted its receives in that order.
        """
        turns: dict[_Lane, deque[tuple[Job, int]]] = defaultdict(deque)
        while (item := self._queue.get()) is not None:
            if self._progress.ended.is_set():
                turns.clear()
            elif isinstance(item, Job):
                for index, task in enumerate(item.tasks):
                    if isinstance(task, Recv):
                        self._post(item, index, task)
                    elif isinstance(task, Send | Reduce):
                        turns[_lane(task)].append((item, index))
            else:
                job, index = item
                job.host.ready.add(index)
                lane = turns[_lane(job.tasks[index])]
                while lane and lane[0][1] in lane[0][0].host.ready:
                    job, index = lane.popleft()
                    self._post(job, index, job.tasks[index])
                del job
            del item  # an idle lane must not keep the last job's bucket alive

    def _post(self, job: Job, index: int, task: Task) -> None:
        """Post an operation, and hand it to its waiter: a thread, which an ending interpreter
        cannot start."""
        begin, run, delay = time.perf_counter(), job.host, self._progress.options.delay
        try:
            if delay is not None:
                delay(f"post {task.text()}")
            handle = self._posted(job, index, task)
            if not isinstance(task, Send):
                self._waiter(_lane(task)).put(((job, index, handle, begin),))
                return
            run.sent.append((index, handle, begin))
            if len(run.sent) == job.prepared.sends:
                self._waiter(_SENDS).put([(job, *sent) for sent in run.sent])
        except Exception as error:
            self._progress.failed(job, index, error)

    def _posted(self, job: Job, index: int, task: Task) -> Handle:
        slot = cast(Slot | StagedSlot, job.prepared.slots[index])
        if isinstance(task, Recv):
            return self._transport.post_recv(slot.clear(), task.peer, task.channel)
        if isinstance(task, Send):
            message = slot.message(job.identity.of(task.payload))
            return self._transport.post_send(message, task.peer, task.channel)
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
            self._waiters[lane] = _Waiter(self._progress, name, self._memory)
        return self._waiters[lane]


def _peers(task: Task) -> Sequence[int]:
    """Ranks of a message or reduce."""
    return task.ranks if isinstance(task, Reduce) else (cast(Send | Recv, task).peer,)


def _lane(task: Task) -> _Lane:
    if isinstance(task, Send | Recv):
        return (task.verb, task.peer, task.channel)
    return (Reduce.verb, 0, 0)  # also of rounds and of some ranks: one order of all
