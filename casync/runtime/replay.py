"""Runs a program on a transport without tags, in the thread that calls. See [Note: slots].

As a stream would: what computes as soon as it may, and the slots in order, each as one group once
all that it sends is there. Messages are as long as their bounds, which both sides know.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from casync.codec import Codec
from casync.errors import DeadlockError
from casync.graph.graph import Program
from casync.graph.tasks import Recv, Reduce, ReduceRound, Send, Task
from casync.runtime.jobs import Job, Prepared, States
from casync.transports import Transfer

__all__ = ["replay"]

Exchange: TypeAlias = Callable[[Sequence[Transfer]], object]


def replay(
    program: Program,
    exchange: Exchange,
    codecs: Mapping[str, Codec],
    bucket: torch.Tensor,
    states: States,
    step: int = 0,
    seed: int = 0,
) -> None:
    """Synchronize `bucket` in place, as Executor.submit does.

    exchange: a SlotTransport's, complete when it returns. Raises DeadlockError where a slot needs
    what travels in a later one, and what a task or `exchange` raises.
    """
    job = Job(0, program, Prepared(program, codecs, seed), bucket, states, step)
    ready = [i for i in job.prepared.first if not _travels(job.tasks[i])]
    for slot, members in _slots(job.tasks):
        _compute(job, ready)
        late = [job.tasks[i].text() for i in members if job.waits[i]]
        if late:
            raise DeadlockError(
                f"rank {program.rank} is at slot {slot} and cannot send `{late[0]}`, which needs "
                "what travels in a later slot",
                tuple(late),
            )
        exchange([_transfer(job, i) for i in members])
        for i in members:
            _arrived(job, i)
            _unlock(job, i, ready)
    _compute(job, ready)


def _travels(task: Task) -> bool:
    return isinstance(task, Send | Recv | Reduce)


def _slots(tasks: Sequence[Task]) -> list[tuple[int, list[int]]]:
    """What travels in each slot, in the order of slots."""
    found: dict[int, list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        if isinstance(task, Send | Recv | Reduce):
            found[task.slot].append(i)
    return sorted(found.items())


def _compute(job: Job, ready: list[int]) -> None:
    """All that may run now, and what becomes ready by it."""
    while ready:
        index = heapq.heappop(ready)
        step = job.prepared.steps[index]
        assert step is not None  # only what travels has none
        step(job)
        _unlock(job, index, ready)


def _unlock(job: Job, index: int, ready: list[int]) -> None:
    for following in job.unlocks[index]:
        job.waits[following] -= 1
        if not job.waits[following] and not _travels(job.tasks[following]):
            heapq.heappush(ready, following)


def _transfer(job: Job, index: int) -> Transfer:
    task, name = job.tasks[index], job.tasks[index].text()
    if isinstance(task, Reduce):
        op = task.op if isinstance(task, ReduceRound) else "sum"
        return Transfer("reduce", task.ranks, job.prepared.reduce_view(job, index), name, op)
    assert isinstance(task, Send | Recv)
    data = job.prepared.slots[index].tensor
    return Transfer("send" if isinstance(task, Send) else "recv", (task.peer,), data, name)


def _arrived(job: Job, index: int) -> None:
    if isinstance(job.tasks[index], Recv):
        slot = job.prepared.slots[index]
        slot.contents = slot.layout.unpack(slot.array)
