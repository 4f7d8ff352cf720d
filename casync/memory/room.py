"""How long messages are on transports where both sides must know that before any data.

[Note: lengths that vary] A payload of a codec that `cuts` has a capacity, which is next step's
room: what it took in this step and a quarter more, rounded up to a class, of which each is about a
quarter more than the one before. All who hold the payload have read its length in front of it, so
they agree without a word. What does not fit in a step stays in the state of who encoded it, and the
next room is larger. Lengths are copied to the host behind a run and read before the program's next
one, so no step waits for them.

The payloads of other codecs have room for the most there may be. Where that is more than twice what
they took, and the host may wait, they go exactly from then on: lengths first, then as much of each
piece as these say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from casync.codec import Ints
from casync.graph.layout import Layout, positions

__all__ = ["Room"]

_LEAST = 256  # bytes that a piece has more than it took


@dataclass(frozen=True, eq=False)
class Room:
    """Of a message: where its pieces begin, and the bytes of each, int64 [m]; and of all."""

    at: Ints
    capacity: Ints
    size: int

    @classmethod
    def of(cls, layout: Layout, capacity: Ints) -> Room:
        """For pieces of so many bytes, behind the lengths in front."""
        at = positions(capacity, layout.header)
        return cls(at[:-1], capacity, int(at[-1]))

    def next(self, layout: Layout, used: Ints) -> Room:
        """The room after payloads of `used` bytes, int64 [m]. See [Note: lengths that vary]."""
        wanted = used + used // 4 + _LEAST
        found = layout.bound
        while (less := _less(found, wanted) < found).any():
            found = np.where(less, _less(found, wanted), found)
        # A class that would be one lower is kept: lengths go up and down, and tables with them.
        found = np.where((found < self.capacity) & (25 * found > 16 * self.capacity),
                         self.capacity, found)  # fmt: skip
        return self if np.array_equal(found, self.capacity) else Room.of(layout, found)


def _less(capacity: Ints, wanted: Ints) -> Ints:
    """The next smaller class, where it is enough."""
    smaller = -(-(capacity * 4 // 5) // 8) * 8
    return np.where(smaller >= wanted, np.minimum(smaller, capacity), capacity)
