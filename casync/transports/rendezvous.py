"""A transport without tags, in memory: what NCCL asks of a program, for tests and proofs.

Ranks are threads of one process. What a rank gives to one call of `exchange` is a group; the call
returns when every member has met its counterparts. Messages between two ranks meet by their order
alone, so do reduces over the same ranks, and all sides must give as many bytes. Where all ranks
wait for each other, each is told what every rank is blocked in.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from casync.errors import DeadlockError, PeerTimeout, copy_to_raise
from casync.transports import Transfer

__all__ = ["Endpoint", "Meeting"]

_Key: TypeAlias = tuple[str, tuple[int, ...]]  # what meets, and whose: (source, target) of messages


@dataclass
class _Group:
    """A call of `exchange` under way."""

    rank: int
    transfers: Sequence[Transfer]
    left: int  # members that have not met theirs


class Meeting:
    """Where all ranks of a world meet. Each uses it from a thread of its own."""

    def __init__(self, world_size: int, timeout: float = 300.0) -> None:
        """`timeout`: seconds that a rank waits for one that is neither blocked nor gone."""
        self.bytes: Counter[tuple[int, int]] = Counter()  # sent so far, by source and target
        self.world_size, self._timeout = world_size, timeout
        self._changed = threading.Condition()
        self._queues: dict[_Key, dict[int, deque[tuple[Transfer, _Group]]]]
        self._queues = defaultdict(lambda: defaultdict(deque))
        self._blocked: dict[int, _Group] = {}
        self._gone: dict[int, str] = {}
        self._error: DeadlockError | None = None

    def endpoints(self) -> list[Endpoint]:
        """A transport per rank."""
        return [Endpoint(self, rank) for rank in range(self.world_size)]

    def exchange(self, rank: int, transfers: Sequence[Transfer]) -> None:
        """Post a group and wait for all of it; raises DeadlockError and PeerTimeout."""
        done = self.post(rank, transfers)
        with self._changed:
            if not self._changed.wait_for(done, self._timeout):
                raise PeerTimeout(f"{self._where(rank)} for {self._timeout:g} s")

    def post(self, rank: int, transfers: Sequence[Transfer]) -> Callable[[], bool]:
        """Post a group; what tells whether it is complete, or raises DeadlockError. Meanwhile the
        rank posts no other."""
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
        """This rank exchanges nothing more: `why` is told to those who wait for it."""
        with self._changed:
            self._blocked.pop(rank, None)
            self._gone[rank] = why
            self._tell_deadlock()

    def _post(self, transfer: Transfer, group: _Group) -> None:
        key = _key(transfer, group.rank)
        queues, message = self._queues[key], key[0] == "message"
        # by end for a message, which a rank may send to itself
        queues[int(transfer.kind == "recv") if message else group.rank].append((transfer, group))
        ends = (0, 1) if message else key[1]
        if all(queues[end] for end in ends):
            self._meet(key, [queues[end].popleft() for end in ends])

    def _meet(self, key: _Key, met: Sequence[tuple[Transfer, _Group]]) -> None:
        transfers = [transfer for transfer, _ in met]
        if len({t.data.nbytes for t in transfers}) > 1:
            sizes = "; ".join(f"`{t.name}` of {t.data.nbytes} bytes" for t in transfers)
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
        """If nobody is left who could post anything."""
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
    """One rank's. See SlotTransport for its members."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.world_size = rank, meeting.world_size
        self._meeting = meeting

    def exchange(self, transfers: Sequence[Transfer]) -> None:
        """See SlotTransport: complete when this returns."""
        self._meeting.exchange(self.rank, transfers)

    def abort(self) -> None:
        self._meeting.leave(self.rank, "gone")

    def close(self) -> None:
        self._meeting.leave(self.rank)


def _key(transfer: Transfer, rank: int) -> _Key:
    if transfer.kind == "reduce":
        return "reduce", transfer.ranks
    peer = transfer.ranks[0]
    return "message", (rank, peer) if transfer.kind == "send" else (peer, rank)


def _reduce(transfers: Sequence[Transfer]) -> None:
    """In rank order, to all."""
    total = transfers[0].data.clone()
    for transfer in transfers[1:]:
        combine = torch.maximum if transfer.op == "max" else torch.add
        combine(total, transfer.data, out=total)
    for transfer in transfers:
        transfer.data.copy_(total)
