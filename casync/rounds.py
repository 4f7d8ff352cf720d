"""Codecs that aggregate in rounds: several all-reduces, each based on the sums of those before.

A codec without rounds sends whole payloads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, cast

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Bytes, Codec, Floats, Ints, State

__all__ = [
    "RoundsCodec",
    "Sums",
    "as_rounds",
    "build",
    "refuse_workers",
]

#: per round: the summed payloads, and the byte at which each piece begins (int64 [m])
Sums: TypeAlias = Sequence[tuple[Bytes, Ints]]


class RoundsCodec(Codec, Protocol):
    """Further members of a codec with rounds."""

    def refuses_workers(self, workers: int) -> str | None:
        """The reason why the payloads of that many workers cannot be added, or None."""
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
        """Encode one round's payload from x and the earlier rounds' sums over all `workers`.

        Changes neither x nor the state; returns the used bytes, int64 [m].
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

        The result depends on the sums alone, so that all ranks get the same bits.
        """
        ...


def as_rounds(codec: Codec) -> RoundsCodec:
    """The codec as RoundsCodec; its `rounds` must not be empty."""
    return cast(RoundsCodec, codec)


def refuse_workers(codec: Codec, workers: int) -> str | None:
    """The reason why a codec with rounds cannot serve this many workers, or None."""
    if not codec.rounds:
        return None
    reason = as_rounds(codec).refuses_workers(workers)
    return None if reason is None else f"codec {codec.name!r}: {reason}"


def build(b: Builder, part: Part) -> None:
    """Add the tasks of all rounds (encode, all-reduce), then the decode of all sums."""
    earlier: dict[int, list[int]] = {rank: [] for rank in b.ranks}
    for number, op in enumerate(part.rounds):
        b.phase = number
        payloads = {rank: b.encode_round(rank, part, number, earlier[rank]) for rank in b.ranks}
        b.reduce(part, payloads, range(b.world_size), (number, op))
        for rank, payload in payloads.items():
            earlier[rank].append(payload)
    for rank, rounds in earlier.items():
        b.decode_rounds(rank, part, rounds)
