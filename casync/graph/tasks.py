"""The primitives of a synchronization, as frozen tasks with a text form that parses back.

CaSync has five: encode, decode, merge, send, recv. `reduce` is the native collective, for
payloads that add without decoding. `merge` is decode-and-add: codecs fuse the two.

A payload has a number. The encode that makes it gives the number; sends, receives and decodes
name it, on whichever rank they run: a payload forwarded unchanged keeps its number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, cast

from casync.codec import OPERATIONS, Operation
from casync.errors import GraphSyntaxError

__all__ = [
    "SIDES",
    "Decode",
    "DecodeRounds",
    "Encode",
    "EncodeRound",
    "Merge",
    "Recv",
    "Reduce",
    "ReduceRound",
    "Send",
    "Side",
    "Task",
    "parse_task",
]

Side: TypeAlias = Literal["worker", "aggregator"]
SIDES: tuple[Side, ...] = ("worker", "aggregator")


@dataclass(frozen=True)
class _Base:
    verb: ClassVar[str]
    rank: int  # where it runs
    part: int  # Part.id
    payload: int  # number of the payload made, moved or read

    def text(self) -> str:
        """One line, e.g. `send rank=0 part=3 payload=7 peer=1 channel=0`."""
        pairs = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return " ".join([self.verb, *(f"{k}={int(v) if k in _BOOLS else v}" for k, v in pairs)])


@dataclass(frozen=True)
class Encode(_Base):
    """Bucket piece -> payload. Without a codec: only scales the piece, in place."""

    verb: ClassVar[str] = "encode"
    side: Side  # whose state is used
    average: bool  # multiply by 1/world_size as it is read
    writeback: bool  # overwrite the bucket piece by decode(payload)


@dataclass(frozen=True)
class Decode(_Base):
    """Payload -> bucket piece, overwriting it."""

    verb: ClassVar[str] = "decode"


@dataclass(frozen=True)
class Merge(_Base):
    """Payload decoded and added to the bucket piece."""

    verb: ClassVar[str] = "merge"


@dataclass(frozen=True)
class Send(_Base):
    """Payload -> peer. Messages of one channel to one peer keep their order."""

    verb: ClassVar[str] = "send"
    peer: int
    channel: int  # 0: contributions, 1: results; a result never waits behind a contribution


@dataclass(frozen=True)
class Recv(_Base):
    """Payload <- peer."""

    verb: ClassVar[str] = "recv"
    peer: int
    channel: int


@dataclass(frozen=True)
class Reduce(_Base):
    """Payload (or, without a codec, bucket piece) summed over all ranks, natively, in place."""

    verb: ClassVar[str] = "reduce"


@dataclass(frozen=True)
class EncodeRound(Encode):
    """Bucket piece and the sums of earlier rounds -> the payload of a round."""

    verb: ClassVar[str] = "encode_round"
    round: int


@dataclass(frozen=True)
class ReduceRound(Reduce):
    """The payload of a round, combined over all ranks, natively, in place."""

    verb: ClassVar[str] = "reduce_round"
    round: int
    op: Operation


@dataclass(frozen=True)
class DecodeRounds(Decode):
    """The sums of all rounds (`payload`: of the last) -> bucket piece, overwriting it."""

    verb: ClassVar[str] = "decode_rounds"


Task: TypeAlias = Encode | Decode | Merge | Send | Recv | Reduce

_KINDS: dict[str, type[Task]] = {
    k.verb: k
    for k in (
        *(Encode, Decode, Merge, Send, Recv, Reduce),
        *(EncodeRound, ReduceRound, DecodeRounds),
    )
}
_BOOLS = frozenset({"average", "writeback"})
_PAIR = re.compile(r"([a-z]+)=(\w+)")


def parse_task(text: str) -> Task:
    """The task whose `text()` this is; raises GraphSyntaxError."""
    verb, *words = text.split()
    if verb not in _KINDS:
        raise GraphSyntaxError(f"unknown task {verb!r}; one of {', '.join(_KINDS)}")
    pairs = [_PAIR.fullmatch(word) for word in words]
    values = {m[1]: _value(m[1], m[2], text) for m in pairs if m}
    expected = [f.name for f in dataclasses.fields(_KINDS[verb])]
    if list(values) != expected or None in pairs:
        raise GraphSyntaxError(f"expected `{verb} {'=.. '.join(expected)}=..`, got {text!r}")
    return cast(Callable[..., Task], _KINDS[verb])(**values)


def _value(key: str, word: str, text: str) -> int | bool | str:
    if (key == "side" and word in SIDES) or (key == "op" and word in OPERATIONS):
        return word
    if not word.isdigit() or (key in _BOOLS and word not in "01"):
        raise GraphSyntaxError(f"bad value of {key!r} in {text!r}")
    return word == "1" if key in _BOOLS else int(word)
