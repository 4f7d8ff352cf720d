"""Ways to move bytes between ranks; a module is a transport.

A transport posts operations without blocking and gives handles to wait on. Messages between two
ranks on one channel arrive in the order in which they were sent; so do receives match them. Posts
come from one thread, waits from several.

A transport without tags, such as NCCL's, has groups instead: see SlotTransport.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from casync.codec import Operation

__all__ = ["Handle", "SlotTransport", "Transfer", "Transport", "list_transports"]


class Handle(Protocol):
    """An operation under way."""

    def wait(self, timeout: float) -> int:
        """Block until done; received bytes, or -1 where the transport cannot tell.

        Raises PeerTimeout after `timeout` seconds, TransportError when the peer is gone.
        """
        ...


class Transport(Protocol):
    """One rank's endpoint."""

    @property
    def rank(self) -> int:
        """This endpoint's rank."""
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
        """Combine over `ranks` in place, bit-identical on each of them; posted in one order by all.

        data: of a maximum, without NaN; whole numbers must not overflow. ranks: ascending; this
        endpoint's is one of them.
        """
        ...

    def watch(self, peer: int) -> Handle:
        """A wait that ends with TransportError when the connection to a peer does."""
        ...

    def abort(self) -> None:
        """Break all connections: waits end with TransportError, here and at the peers."""
        ...

    def close(self) -> None:
        """Release the endpoint."""
        ...


@dataclass(frozen=True)
class Transfer:
    """A member of a group."""

    kind: Literal["send", "recv", "reduce"]
    ranks: tuple[int, ...]  # the peer, or all that reduce, in ascending order
    data: torch.Tensor  # flat; overwritten by what is received, or by the sum
    name: str  # for errors
    op: Operation = "sum"


@runtime_checkable
class SlotTransport(Protocol):
    """One rank's endpoint of a transport without tags. See [Note: slots] in graph/tasks.py."""

    @property
    def rank(self) -> int:
        """This endpoint's rank."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def exchange(self, transfers: Sequence[Transfer]) -> Callable[[], bool] | None:
        """Post a group on the stream that is current, behind what is there.

        On a device the host does not wait, and what comes behind it on that stream finds it
        complete. In host memory it is complete when this returns, or, where a function is
        returned, when that says so. Raises TransportError and DeadlockError.
        """
        ...

    def abort(self) -> None:
        """Break all connections: groups end, here and at the peers."""
        ...

    def close(self) -> None:
        """Release the endpoint."""
        ...


def list_transports() -> tuple[str, ...]:
    """Names of all transports, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))
