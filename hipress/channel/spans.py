"""Elements of workers' states for which this rank keeps an aggregator's state, too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate

import torch

__all__ = ["Spans"]


class Spans:
    """Runs of elements, in order and without overlaps, whose values lie one behind another."""

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """runs: first element and length of each; neighbours are joined."""
        self.runs: list[tuple[int, int]] = []
        for first, length in sorted(runs):
            if self.runs and sum(self.runs[-1]) == first:
                first, length = self.runs[-1][0], self.runs.pop()[1] + length
            if length:
                self.runs.append((first, length))
        self._firsts = [first for first, _ in self.runs]
        self._before = [0, *accumulate(length for _, length in self.runs)]

    def __len__(self) -> int:
        return self._before[-1]

    def before(self, element: int) -> int:
        """Number of elements of the spans before this one: its place among the values."""
        number = bisect_right(self._firsts, element) - 1
        if number < 0:
            return 0
        first, length = self.runs[number]
        return self._before[number] + min(element - first, length)

    def within(self, first: int, length: int) -> Spans:
        """The part of the spans in a range of elements, counted from its first."""
        start = max(0, bisect_right(self._firsts, first) - 1)
        runs, end = list[tuple[int, int]](), first + length
        for begin, many in self.runs[start:]:
            if begin >= end:
                break
            low, high = max(begin, first), min(begin + many, end)
            if low < high:
                runs.append((low - first, high - low))
        return Spans(runs)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The spans' values of a flat tensor of all elements."""
        return torch.cat([flat[:0], *(flat[first : first + many] for first, many in self.runs)])

    def spread(self, values: torch.Tensor, elements: int) -> torch.Tensor:
        """The inverse of `of`: `elements` values, zero where there are none; the same tensor if
        there are all."""
        if len(self) == elements:
            return values
        flat = values.new_zeros(elements)
        for first, many in self.runs:
            at = self.before(first)
            flat[first : first + many] = values[at : at + many]
        return flat

    def pairs(self, other: Spans) -> Iterator[tuple[slice, slice]]:
        """Places among these values, and among another's, of elements that both have."""
        for first, length in self.runs:
            for begin, many in other.within(first, length).runs:
                here, there = self.before(first + begin), other.before(first + begin)
                yield slice(here, here + many), slice(there, there + many)
