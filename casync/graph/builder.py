"""What a strategy builds with: tasks whose waits are derived from the data they touch.

A strategy never names a dependency. The builder knows, per rank, which task last wrote and which
tasks read a part's piece of the bucket, and which task makes a payload available; so a missing
wait cannot be written. A send and its recv are made together, in one global order, so both sides
see the messages of a channel in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from casync.codec import Operation
from casync.errors import PlanError
from casync.graph.plan import Part
from casync.graph.tasks import (
    Decode,
    DecodeRounds,
    Encode,
    EncodeRound,
    Merge,
    Recv,
    Reduce,
    ReduceRound,
    Send,
    Side,
    Task,
)

__all__ = ["Builder"]


class Builder:
    """Collects the tasks of all ranks. `tasks` and `after` (waits, by position) are the result."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.tasks: list[Task] = []
        self.after: list[tuple[int, ...]] = []
        self._payloads = 0
        self._available: dict[tuple[int, int], int] = {}  # (rank, payload) -> task
        self._writer: dict[tuple[int, int], int] = {}  # (rank, part) -> task
        self._readers: dict[tuple[int, int], list[int]] = {}  # since that write

    def encode(
        self, rank: int, part: Part, side: Side, *, average: bool = False, writeback: bool = False
    ) -> int:
        """Encode the rank's bucket piece; returns the new payload's number."""
        payload = self._payloads
        self._payloads += 1
        task = Encode(rank, part.id, payload, side, average, writeback)
        touch = self._write if writeback else self._read
        self._available[rank, payload] = touch(task, ())
        return payload

    def decode(self, rank: int, part: Part, payload: int) -> None:
        """Overwrite the rank's bucket piece by the payload."""
        self._write(Decode(rank, part.id, payload), (self._get(rank, payload),))

    def merge(self, rank: int, part: Part, payload: int) -> None:
        """Add the payload to the rank's bucket piece."""
        self._write(Merge(rank, part.id, payload), (self._get(rank, payload),))

    def send(self, payload: int, part: Part, source: int, target: int, *, channel: int) -> None:
        """Move a payload, unchanged, from one rank to another."""
        send = Send(source, part.id, payload, target, channel)
        at = self._add(send, (self._get(source, payload),))
        recv = Recv(target, part.id, payload, source, channel)
        self._available[target, payload] = self._add(recv, (at,))

    def reduce(self, part: Part, payloads: Sequence[int]) -> None:
        """Sum the payloads (one per rank) over all ranks; each rank's becomes the sum."""
        after = [self._get(rank, payload) for rank, payload in enumerate(payloads)]
        for rank, payload in enumerate(payloads):
            at = self._add(Reduce(rank, part.id, payload), after)
            self._available[rank, payload] = at
            if part.codec is None:
                self._writer[rank, part.id] = at

    def encode_round(self, rank: int, part: Part, number: int, before: Sequence[int]) -> int:
        """Encode a round from the bucket piece and the summed payloads of those before it."""
        payload = self._payloads
        self._payloads += 1
        after = [self._get(rank, earlier) for earlier in before]
        task = EncodeRound(rank, part.id, payload, "worker", False, False, number)
        self._available[rank, payload] = self._read(task, after)
        return payload

    def reduce_round(self, part: Part, payloads: Sequence[int], number: int, op: Operation) -> None:
        """Combine a round's payloads (one per rank); each rank's becomes what they combine to."""
        after = [self._get(rank, payload) for rank, payload in enumerate(payloads)]
        for rank, payload in enumerate(payloads):
            at = self._add(ReduceRound(rank, part.id, payload, number, op), after)
            self._available[rank, payload] = at

    def decode_rounds(self, rank: int, part: Part, payloads: Sequence[int]) -> None:
        """Overwrite the rank's bucket piece by what the sums of all rounds give."""
        after = [self._get(rank, payload) for payload in payloads]
        self._write(DecodeRounds(rank, part.id, payloads[-1]), after)

    def _get(self, rank: int, payload: int) -> int:
        if (rank, payload) not in self._available:
            raise PlanError(f"rank {rank} uses payload {payload} before it has it")
        return self._available[rank, payload]

    def _read(self, task: Task, after: Iterable[int]) -> int:
        key = (task.rank, task.part)
        writer = [self._writer[key]] if key in self._writer else []
        at = self._add(task, (*after, *writer))
        self._readers.setdefault(key, []).append(at)
        return at

    def _write(self, task: Task, after: Iterable[int]) -> int:
        key = (task.rank, task.part)
        writer = [self._writer[key]] if key in self._writer else []
        at = self._add(task, (*after, *writer, *self._readers.pop(key, ())))
        self._writer[key] = at
        return at

    def _add(self, task: Task, after: Iterable[int]) -> int:
        self.tasks.append(task)
        self.after.append(tuple(sorted(set(after))))
        return len(self.tasks) - 1
