"""A transport between threads of one process, for tests and experiments.

`Hub(world_size)` joins the endpoints. Sends copy, so they are done at once.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

import torch

from casync.codec import Operation
from casync.errors import PeerTimeout, TransportAborted, TransportError
from casync.transports import Handle

__all__ = ["Hub", "MemoryTransport"]


class Hub:
    """Mailboxes and sums that the endpoints share, under one condition."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.mail: dict[tuple[int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        self.sums: dict[tuple[Sequence[int], int], dict[int, torch.Tensor]] = defaultdict(dict)
        self.gone: set[int] = set()

    def endpoints(self) -> list[MemoryTransport]:
        """A transport per rank."""
        return [MemoryTransport(self, rank) for rank in range(self.world_size)]


class _Done:
    """The handle of a send, which was copied when posted."""

    def wait(self, timeout: float) -> None:
        """Implements Handle.wait."""


class _Waiting:
    """A handle that retries until the hub has the data, the peer is gone, or time is up."""

    def __init__(
        self, hub: Hub, rank: int, peers: set[int], attempt: Callable[[], int | None], what: str
    ) -> None:
        self._hub = hub
        self._rank = rank
        self._ranks = peers | {rank}
        self._attempt = attempt
        self._what = what

    def wait(self, timeout: float) -> int:
        """Implements Handle.wait."""
        result: list[int] = []

        def ready() -> bool:
            value = self._attempt()
            result.extend([] if value is None else [value])
            return value is not None or bool(self._hub.gone & self._ranks)

        with self._hub.changed:
            if not self._hub.changed.wait_for(ready, timeout):
                raise PeerTimeout(f"{self._what} timed out after {timeout:g} s")
        gone = self._hub.gone & self._ranks
        if not result and self._rank in gone:
            raise TransportAborted(f"{self._what} failed: closed by this rank")
        if not result:
            raise TransportError(f"{self._what} failed: closed by rank {min(gone)}")
        return result[0]


class MemoryTransport:
    """An endpoint of a Hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._reduces: Counter[Sequence[int]] = Counter()  # number so far, by group

    @property
    def rank(self) -> int:
        """This endpoint's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of endpoints."""
        return self._hub.world_size

    def post_send(self, data: torch.Tensor, peer: int, channel: int) -> Handle:
        """Implements Transport.post_send."""
        with self._hub.changed:
            if self._hub.gone & {peer, self._rank}:
                raise TransportError(f"send to rank {peer} failed: closed")
            self._hub.mail[self._rank, peer, channel].append(data.clone())
            self._hub.changed.notify_all()
        return _Done()

    def post_recv(self, data: torch.Tensor, peer: int, channel: int) -> Handle:
        """Implements Transport.post_recv."""
        with self._hub.changed:  # two threads may ask for a new mailbox: both must get the same
            box = self._hub.mail[peer, self._rank, channel]

        def attempt() -> int | None:
            if not box:
                return None
            message = box.popleft()
            room = min(len(message), len(data))
            data[:room] = message[:room]
            return len(message)

        return _Waiting(self._hub, self._rank, {peer}, attempt, f"recv from rank {peer}")

    def post_reduce(
        self, data: torch.Tensor, ranks: Sequence[int], op: Operation = "sum"
    ) -> Handle:
        """Implements Transport.post_reduce; the sum runs in rank order."""
        group = tuple(ranks)
        number = self._reduces[group]
        self._reduces[group] += 1
        with self._hub.changed:
            terms = self._hub.sums[group, number]
            terms[self._rank] = data.clone()
            if len(terms) == len(group):  # waiting ranks hold a reference
                del self._hub.sums[group, number]
            self._hub.changed.notify_all()

        def attempt() -> int | None:
            if len(terms) < len(group):
                return None
            data.copy_(terms[group[0]])
            for term in (terms[rank] for rank in group[1:]):
                torch.maximum(data, term, out=data) if op == "max" else data.add_(term)
            return -1

        what = f"all-reduce with ranks {list(group)}"
        return _Waiting(self._hub, self._rank, set(group), attempt, what)

    def watch(self, peer: int) -> Handle:
        """Implements Transport.watch."""
        what = f"connection to rank {peer}"
        return _Waiting(self._hub, self._rank, {peer}, lambda: None, what)

    def abort(self) -> None:
        """Leave the hub: this rank's waits, and waits for this rank, fail."""
        with self._hub.changed:
            self._hub.gone.add(self._rank)
            self._hub.changed.notify_all()

    def close(self) -> None:
        """Implements Transport.close: the same as abort."""
        self.abort()
