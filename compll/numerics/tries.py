"""Searched thresholds: `adjust` and `bisect` try thresholds until the wanted number of elements
reaches one.

[Note: tries] A try has only two possible successors, and a walk over memory leaves time to count
for several thresholds. So each walk counts for a tree of SIZE thresholds: number 0 is the next one,
and after number q comes 2 q + 1 if too few elements reach it, else 2 q + 2. gaussiank's eleven
tries take four walks.

Numbers are float64, NumPy's or a printer's (see traced.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compll.numerics.bits import clamp
from compll.numerics.traced import floor, where

SIZE = 7
MOST = 100


def walks(tries: int) -> int:
    """Walks for this many tries and a look at the last one: a walk makes one on each level."""
    return -(-(1 + tries) // SIZE.bit_length())


class Tries:
    """The rule of a search. The state between two tries: the interval that `bisect` halves, or the
    next threshold of `adjust` twice; and how many tries are left after the next one.

    given: the operator's numbers: of `adjust` the first threshold, the fewest and the most elements
    wanted, the factors after too few and too many, and the number of tries; of `bisect` the
    interval, the fewest and the most, and the number of tries.
    """

    def __init__(self, op: str, given: Sequence[Any]) -> None:
        self.halves, self.given = op == "bisect", given
        self.fewest, self.most = given[2:4] if self.halves else given[1:3]

    def begin(self) -> tuple[Any, Any, Any]:
        """The first state. adjust looks once more after its last try."""
        low, high = self.given[0], self.given[int(self.halves)]
        tries = floor(clamp(self.given[-1], float(self.halves), float(MOST)))
        return low, high, tries - float(self.halves)

    def threshold(self, low: Any, high: Any) -> Any:
        """The threshold to try."""
        return low + (high - low) / 2.0 if self.halves else low

    def after(self, low: Any, high: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """The next interval if too few elements reach the threshold, and if too many do."""
        t = self.threshold(low, high)
        if self.halves:
            return (low, t), (t, high)
        lower, higher = t * self.given[3], t * self.given[4]
        return (lower, lower), (higher, higher)

    def fits(self, count: Any) -> Any:
        """True if as many elements as wanted reach a threshold."""
        return (self.fewest <= count) & (count <= self.most)

    def tree(self, low: Any, high: Any) -> list[Any]:
        """The thresholds that a walk counts for."""
        nodes = [(low, high)]
        for q in range(SIZE // 2):
            nodes += self.after(*nodes[q])
        return [self.threshold(*node) for node in nodes]

    def decide(self, state: Sequence[Any], counts: Sequence[Any], q: int = 0) -> tuple[Any, ...]:
        """The path through the tree, from number q on, by the counts of elements that reach its
        thresholds: the last threshold, its count, and the next state, with -1 tries left if the
        search is over."""
        low, high, left = state
        found, count = self.threshold(low, high), counts[q]
        few, over = count < self.fewest, self.fits(count) | (left <= 0.0)
        paths = [
            self.decide((*interval, left - 1.0), counts, child)
            if (child := 2 * q + 1 + k) < SIZE
            else (found, count, *interval, left - 1.0)
            for k, interval in enumerate(self.after(low, high))
        ]
        here = (found, count, low, high, -1.0)
        return tuple(
            where(over, own, where(few, *both))
            for own, both in zip(here, zip(*paths, strict=True), strict=True)
        )
