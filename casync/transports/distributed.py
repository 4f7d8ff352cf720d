"""torch.distributed: point-to-point messages and all-reduce; gloo on the CPU.

Use a process group of its own (`DistributedTransport.connect`): gloo closes all connections of a
group when one of its operations times out, and casync relies on that, as the way by which the peers
of a failed rank learn of it. Gloo cannot tell the length of a received message.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

from casync.codec import Operation
from casync.errors import PeerTimeout, TransportAborted, TransportError, fail_future
from casync.shutdown import close_at_exit
from casync.transports import Handle

__all__ = ["DistributedTransport", "break_group", "start_all_reduce", "transport_error"]

Connect: TypeAlias = Callable[[Sequence[int]], dist.ProcessGroup]

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
_TAG = 0x4850  # unlike the tags that a user might choose in the same group
_ABORT_TAG = _TAG - 1
_WATCH_TAG = _TAG - 2
_BREAKS = 0.5  # seconds in which the operations of a broken group end
_OWN_CLOSURE = "Application timeout caused pair closure"  # gloo's text for a rank's other waits


class _WorkHandle:
    """A work of torch.distributed that raises errors of casync."""

    def __init__(self, work: dist.Work, used: object, what: str) -> None:
        """used: an object that must live as long as this, such as the tensor."""
        self._work = work
        self._used = used
        self._what = what

    def wait(self, timeout: float) -> None:
        """Implements Handle.wait; never knows the received length."""
        try:
            self._work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise transport_error(error, self._what, timeout) from None


def transport_error(error: Exception, what: str, timeout: float = 0.0) -> TransportError:
    """An error of torch as a TransportError with the same text. what: the operation that failed."""
    text = str(error)
    if "timed out" in text.lower():
        return PeerTimeout(f"{what} timed out after {timeout:g} s")
    kind = TransportAborted if _OWN_CLOSURE in text else TransportError
    return kind(f"{what} failed: {text}")


class DistributedTransport:
    """An endpoint on a process group. Peers are ranks inside that group."""

    def __init__(self, group: dist.ProcessGroup, connect: Connect) -> None:
        """connect: makes a group of some of this group's ranks; all of them call it, at their first
        reduce among themselves, in the order of their reduces."""
        self._group = group
        self.rank, self.world_size = group.rank(), group.size()  # within the group
        self._connect = connect
        self._some: dict[Sequence[int], dist.ProcessGroup] = {}  # by ranks
        self._owned = False

    @classmethod
    def connect(cls, timeout: float, ranks: list[int] | None = None) -> DistributedTransport:
        """An endpoint on a new gloo group; every rank of the world must call this."""
        delay = timedelta(seconds=timeout)
        group = dist.new_group(ranks, delay, backend="gloo")
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
            raise TransportError("this rank is not in the group")
        names = dist.get_process_group_ranks(group)

        def some(members: Sequence[int]) -> dist.ProcessGroup:
            subgroup: dist.ProcessGroup = dist.new_group(
                [names[rank] for rank in members], delay, "gloo", use_local_synchronization=True
            )
            return subgroup

        transport = cls(group, some)
        transport._owned = True
        return transport

    def post_send(self, data: torch.Tensor, peer: int, channel: int) -> Handle:
        """Implements Transport.post_send."""
        what = f"send to rank {peer}"
        try:
            return _WorkHandle(self._group.send([data], peer, _TAG + channel), data, what)
        except RuntimeError as error:
            raise transport_error(error, what) from None

    def post_recv(self, data: torch.Tensor, peer: int, channel: int) -> Handle:
        """Implements Transport.post_recv."""
        what = f"recv from rank {peer}"
        try:
            return _WorkHandle(self._group.recv([data], peer, _TAG + channel), data, what)
        except RuntimeError as error:
            raise transport_error(error, what) from None

    def post_reduce(
        self, data: torch.Tensor, ranks: Sequence[int], op: Operation = "sum"
    ) -> Handle:
        """Implements Transport.post_reduce."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(_OPERATIONS[op])
        what = f"all-reduce with ranks {list(ranks)}"
        try:
            group = self._group_of(ranks)
            work = group.allreduce([data], options)
        except RuntimeError as error:
            raise transport_error(error, what) from None
        # a group's destructor waits for its reduces, and a reduce with a dead peer never ends
        return _WorkHandle(work, (data, group), what)

    def _group_of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        if len(ranks) == self.world_size:
            return self._group
        if ranks not in self._some:
            self._some[ranks] = self._connect(ranks)
        return self._some[ranks]

    def watch(self, peer: int) -> Handle:
        """Implements Transport.watch."""
        data, what = torch.zeros(1, dtype=torch.uint8, device="cpu"), f"connection to rank {peer}"
        try:
            return _WorkHandle(self._group.recv([data], peer, _WATCH_TAG), data, what)
        except RuntimeError as error:
            raise transport_error(error, what) from None

    def abort(self) -> None:
        """Implements Transport.abort."""
        for group in (self._group, *self._some.values()):
            break_group(group)

    def close(self) -> None:
        """Destroy the groups if `connect` made them."""
        if self._owned and dist.is_initialized():
            self._owned = False
            for group in (self._group, *self._some.values()):
                dist.destroy_process_group(group)


def break_group(group: dist.ProcessGroup) -> None:
    """Fail all operations of a gloo group, here and at its other ranks, now and later.

    An unanswered receive times out: gloo then closes all pairs of the group. One receive from every
    peer: a receive from a peer that is gone fails, and closes nothing.
    """
    data = torch.zeros(1, dtype=torch.uint8, device="cpu")
    for peer in (each for each in range(group.size()) if each != group.rank()):
        with suppress(RuntimeError):
            group.recv([data], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


class _UnderWay:
    """A collective whose future has a callback in Python, which a thread of gloo calls. The
    callback holds it, but not the group, which would end, and join its threads, in one of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._over = weakref.ref(group), threading.Event()
        close_at_exit(self)

    def end(self) -> None:
        """The callback has run."""
        self._over.set()

    def close(self) -> None:
        """Break the group, unless it is over: see [Note: exit] in shutdown.py."""
        group = self._group()
        if group is not None and not self._over.is_set():
            break_group(group)
            self._over.wait(_BREAKS)
            time.sleep(1e-3)  # the thread takes the GIL once more, to drop the callback


def start_all_reduce(
    data: torch.Tensor, group: dist.ProcessGroup, options: dist.AllreduceOptions, what: str
) -> torch.futures.Future[torch.Tensor]:
    """Start an all-reduce in place; the future's value is `data`. Raises TransportError, naming
    `what`. As the interpreter ends, all that are under way fail."""
    reduced: torch.futures.Future[torch.Tensor]
    reduced = torch.futures.Future(devices=[data.device] if data.is_cuda else None)
    under_way = _UnderWay(group)

    def done(future: torch.futures.Future[list[torch.Tensor]]) -> None:
        try:
            reduced.set_result(future.value()[0])
        except Exception as error:
            fail_future(reduced, error)
        finally:
            under_way.end()

    try:
        group.allreduce([data], options).get_future().add_done_callback(done)
    except RuntimeError as error:
        raise transport_error(error, what) from None
    return reduced
