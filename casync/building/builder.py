"""The builder of strategies: adds tasks and derives their waits from the data they touch.

A strategy never names a dependency. The builder knows, per rank, which task last wrote and which
tasks read a part's piece of the bucket, and which task makes a payload available; so a strategy
cannot forget a wait. A send and its recv are made together, in one global order, so both sides see
the messages of a channel in the same order.

[Note: phases] The order over all parts is: the first phase of all parts, the second of all, and so
on. A strategy sets the `phase` of its tasks; transfers of a phase share slots, see [Note: slots] in
tasks.py. A transfer may wait only for transfers of earlier phases.

[Note: own slice] A rank needs only its own tasks of a graph that grows with the square of the world
size. With `only` a builder takes the same calls of a strategy, and drops the tasks of other ranks.
Payloads keep their numbers of the whole graph, if a strategy that mentions a rank's encode of a
part mentions all encodes before it, or gives their number. It should not loop over all ranks: see
`ranks` and `others`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from casync.building.parts import Part
from casync.building.tasks import (
    Decode,
    DecodeRounds,
    Encode,
    EncodeRound,
    Follow,
    Merge,
    Recv,
    Reduce,
    ReduceRound,
    Send,
    Side,
    Task,
)
from casync.codec import Operation
from casync.errors import PlanError

__all__ = ["Builder", "Waits"]

Waits = tuple[tuple[int, ...], ...]  # by task: positions of the tasks that it waits for


class Builder:
    """Collects the tasks of all ranks, or of one. `ordered` is the result."""

    def __init__(
        self, world_size: int, parts: int, only: int | None = None, *, rotates: bool = True
    ) -> None:
        """parts: number of parts. rotates: see `turn`; if False, native collectives inside nodes
        are as fast as messages."""
        self.world_size = world_size
        self.only = only
        self.rotates = rotates
        self.phase = 0  # of the next tasks; starts at 0 for every part
        self._parts = parts
        self._tasks: list[Task] = []
        self._after: list[tuple[int, ...]] = []
        self._keys: list[int] = []  # phase, then part
        self._numbers: dict[tuple[int, int], int] = {}  # (rank, part) -> payloads
        self._codecs: dict[int, str] = {}  # payload -> codec
        self._available: dict[tuple[int, int], int] = {}  # (rank, payload) -> task
        self._writer: dict[tuple[int, int], int] = {}  # (rank, part) -> task
        self._readers: dict[tuple[int, int], list[int]] = {}  # since that write

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks whose tasks are built."""
        return range(self.world_size) if self.only is None else (self.only,)

    def others(self, root: int, ranks: Sequence[int]) -> Sequence[int]:
        """The `ranks`, without `root`, whose exchange with `root` is built."""
        if self.only in (None, root):
            return [rank for rank in ranks if rank != root]
        return [rank for rank in self.ranks if rank in ranks]

    def turn(self, first: int, number: int) -> int:
        """Phase of turn `number`, in which a rank sends to one rank and receives from one.

        Turns have phases of their own, from phase `first` on, so that no link has two messages at a
        time; they share one phase if the transport schedules messages itself. See [Note: slots].
        """
        return first + number if self.rotates else first

    def past(self, first: int, count: int) -> int:
        """The phase after `count` turns."""
        return first + (count if self.rotates else min(count, 1))

    def encode(
        self,
        rank: int,
        part: Part,
        codec: str,
        side: Side,
        *,
        average: bool = False,
        writeback: bool = False,
        number: int | None = None,
    ) -> int:
        """Encode the rank's bucket piece; return the new payload's number.

        number: of earlier encodes of this rank and part, if not all are mentioned.
        """
        payload = self._number(rank, part, codec, number)
        if not self._wants(rank):
            return payload
        task = Encode(rank, part.id, payload, codec, side, average, writeback)
        touch = self._write if writeback else self._read
        self._available[rank, payload] = touch(task, ())
        return payload

    def encode_owned(self, part: Part, *, average: bool) -> int:
        """The owner encodes its bucket piece, and takes over what others decode. average: the piece
        is the sum of all ranks, and is divided by their number."""
        codec = part.down or part.codec
        return self.encode(part.owner, part, codec, "aggregator", average=average, writeback=True)

    def decode(self, rank: int, part: Part, payload: int) -> None:
        """Overwrite the rank's bucket piece by the payload."""
        if self._wants(rank):
            task = Decode(rank, part.id, payload, self._codecs[payload])
            self._write(task, (self._get(rank, payload),))

    def merge(self, rank: int, part: Part, payload: int) -> None:
        """Add the payload to the rank's bucket piece."""
        if self._wants(rank):
            task = Merge(rank, part.id, payload, self._codecs[payload])
            self._write(task, (self._get(rank, payload),))

    def follow(self, rank: int, part: Part, payload: int, peer: int) -> None:
        """Add the payload to the rank's copy of the estimate of `peer`."""
        if self._wants(rank):
            task = Follow(rank, part.id, payload, self._codecs[payload], peer)
            self._add(task, (self._get(rank, payload),))

    def send(self, payload: int, part: Part, source: int, target: int, *, channel: int) -> None:
        """Move a payload, unchanged, from one rank to another."""
        fields = part.id, payload, self._codecs[payload]
        at = None  # unless this send is built
        if self._wants(source):
            send = Send(source, *fields, target, channel, self.phase)
            at = self._add(send, (self._get(source, payload),))
        if self._wants(target):
            recv = Recv(target, *fields, source, channel, self.phase)
            self._available[target, payload] = self._add(recv, (at,))

    def gather(self, part: Part, ranks: Sequence[int], root: int, codec: str) -> list[int]:
        """All other `ranks` encode, as workers, and send to `root`; return payloads, in rank order.

        In each of len(ranks) - 1 turns a rank sends to one rank and receives from one.
        """
        first, count, place = self.phase, len(ranks), ranks.index(root)
        pushed = []
        for rank in self.others(root, ranks):
            self.phase = self.turn(first, (place - ranks.index(rank)) % count - 1)
            pushed.append(self.encode(rank, part, codec, "worker"))
            self.send(pushed[-1], part, rank, root, channel=0)
        self.phase = self.past(first, count - 1)
        return pushed

    def broadcast(self, part: Part, ranks: Sequence[int], root: int, payload: int) -> None:
        """`root` sends a payload to all other `ranks`, which decode it; turns as in `gather`."""
        first, count, place = self.phase, len(ranks), ranks.index(root)
        for rank in self.others(root, ranks):
            self.phase = self.turn(first, (ranks.index(rank) - place) % count - 1)
            self.send(payload, part, root, rank, channel=1)
            self.decode(rank, part, payload)
        self.phase = self.past(first, count - 1)

    def reduce(
        self,
        part: Part,
        payloads: Mapping[int, int],
        ranks: Sequence[int],
        of_round: tuple[int, Operation] | None = None,
        *,
        to: Sequence[int] = (),
    ) -> None:
        """Sum the payloads (by rank) over `ranks`, or combine them by the operator of their round;
        each rank's payload becomes the result. to: the one rank that needs it; by default all."""
        after = [self._get(rank, payload) for rank, payload in payloads.items()]
        for rank, payload in payloads.items():
            where = self.phase, tuple(ranks), tuple(to or ranks)
            fields = rank, part.id, payload, self._codecs[payload], *where
            task = ReduceRound(*fields, *of_round) if of_round else Reduce(*fields)
            self._available[rank, payload] = self._add(task, after)

    def encode_round(self, rank: int, part: Part, number: int, before: Sequence[int]) -> int:
        """Encode a round from the bucket piece and the summed payloads of those before it."""
        payload = self._number(rank, part, part.codec)
        after = [self._get(rank, earlier) for earlier in before]
        task = EncodeRound(rank, part.id, payload, part.codec, "worker", False, False, number)
        self._available[rank, payload] = self._read(task, after)
        return payload

    def decode_rounds(self, rank: int, part: Part, payloads: Sequence[int]) -> None:
        """Overwrite the rank's bucket piece by the decoded sums of all rounds."""
        after = [self._get(rank, payload) for payload in payloads]
        self._write(DecodeRounds(rank, part.id, payloads[-1], part.codec), after)

    def ordered(self) -> tuple[tuple[Task, ...], Waits]:
        """The tasks by phase and part, and the positions of the tasks that each waits for."""
        order = sorted(range(len(self._tasks)), key=self._keys.__getitem__)
        place = [0] * len(order)
        for i, at in enumerate(order):
            place[at] = i
        waits = tuple(tuple(sorted({place[j] for j in self._after[at]})) for at in order)
        for i, before in enumerate(waits):
            if before and before[-1] > i:
                text = self._tasks[order[i]].text()
                raise PlanError(f"`{text}` waits for a task of a later phase")
        return tuple(self._tasks[at] for at in order), waits

    def _number(self, rank: int, part: Part, codec: str, number: int | None = None) -> int:
        """Number of a new payload; see [Note: own slice]."""
        if number is None:
            number = self._numbers.get((rank, part.id), 0)
        self._numbers[rank, part.id] = number + 1
        payload = (number * self._parts + part.id) * self.world_size + rank
        self._codecs[payload] = codec
        return payload

    def _wants(self, rank: int) -> bool:
        return self.only is None or rank == self.only

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

    def _add(self, task: Task, after: Iterable[int | None]) -> int:
        self._tasks.append(task)
        self._after.append(tuple(at for at in after if at is not None))
        self._keys.append(self.phase * self._parts + task.part)
        return len(self._tasks) - 1
