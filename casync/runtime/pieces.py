"""Pieces of a part in the bucket, as tasks find them.

[Note: 16-bit gradients] Codecs compute in float32, and sums stay in float32. With a bucket of
float16 or bfloat16, a task on the host gets its pieces in a buffer: they are widened, which is
exact, and rounded to nearest even when the part's last task is done. A task that reads results of
another task gets the same buffer; otherwise the buffer is freed in between. So memory is needed
only for the sums and tasks under way, not for the bucket. A device's kernels read and write 16 bits
themselves; there only sums have buffers, which belong to the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from casync.building.parts import Part
from casync.building.tasks import Decode, Encode, Merge, members
from casync.codec import Ints, State
from casync.graph.graph import Program
from casync.memory import Memory
from casync.runtime.deferral import Deferred

__all__ = ["InBucket", "Inputs", "States", "View", "packed", "pieces_of"]

States: TypeAlias = Mapping[tuple[str, str], State]
View: TypeAlias = Callable[[Any], Any]


@dataclass
class Inputs:
    """Inputs of the steps of one run."""

    bucket: torch.Tensor
    array: Any  # the bucket as codecs take it; None if they do not
    states: States
    step: int  # the training step's number
    deferred: dict[int, Deferred] = field(default_factory=dict)  # by part: during its rounds
    apart: dict[Apart, tuple[torch.Tensor, int]] = field(default_factory=dict)  # for tasks to come
    _views: dict[View, Any] = field(default_factory=dict)

    def viewed(self, view: View) -> Any:
        """The bucket by a codec's `view`, which takes as long as a launch: made once."""
        if view not in self._views:
            self._views[view] = view(self.array)
        return self._views[view]


def packed(table: Ints) -> Ints:
    """The table of the same pieces one behind the other."""
    start = np.cumsum(table[:, 1]) - table[:, 1]
    return np.column_stack([start, table[:, 1:]])


class InBucket:
    """Pieces of a part in the bucket itself."""

    def __init__(self, part: Part) -> None:
        self.table: Ints = np.array(part.rows, np.int64).reshape(-1, 5)

    def open(self, run: Inputs, view: View | None) -> Any:
        """The array whose pieces `table` describes. view: of the codec which takes it, if any."""
        return run.array if view is None else run.viewed(view)

    def close(self, run: Inputs) -> None:
        """Note that a task has finished with the array."""


class Apart(InBucket):
    """Pieces of a part in a float32 buffer, shared by tasks that read each other's results."""

    def __init__(self, part: Part, memory: Memory, stretch: _Stretch) -> None:
        super().__init__(part)
        self._runs = _runs(*self.table[:, :2].T.tolist())
        self.table = packed(self.table)
        self._memory, self._stretch, self._count = memory, stretch, part.elements
        self._sums = None if memory.host else memory.zeros(part.elements, torch.float32)

    def open(self, run: Inputs, view: View | None) -> Any:
        """Implements InBucket.open."""
        if self not in run.apart:
            run.apart[self] = self._widen(run), len(self._stretch.tasks)
        values, left = run.apart[self]
        run.apart[self] = values, left - 1
        array = self._memory.array(values)
        return array if view is None else view(array)

    def close(self, run: Inputs) -> None:
        """Implements InBucket.close; the last task writes the pieces back."""
        values, left = run.apart[self]
        if not left:
            del run.apart[self]
            for here, there in self._pairs(run, values) if self._stretch.stays else ():
                self._memory.copy(there, here)

    def _widen(self, run: Inputs) -> torch.Tensor:
        values = self._sums
        if values is None:
            values = self._memory.tensor(np.empty(self._count, np.float32))
        for here, there in self._pairs(run, values) if self._stretch.reads else ():
            self._memory.copy(here, there)
        return values

    def _pairs(
        self, run: Inputs, values: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Contiguous stretches: in the buffer, and in the bucket."""
        here = 0
        for there, length in self._runs:
            yield values[here : here + length], run.bucket[there : there + length]
            here += length


@dataclass
class _Stretch:
    """Positions of tasks of a part that share a buffer. reads: the first finds its input in the
    bucket; writes: one of them writes; stays: their results go back to the bucket."""

    reads: bool
    tasks: list[int] = field(default_factory=list)
    writes: bool = False
    stays: bool = False


def pieces_of(program: Program, memory: Memory, *, halves: bool) -> dict[tuple[int, int], InBucket]:
    """The pieces by task position and part. halves: True for a bucket of 16 bits."""
    pieces: dict[tuple[int, int], InBucket] = {}
    for number, tasks in _by_part(program).items():
        part = program.parts[number]
        whole = InBucket(part)
        pieces.update(((i, number), whole) for i in tasks)
        for stretch in _stretches(program, tasks) if halves else ():
            if memory.host or len(stretch.tasks) > 1:
                apart = Apart(part, memory, stretch)
                pieces.update(((i, number), apart) for i in stretch.tasks)
    return pieces


def _by_part(program: Program) -> dict[int, list[int]]:
    """Positions of tasks that use pieces, by part."""
    positions: dict[int, list[int]] = defaultdict(list)
    for i, task in enumerate(program.tasks):
        uses = isinstance(members(task)[0], Encode | Decode | Merge)
        for part in {each.part for each in members(task)} if uses else ():
            positions[part].append(i)
    return positions


def _stretches(program: Program, tasks: Iterable[int]) -> list[_Stretch]:
    """Stretches of one part's tasks. A stretch that only reads leaves the bucket as it is."""
    stretches: list[_Stretch] = []
    for i in tasks:
        every = members(program.tasks[i])
        replaces = type(every[0]) is Decode
        if replaces or not stretches or not stretches[-1].writes:
            stretches.append(_Stretch(reads=not replaces))
        stretches[-1].tasks.append(i)
        stretches[-1].writes |= any(not isinstance(t, Encode) or t.writeback for t in every)
    stretches[-1].stays = stretches[-1].writes
    return stretches


def _runs(starts: Iterable[int], lengths: Iterable[int]) -> list[tuple[int, int]]:
    """Start and length of each contiguous run of pieces."""
    runs: list[tuple[int, int]] = []
    for start, length in zip(starts, lengths, strict=True):
        if runs and sum(runs[-1]) == start:
            start, length = runs[-1][0], runs.pop()[1] + length
        runs.append((start, length))
    return runs
