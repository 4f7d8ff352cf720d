"""Primitives of a synchronization, as frozen tasks with a text form.

CaSync has five: encode, decode, merge, send, recv. `reduce` is the native collective, for payloads
that add without decoding. `merge` is decode-and-add: codecs fuse the two. `follow` adds to a state
instead of the bucket.

A payload has a number and a codec. The encode that makes it gives both; sends, receives and decodes
name them, on whichever rank they run: a payload forwarded unchanged keeps its number.

[Note: slots] Transports without tags, such as NCCL, match messages by their order alone, and a
waiting receive blocks all later operations. So every transfer has a slot, the same on all ranks: a
rank posts the members of a slot as one group, and the groups in the order of slots. An exchange
among all ranks has a slot for each turn, in which a rank sends to one rank and receives from one,
so that no link has two messages at a time; or one slot, if that costs less: see `build`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal, TypeAlias
from urllib.parse import quote

from casync.codec import Operation

__all__ = [
    "SIDES",
    "Decode",
    "DecodeRounds",
    "Encode",
    "EncodeRound",
    "Follow",
    "Joined",
    "JoinedRecv",
    "JoinedReduce",
    "JoinedSend",
    "Merge",
    "Recv",
    "Reduce",
    "ReduceRound",
    "Send",
    "Side",
    "Task",
    "members",
]

Side: TypeAlias = Literal["worker", "aggregator"]
SIDES: tuple[Side, ...] = ("worker", "aggregator")


@dataclass(frozen=True, slots=True)
class _Base:
    verb: ClassVar[str]
    rank: int  # the rank that runs it
    part: int  # Part.id
    payload: int  # number of the payload made, moved or read
    codec: str  # key of the payload's codec

    def text(self) -> str:
        """Text form, such as `send rank=0 part=3 payload=7 codec=topk peer=1 channel=0 slot=2`."""
        pairs = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return " ".join([self.verb, *(f"{key}={_word(value)}" for key, value in pairs)])


@dataclass(frozen=True, slots=True)
class Encode(_Base):
    """Bucket piece -> payload."""

    verb: ClassVar[str] = "encode"
    side: Side  # the side whose state is used
    average: bool  # multiply by 1/world_size when reading
    writeback: bool  # overwrite the bucket piece by decode(payload)


@dataclass(frozen=True, slots=True)
class Decode(_Base):
    """Payload -> bucket piece, overwriting it."""

    verb: ClassVar[str] = "decode"


@dataclass(frozen=True, slots=True)
class Merge(_Base):
    """Payload decoded and added to the bucket piece."""

    verb: ClassVar[str] = "merge"


@dataclass(frozen=True, slots=True)
class Follow(_Base):
    """Payload decoded and added to the copy of its sender's estimate: see estimates.py."""

    verb: ClassVar[str] = "follow"
    peer: int  # the rank that encoded it


@dataclass(frozen=True, slots=True)
class Send(_Base):
    """Payload -> peer. Messages of one channel to one peer keep their order."""

    verb: ClassVar[str] = "send"
    peer: int
    channel: int  # 0: contributions, 1: results; a result never waits behind a contribution
    slot: int  # see [Note: slots]


@dataclass(frozen=True, slots=True)
class Recv(_Base):
    """Payload <- peer."""

    verb: ClassVar[str] = "recv"
    peer: int
    channel: int
    slot: int


@dataclass(frozen=True, slots=True)
class Reduce(_Base):
    """Payload summed over some ranks, natively, in place."""

    verb: ClassVar[str] = "reduce"
    slot: int
    ranks: tuple[int, ...]  # in ascending order; this rank is one of them
    to: tuple[int, ...]  # those that need the sum: all, or one; others may not use their payload


@dataclass(frozen=True, slots=True)
class EncodeRound(Encode):
    """Bucket piece and the sums of earlier rounds -> the payload of a round."""

    verb: ClassVar[str] = "encode_round"
    round: int


@dataclass(frozen=True, slots=True)
class ReduceRound(Reduce):
    """The payload of a round, combined over all ranks, natively, in place."""

    verb: ClassVar[str] = "reduce_round"
    round: int
    op: Operation


@dataclass(frozen=True, slots=True)
class DecodeRounds(Decode):
    """The sums of all rounds (`payload`: of the last) -> bucket piece, overwriting it."""

    verb: ClassVar[str] = "decode_rounds"


@dataclass(frozen=True, slots=True)
class Joined:
    """Tasks of one rank, codec and side that share a call, in order: see joining.py."""

    tasks: tuple[Encode | Decode | Merge, ...]

    @property
    def rank(self) -> int:
        """Rank of the tasks."""
        return self.tasks[-1].rank

    @property
    def part(self) -> int:
        """Part of the last task."""
        return self.tasks[-1].part

    @property
    def payload(self) -> int:
        """Payload of the last task."""
        return self.tasks[-1].payload

    @property
    def codec(self) -> str:
        """Key of the tasks' codec."""
        return self.tasks[-1].codec

    @property
    def verb(self) -> str:
        """Verb of the last task."""
        return self.tasks[-1].verb

    def text(self) -> str:
        """Texts of all tasks."""
        return "; ".join(task.text() for task in self.tasks)


@dataclass(frozen=True, slots=True)
class JoinedSend(Send):
    """A message of several payloads; the other fields are those of the first."""

    tasks: tuple[Send, ...]

    text = Joined.text


@dataclass(frozen=True, slots=True)
class JoinedRecv(Recv):
    """A message of several payloads; the other fields are those of the first."""

    tasks: tuple[Recv, ...]

    text = Joined.text


@dataclass(frozen=True, slots=True)
class JoinedReduce(Reduce):
    """Several payloads summed at once; the other fields are those of the first."""

    tasks: tuple[Reduce, ...]

    text = Joined.text


Task: TypeAlias = Encode | Decode | Merge | Follow | Send | Recv | Reduce | Joined


def members(task: Task) -> tuple[Task, ...]:
    """The tasks that share a call or message; otherwise the task itself."""
    if isinstance(task, Joined | JoinedSend | JoinedRecv | JoinedReduce):
        return task.tasks
    return (task,)


def _word(value: bool | int | str | Sequence[int]) -> str:
    """Text of a field's value, without spaces."""
    if isinstance(value, str):
        return quote(value, safe="()=,.:+")
    return str(int(value)) if isinstance(value, int) else _ranges(value)


def _ranges(numbers: Sequence[int]) -> str:
    """Text of ascending numbers, such as `0-3,6`."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
