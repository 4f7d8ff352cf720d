"""NCCL through torch.distributed: process groups of our own, so communicators apart from DDP's.

torch runs messages on a stream of its own, which first waits for the current one; waiting for the
work makes the current one wait in turn. So with our stream as the current one the order is ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from casync.codec import Operation
from casync.errors import TransportError
from casync.nccl import Communicator, Connect

__all__ = ["connector"]

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def connector(
    ranks: Sequence[int], timeout: float, device: torch.device, backend: str = "nccl"
) -> Connect:
    """Makes groups of some of `ranks`, which are global ones, ascending.

    timeout: seconds of ours. torch ends the process at its own time-out, so that is longer: ours
    tells which rank waited for what. device: of this rank.
    """
    delay = timedelta(seconds=2 * timeout + 60)

    def connect(some: Sequence[int]) -> Communicator:
        names = [ranks[rank] for rank in some]
        group = dist.new_group(names, delay, backend, use_local_synchronization=True)
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
            raise TransportError(f"this rank is not one of {names}")
        # torch asks for it: messages among some ranks may not be a group's first call
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return _Communicator(group)

    return connect


class _Communicator:
    """See Communicator."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._messages: list[dist.P2POp] = []
        self._sums: list[dist.Work] = []

    @contextmanager
    def group(self) -> Iterator[None]:
        try:
            yield
            works = dist.batch_isend_irecv(self._messages) if self._messages else []
            for work in [*works, *self._sums]:
                work.wait()
        finally:
            self._messages, self._sums = [], []

    def send(self, data: torch.Tensor, peer: int, stream: int) -> None:
        self._messages.append(dist.P2POp(dist.isend, data, group=self._group, group_peer=peer))

    def recv(self, data: torch.Tensor, peer: int, stream: int) -> None:
        self._messages.append(dist.P2POp(dist.irecv, data, group=self._group, group_peer=peer))

    def all_reduce(self, data: torch.Tensor, op: Operation, stream: int) -> None:
        """See Communicator. Each is a call of its own, in order: torch groups none in public."""
        work = dist.all_reduce(data, _OPERATIONS[op], self._group, async_op=True)
        assert work is not None  # this rank is in the group
        self._sums.append(work)

    def failure(self) -> str:
        """None that is told: torch's own watchdog looks."""
        return ""

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        dist.destroy_process_group(self._group)
