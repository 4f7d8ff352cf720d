"""Detection of lost peers.

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

from collections.abc import Callable
from typing import TypeAlias

from casync.building.tasks import Reduce
from casync.runtime.lanes import Job, Progress
from casync.transports import Handle, Transport

__all__ = ["Posted", "watch"]

LOOK = 2.0  # seconds in which a waiter takes an arrived message, on any busy machine
REDUCE_LOOKS = 10
_EVER = 1e9  # seconds

Posted: TypeAlias = tuple[Job, int, Handle, float]  # job, task, handle, time


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
