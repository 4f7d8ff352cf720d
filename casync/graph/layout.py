"""Layout of the payloads of a part's pieces in one message.

Fixed length: the payloads of pieces one behind the other, each at a multiple of ALIGN bytes.
Varying length: first the used bytes, int64 [m], then the payloads in the same way, without their
unused capacity. Both sides derive the layout from the part, so nothing else is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from casync.building.parts import Part
from casync.codec import Bytes, Codec, Ints
from casync.errors import PayloadError

__all__ = ["ALIGN", "Contents", "Layout", "positions"]

Contents: TypeAlias = tuple[Ints, Ints, int]  # (at [m], used [m], bytes of the message)

ALIGN = 8  # bytes, so that kernels may read any type in place


def _align(used: Ints) -> Ints:
    return -(-used // ALIGN) * ALIGN


def positions(used: Ints, first: int) -> Ints:
    """Byte position of each piece if piece i takes used[i] bytes, and the end: int64 [m + 1]."""
    at = np.empty(len(used) + 1, np.int64)
    at[0] = first
    np.cumsum(_align(used), out=at[1:])
    at[1:] += first
    return at


@dataclass(frozen=True, eq=False)
class Layout:
    """Byte positions inside a part's message buffer."""

    fixed: bool
    header: int  # bytes of the used lengths in front; 0 when fixed
    bound: Ints  # int64 [m]: bytes reserved for each piece
    at: Ints  # int64 [m]: byte at which each piece is encoded
    size: int  # bytes of the zeroed buffer (padding is summed, too): bound of the message

    @classmethod
    def of(cls, part: Part, codec: Codec) -> Layout:
        """The layout of a part's payloads of this codec."""
        sizes = {n: codec.payload_bytes(n) for n in {row[1] for row in part.rows}}
        bound = np.array([sizes[row[1]] for row in part.rows], np.int64)
        header = 0 if codec.fixed else 8 * len(bound)
        at = positions(bound, header)
        return cls(codec.fixed, header, bound, at[:-1], int(at[-1]))

    @classmethod
    def of_round(cls, part: Part, codec: Codec, number: int) -> Layout:
        """The layout of one round's payloads."""
        one = codec.rounds[number]
        bound = np.array([one.payload_bytes(row[1]) for row in part.rows], np.int64)
        at = positions(bound, 0)
        return cls(True, 0, bound, at[:-1], int(at[-1]))

    def pack(self, message: Bytes, used: Ints) -> Contents:
        """After an encode: check the lengths, write them, and make the pieces contiguous."""
        self.check(used)
        if self.fixed:
            return self.whole
        at = positions(used, self.header)
        message[: self.header].view(np.int64)[:] = used
        for source, target, length in zip(
            self.at[1:].tolist(), at[1:-1].tolist(), used[1:].tolist(), strict=True
        ):
            message[target : target + length] = message[source : source + length]
        for end, following in zip((at[:-1] + used).tolist(), at[1:].tolist(), strict=True):
            message[end:following] = 0  # zero padding: equal payloads make equal messages
        return at[:-1], used, int(at[-1])

    def clear(self, message: Bytes) -> None:
        """Before a receive: set lengths that no sender writes, to detect a short message."""
        if not self.fixed:
            message[: self.header].view(np.int64)[:] = -1

    def unpack(self, message: Bytes, received: int | None = None) -> Contents:
        """Contents after receiving `received` bytes (None: unknown); raises PayloadError."""
        if self.fixed:
            contents = self.whole
        else:
            used = message[: self.header].view(np.int64).copy()
            self.check(used)
            at = positions(used, self.header)
            contents = at[:-1], used, int(at[-1])
        if received not in (None, contents[2]):
            raise PayloadError(f"message of {received} bytes, expected {contents[2]}")
        return contents

    def spread(self, message: Bytes, contents: Contents, buffer: Bytes) -> None:
        """Undo `pack`: copy the pieces of a varying message to where they were encoded."""
        buffer[: self.header] = message[: self.header]
        for source, target, length in zip(
            contents[0].tolist(), self.at.tolist(), contents[1].tolist(), strict=True
        ):
            buffer[target : target + length] = message[source : source + length]

    @cached_property
    def whole(self) -> Contents:
        """Contents of a message that uses all reserved bytes."""
        return self.at, self.bound, self.size

    def check(self, used: Ints) -> None:
        """Raise PayloadError unless the pieces may have these lengths."""
        if self.fixed:
            good = np.array_equal(used, self.bound)
        else:
            good = len(used) == len(self.bound) and bool(((used >= 0) & (used <= self.bound)).all())
        if not good:
            raise PayloadError(
                f"used lengths {_short(used)} do not fit the bounds {_short(self.bound)}"
            )


def _short(values: Ints) -> str:
    shown = ", ".join(str(v) for v in values[:6])
    return f"[{shown}, ...]" if len(values) > 6 else f"[{shown}]"
