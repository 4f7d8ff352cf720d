"""Codecs that aggregate in the middle: several all-reduces, each of which the next one builds on.

A codec without rounds sends its payloads whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from casync.codec import Bytes, Codec, Floats, Ints, State

if TYPE_CHECKING:
    from casync.graph.builder import Builder
    from casync.graph.plan import Part

__all__ = [
    "RoundsCodec",
    "Sums",
    "as_rounds",
    "build",
    "refuse_workers",
]

#: by round: the summed payloads, and where each piece begins
Sums: TypeAlias = Sequence[tuple[Bytes, Ints]]


class RoundsCodec(Codec, Protocol):
    """Members of a codec with rounds, besides those of Codec."""

    def refuses_workers(self, workers: int) -> str | None:
        """Why so many workers cannot add up their payloads, or None."""
        ...

    def encode_round(
        self,
        number: int,
        x: Floats,
        table: Ints,
        out: Bytes,
        at: Ints,
        before: Sums = (),
        *,
        workers: int,
        state: State | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> Ints:
        """Encode what a round adds up, from x and the earlier rounds' sums over all `workers`.

        Changes neither x nor the state; returns int64 [m] used bytes.
        """
        ...

    def decode_rounds(
        self,
        x: Floats,
        table: Ints,
        sums: Sums,
        *,
        workers: int,
        state: State | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> None:
        """Overwrite x's pieces by the mean over the workers, and update the state.

        What x becomes follows from the sums alone, so that all ranks end with the same bits.
        """
        ...


def as_rounds(codec: Codec) -> RoundsCodec:
    """A codec whose `rounds` are not empty."""
    return cast(RoundsCodec, codec)


def refuse_workers(codec: Codec, workers: int) -> str | None:
    """The refusal of a world size."""
    if not codec.rounds:
        return None
    reason = as_rounds(codec).refuses_workers(workers)
    return None if reason is None else f"codec {codec.name!r}: {reason}"


def build(b: Builder, part: Part) -> None:
    """Every round: encode, combine natively. Then decode from all that was combined."""
    made: dict[int, list[int]] = {rank: [] for rank in b.ranks}
    for number, op in enumerate(part.rounds):
        b.phase = number
        payloads = {rank: b.encode_round(rank, part, number, made[rank]) for rank in b.ranks}
        b.reduce(part, payloads, range(b.world_size), (number, op))
        for rank, payload in payloads.items():
            made[rank].append(payload)
    for rank, rounds in made.items():
        b.decode_rounds(rank, part, rounds)
