"""Who notices that a peer is gone.

[Note: a peer that is gone] When a connection ends, gloo tells the operations that have not begun,
but not the one whose bytes are moving: that one waits for its time-out, half an hour by default.
On a slow link most of a step is such messages. So a watch per peer waits for a message that nobody
sends. When its wait ends, a message from or to that peer for which a waiter waits, now and still
LOOK seconds later, will never come. That there are unfinished ones means nothing: a peer may have
ended well, and all that it owed is here or on its way. Of a native reduce that may be on its way
through other ranks, which takes as long as their links do: it has REDUCE_LOOKS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from casync.graph.tasks import Reduce
from casync.runtime.jobs import Job
from casync.runtime.lanes import Owner
from casync.transports import Handle, Transport

__all__ = ["Posted", "watch"]

LOOK = 2.0  # seconds in which a waiter gets to what has arrived, however busy the machine
REDUCE_LOOKS = 10
_EVER = 1e9  # seconds

Posted: TypeAlias = tuple[Job, int, Handle, float]  # job, position of the task; the last: when


def watch(
    owner: Owner, transport: Transport, peer: int, waiting: Callable[[int], list[Posted]]
) -> None:
    """Runs in a thread of its own, which ends after the executor and its connections. `waiting`:
    gives what travels from, to or with a peer, and has waiters just now."""
    try:
        transport.watch(peer).wait(_EVER)
    except Exception as error:
        _look(owner, waiting, peer, error)


def _look(
    owner: Owner, waiting: Callable[[int], list[Posted]], peer: int, error: Exception
) -> None:
    """Fail what waits for the peer, and still does at later looks."""
    looks: list[tuple[Posted, int]] = []  # before
    while not owner.ends(LOOK):
        now = waiting(peer)
        looks = [(one, sum(count + 1 for other, count in looks if other is one)) for one in now]
        for (job, index, *_), count in looks:
            if count >= (REDUCE_LOOKS if isinstance(job.tasks[index], Reduce) else 1):
                owner.fail(job, index, error)
                return
