"""NCCL through torch.distributed, by process groups apart from DDP's.

torch runs messages on a stream of its own, which first waits for the current one; waiting for the
work makes the current one wait in turn. So casync's stream as the current one keeps the order.

[Note: torch's own error handling] torch's watchdog ends the process if a communicator fails, for
example when a peer dies. Groups made under _ALONE leave that to casync, whose error names rank and
task. If `init_process_group` was given a device, torch splits a group off the default communicator,
which involves all ranks of the job, also those that never heard of the group, and waits for them
for ever. So groups are made as if no device had been given.

[Note: names of groups] torch names such a group by its ranks and the number of existing groups. A
destroyed group's name would come again, and with it, in the store, the old group's address, to
which a rank would connect in vain. So a closed group stays among torch's, without communicators.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from casync.codec import Operation
from casync.errors import TransportError
from casync.nccl import Communicator, Connect

__all__ = ["capturing", "connector"]

#: environment while a group is made: no error handling by torch
_ALONE = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def connector(
    ranks: Sequence[int], timeout: float, device: torch.device, backend: str = "nccl"
) -> Connect:
    """A function that makes groups of some of `ranks`, which are global numbers, ascending.

    timeout: seconds of casync's time-out. torch's own, which ends the process, is longer, so that
    casync's error names rank and task. device: of this rank.
    """
    delay = timedelta(seconds=2 * timeout + 60)

    def connect(some: Sequence[int]) -> Communicator:
        names = [ranks[rank] for rank in some]
        with _unaided():
            group = dist.new_group(
                names, delay, backend, _options(backend), use_local_synchronization=True
            )
            if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
                raise TransportError(f"this rank is not one of {names}")
            # torch requires it: messages among some ranks may not be a group's first call
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        return _Communicator(group)

    return connect


def _options(backend: str) -> Any:
    """Options of a group: NCCL's stream has priority on a busy device, like casync's streams."""
    if backend != "nccl" or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


@contextmanager
def _unaided() -> Iterator[None]:
    """Make groups without torch's error handling: see [Note: torch's own error handling]."""
    before, world = {name: os.environ.get(name) for name in _ALONE}, dist.group.WORLD
    device = getattr(world, "bound_device_id", None)
    os.environ.update(_ALONE)
    if device is not None:
        world.bound_device_id = None  # type: ignore[union-attr]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on an unused time-out of the options
            yield
    finally:
        if device is not None:
            world.bound_device_id = device  # type: ignore[union-attr]
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Communicator:
    """Implements Communicator."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._messages: list[dist.P2POp] = []
        self._sums: list[dist.Work] = []
        self._last: dist.Work | None = None

    @contextmanager
    def group(self) -> Iterator[None]:
        try:
            yield
            works = dist.batch_isend_irecv(self._messages) if self._messages else []
            for work in [*works, *self._sums]:
                work.wait()
                if not capturing():
                    self._last = work  # the event of a captured one must not be queried
        finally:
            self._messages, self._sums = [], []

    def send(self, data: torch.Tensor, peer: int, stream: int) -> None:
        self._messages.append(dist.P2POp(dist.isend, data, group=self._group, group_peer=peer))

    def recv(self, data: torch.Tensor, peer: int, stream: int) -> None:
        self._messages.append(dist.P2POp(dist.irecv, data, group=self._group, group_peer=peer))

    def all_reduce(self, data: torch.Tensor, op: Operation, stream: int) -> None:
        """Implements Communicator.all_reduce. Each is a call: torch groups none in public."""
        work = dist.all_reduce(data, _OPERATIONS[op], self._group, async_op=True)
        assert work is not None  # this rank is in the group
        self._sums.append(work)

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Operation, stream: int) -> None:
        """Implements Communicator.reduce_scatter. torch takes pieces of different lengths."""
        own = pieces[self._group.rank()]
        work = dist.reduce_scatter(own, [*pieces], _OPERATIONS[op], self._group, async_op=True)
        assert work is not None  # this rank is in the group
        self._sums.append(work)

    def failure(self) -> str:
        """The error of the last work, or "". A wait raises it; torch 2.11 cannot convert what
        Work.exception returns, even if there is none."""
        work = self._last
        try:
            if work is not None and work.is_completed():
                work.wait()
        except RuntimeError as error:
            return str(error)
        return ""

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.shutdown()  # and is not destroyed: see [Note: names of groups]


def capturing() -> bool:
    """True if a CUDA graph is being captured from the current stream."""
    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return begun and torch.cuda.is_current_stream_capturing()
