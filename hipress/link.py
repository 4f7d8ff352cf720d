"""Process groups of our own.

Gradients of DDP, the user's collectives and our messages must not come between one another, so
each kind of our traffic has its own connections. They are made from the job's store directly:
`torch.distributed.new_group` must be called by every rank of the world, even by those outside
the group, or else derives the group's name from a count that may differ between ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore

from hipress.agree import Meeting
from hipress.errors import HipressError
from hipress.options import LONGEST


def connect(meeting: Meeting, purpose: str) -> dist.ProcessGroup:
    """A gloo group of the meeting's ranks; it ends when the last reference to it does.

    All ranks of the meeting must call this, within its time-out.
    """
    store = PrefixStore(f"hipress/{meeting.name}/{purpose}", meeting.store)
    delay = timedelta(seconds=meeting.timeout)
    try:
        group = dist.ProcessGroupGloo(store, meeting.rank, len(meeting.ranks), delay)
    except RuntimeError as error:
        told = f"rank {meeting.ranks[meeting.rank]}: no connection between ranks {meeting.ranks}"
        raise HipressError(f"{told} for {purpose}: {error}") from error
    # A backend, which has all the operations of a group that we use.
    return cast(dist.ProcessGroup, group)


def patience(group: dist.ProcessGroup) -> timedelta:
    """How long operations of a group may last on the CPU, as its maker said."""
    try:  # private names: torch has no public ones
        given = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):  # a backend without such options, or none for the CPU
        given = default_pg_timeout
    return min(given, timedelta(seconds=LONGEST))


def slowest(values: list[float], group: dist.ProcessGroup) -> list[float]:
    """The largest of each value over the ranks: the same on every rank."""
    data = torch.tensor(values, dtype=torch.float64)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([data], options).wait()
    return [float(value) for value in data]


def gather(mine: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Everybody's tensor, by rank; all of one shape."""
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([everyone], [mine]).wait()
    return everyone
