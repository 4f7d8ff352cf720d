"""Transports move bytes between ranks; each module is one.

A transport posts operations without blocking and returns handles to wait on. Messages between two
ranks on one channel arrive, and match receives, in the order in which they were sent. Posts come
from one thread, waits from several.

A transport without tags, such as NCCL's, has groups instead: see SlotTransport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from casync.codec import Operation

__all__ = ["Handle", "Member", "SlotTransport", "Transport"]


class Handle(Protocol):
    """An operation under way."""

    def wait(self, timeout: float) -> int | None:
        """Block until done; return the received bytes, or None if the transport cannot tell.

        Raises PeerTimeout after `timeout` seconds, TransportError if the peer is gone.
        """
        ...


class Transport(Protocol):
    """The endpoint of one rank."""

    @property
    def rank(self) -> int:
        """Rank of this endpoint."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def post_send(self, data: torch.Tensor, peer: int, channel: int) -> Handle:
        """Send uint8 [bytes]; `data` must not change until the handle is done."""
        ...

    def post_recv(self, data: torch.Tensor, peer: int, channel: int) -> Handle:
        """Receive into uint8 [room]; the message may be shorter."""
        ...

    def post_reduce(
        self, data: torch.Tensor, ranks: Sequence[int], op: Operation = "sum"
    ) -> Handle:
        """Combine `data` over `ranks` in place, with the same bits on each; all post in one order.

        data: for a maximum, without NaN; integers must not overflow. ranks: ascending, this
        endpoint's included.
        """
        ...

    def watch(self, peer: int) -> Handle:
        """A handle whose wait ends with TransportError when the connection to the peer ends."""
        ...

    def abort(self) -> None:
        """Break all connections: waits end with TransportError, here and at the peers."""
        ...

    def close(self) -> None:
        """Release the endpoint."""
        ...


@dataclass(frozen=True)
class Member:
    """A message or a reduce, as a member of a group."""

    kind: Literal["send", "recv", "reduce"]
    ranks: tuple[int, ...]  # the peer, or all reducing ranks, ascending
    data: torch.Tensor  # flat; overwritten by a receive or a reduce
    name: str  # for errors
    op: Operation = "sum"
    #: elements whose sum each of the reducing ranks needs, in order; () if all need all
    shares: tuple[int, ...] = ()


@runtime_checkable
class SlotTransport(Protocol):
    """The endpoint of one rank on a transport without tags. See [Note: slots] in tasks.py."""

    @property
    def rank(self) -> int:
        """Rank of this endpoint."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def exchange(self, transfers: Sequence[Member]) -> Callable[[], bool] | None:
        """Post a group on the current stream.

        On a device the host does not wait, and later work of that stream finds the group complete.
        In host memory the group is complete on return; if a function is returned, when that returns
        True. Raises TransportError and DeadlockError.
        """
        ...

    def abort(self) -> None:
        """Break all connections: groups end, here and at the peers."""
        ...

    def close(self) -> None:
        """Release the endpoint."""
        ...
