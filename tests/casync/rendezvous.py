"""A transport without tags, in memory, with NCCL's demands on a program.

Ranks are threads of one process. The transfers of one `exchange` call are a group; the call returns
when every member has met its counterpart. Messages between two ranks match by their order alone, as
do reduces over the same ranks, and all sides must give equally many bytes. If all ranks wait for
each other, each raises an error that lists the block of every rank.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from casync.errors import DeadlockError, PeerTimeout, copy_to_raise
from casync.transports import Member

__all__ = ["Endpoint", "Meeting"]

_Key: TypeAlias = tuple[str, tuple[int, ...]]  # kind, and ranks: (source, target) of messages


@dataclass
class _Group:
    """A call of `exchange` that is not complete."""

    rank: int
    transfers: Sequence[Member]
    left: int  # members without their counterpart


class Meeting:
    """The place where all ranks of a world exchange. Each uses it from a thread of its own."""

    def __init__(self, world_size: int, timeout: float = 300.0) -> None:
        """timeout: seconds that a rank waits for a rank that is neither blocked nor gone."""
        self.bytes: Counter[tuple[int, int]] = Counter()  # sent so far, by source and target
        self.world_size, self._timeout = world_size, timeout
        self._changed = threading.Condition()
        self._queues: dict[_Key, dict[int, deque[tuple[Member, _Group]]]]
        self._queues = defaultdict(lambda: defaultdict(deque))
        self._blocked: dict[int, _Group] = {}
        self._gone: dict[int, str] = {}
        self._error: DeadlockError | None = None

    def endpoints(self) -> list[Endpoint]:
        """A transport per rank."""
        return [Endpoint(self, rank) for rank in range(self.world_size)]

    def exchange(self, rank: int, transfers: Sequence[Member]) -> None:
        """Post a group and wait for all of it; raises DeadlockError and PeerTimeout."""
        done = self.post(rank, transfers)
        with self._changed:
            if not self._changed.wait_for(done, self._timeout):
                raise PeerTimeout(f"{self._where(rank)} for {self._timeout:g} s")

    def post(self, rank: int, transfers: Sequence[Member]) -> Callable[[], bool]:
        """Post a group; return a function that tells if it is complete, or raises DeadlockError.
        The rank must not post another meanwhile."""
        group = _Group(rank, transfers, len(transfers))
        with self._changed:
            self._blocked[rank] = group
            for transfer in transfers:
                self._post(transfer, group)
            self._tell_deadlock()

        def done() -> bool:
            if group.left and self._error is not None:
                raise copy_to_raise(self._error)
            return not group.left

        return done

    def leave(self, rank: int, why: str = "at its end") -> None:
        """End the exchanges of this rank; `why` is told to ranks that wait for it."""
        with self._changed:
            self._blocked.pop(rank, None)
            self._gone[rank] = why
            self._tell_deadlock()

    def _post(self, transfer: Member, group: _Group) -> None:
        key = _key(transfer, group.rank)
        queues, message = self._queues[key], key[0] == "message"
        # by end for a message, since a rank may send to itself
        queues[int(transfer.kind == "recv") if message else group.rank].append((transfer, group))
        ends = (0, 1) if message else key[1]
        if all(queues[end] for end in ends):
            self._meet(key, [queues[end].popleft() for end in ends])

    def _meet(self, key: _Key, met: Sequence[tuple[Member, _Group]]) -> None:
        transfers = [transfer for transfer, _ in met]
        if len({(t.data.nbytes, t.shares) for t in transfers}) > 1:
            sizes = "; ".join(f"`{t.name}` of {_size(t)}" for t in transfers)
            self._end(f"sizes differ: {sizes}")
            return
        if key[0] == "reduce":
            _reduce(transfers)
        else:
            transfers[1].data.copy_(transfers[0].data)
            self.bytes[key[1][0], key[1][1]] += transfers[0].data.nbytes
        for _, group in met:
            group.left -= 1
            if not group.left:
                self._blocked.pop(group.rank, None)
        self._changed.notify_all()

    def _tell_deadlock(self) -> None:
        """End with DeadlockError if no rank is left that could post anything."""
        if self._blocked and len(self._blocked) + len(self._gone) == self.world_size:
            where = [self._where(rank) for rank in range(self.world_size)]
            self._end("no rank can go on: " + "; ".join(where))

    def _where(self, rank: int) -> str:
        if rank in self._gone:
            return f"rank {rank} is {self._gone[rank]}"
        names = [f"`{t.name}`" for t in self._blocked[rank].transfers]
        return f"rank {rank} is blocked in {', '.join(names)}"

    def _end(self, why: str) -> None:
        if self._error is None:
            self._error = DeadlockError(why)
        self._changed.notify_all()


class Endpoint:
    """The endpoint of one rank. Implements SlotTransport."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.world_size = rank, meeting.world_size
        self._meeting = meeting

    def exchange(self, transfers: Sequence[Member]) -> None:
        """Implements SlotTransport.exchange: complete on return."""
        self._meeting.exchange(self.rank, transfers)

    def abort(self) -> None:
        self._meeting.leave(self.rank, "gone")

    def close(self) -> None:
        self._meeting.leave(self.rank)


def _key(transfer: Member, rank: int) -> _Key:
    if transfer.kind == "reduce":
        return "reduce", transfer.ranks
    peer = transfer.ranks[0]
    return "message", (rank, peer) if transfer.kind == "send" else (peer, rank)


def _size(transfer: Member) -> str:
    shares = f" in shares of {list(transfer.shares)}" if transfer.shares else ""
    return f"{transfer.data.nbytes} bytes{shares}"


def _reduce(transfers: Sequence[Member]) -> None:
    """Combine in rank order, and copy to each what it needs of the result."""
    total = transfers[0].data.clone()
    for transfer in transfers[1:]:
        combine = torch.maximum if transfer.op == "max" else torch.add
        combine(total, transfer.data, out=total)
    for place, transfer in enumerate(transfers):
        shares = [*transfer.shares] or [total.numel()]
        needed = place if transfer.shares else 0
        source, target = (torch.split(data, shares) for data in (total, transfer.data))
        target[needed].copy_(source[needed])
