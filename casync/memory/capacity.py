"""Capacities of messages on transports where both sides must know lengths before any data.

[Note: lengths that vary] A payload of a codec that `cuts` has a capacity for the next step: its
bytes in this step plus a quarter, rounded up to a size class, each about a quarter larger than the
one before. All ranks that hold the payload have read its length in front of it, so they agree
without a message. Values that do not fit in a step stay in the state of the encoding rank, and the
next capacity is larger. Lengths are copied to the host after a run and read before the program's
next run, so no step waits for them.

Payloads of other codecs have the capacity of their upper bound. If that is more than twice the
bytes that they took, and the host may wait, they travel exactly from then on: first the lengths,
then only the used bytes of each piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from casync.codec import Ints
from casync.graph.layout import Layout, positions

__all__ = ["Room"]

_LEAST = 256  # extra bytes of a piece


@dataclass(frozen=True, eq=False)
class Room:
    """Capacities of a message: first byte and bytes of each piece, int64 [m]; and bytes of all."""

    at: Ints
    capacity: Ints
    size: int

    @classmethod
    def of(cls, layout: Layout, capacity: Ints) -> Room:
        """The capacities for pieces of `capacity` bytes each, after the lengths in front."""
        at = positions(capacity, layout.header)
        return cls(at[:-1], capacity, int(at[-1]))

    def next(self, layout: Layout, used: Ints) -> Room:
        """Capacities after payloads of `used` bytes, int64 [m]. See [Note: lengths that vary]."""
        wanted = used + used // 4 + _LEAST
        capacity = layout.bound
        while (less := _less(capacity, wanted) < capacity).any():
            capacity = np.where(less, _less(capacity, wanted), capacity)
        # Keep a capacity that would drop by one class: lengths fluctuate, and tables would with
        # them.
        capacity = np.where((capacity < self.capacity) & (25 * capacity > 16 * self.capacity),
                         self.capacity, capacity)  # fmt: skip
        return self if np.array_equal(capacity, self.capacity) else Room.of(layout, capacity)


def _less(capacity: Ints, wanted: Ints) -> Ints:
    """The next smaller size class if it is large enough, else the same capacity."""
    smaller = -(-(capacity * 4 // 5) // 8) * 8
    return np.where(smaller >= wanted, np.minimum(smaller, capacity), capacity)
