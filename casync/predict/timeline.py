"""How long a training step takes: the backward pass, codecs and the link, on one timeline.

[Note: one rank] `simulate` follows every task of every rank, some tenths of a second for a step of
a large model. A planner asks for hundreds of steps. All ranks do alike, so here is one rank, with
what it does for a bucket as a chain of stages (stages.py): work on one thread, which takes what is
urgent first, as the executor's compute lane does, and transfers, one after the other. Tests hold it
to `simulate`.

[Note: shared cores] On a CPU the backward pass, codecs and the transfers' threads share cores. What
two threads gain over one is measured (`Costs.overlap`); more than there are cores for slow down
alike. So what encodes while gradients are computed delays the gradients that follow.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from casync.predict.stages import Stage

__all__ = ["Load", "Step", "simulate_step"]

_EPSILON = 1e-12
_Waiting = tuple[bool, float, int, int]  # last stage, since when, load, stage


@dataclass(frozen=True)
class Load:
    """What follows when gradients are there. `ready`: seconds of the backward pass till then."""

    ready: float
    stages: tuple[Stage, ...]
    pieces: int = 1  # that follow one another, so that work and transfers overlap


@dataclass(frozen=True)
class Step:
    """What a simulation found. Seconds."""

    seconds: float  # until all averages are there and the backward pass is over
    backward: float  # until it is over, slowed down by what shares its cores


def simulate_step(loads: Sequence[Load], backward: float, overlap: float) -> Step:
    """A step whose backward pass takes `backward` seconds where nothing disturbs it."""
    pieces = [piece for load in loads for piece in _pieces(load)]
    return _Timeline(sorted(pieces, key=lambda each: each.ready), backward, overlap).run()


def _pieces(load: Load) -> Iterator[Load]:
    count = max(1, load.pieces)
    part = load
    if count > 1:
        cut = tuple(replace(stage, seconds=stage.seconds / count) for stage in load.stages)
        part = Load(load.ready, cut)
    return iter([part] * count)


class _Timeline:
    def __init__(self, loads: Sequence[Load], backward: float, overlap: float) -> None:
        self._loads, self._backward, self._overlap = loads, backward, overlap
        self._now = self._progress = 0.0
        self._over = 0.0  # when the backward pass was
        self._next = 0  # of the loads, in order of readiness
        self._later: list[tuple[float, int, int]] = []  # time, load, stage: after a delay
        self._queues: tuple[list[_Waiting], list[_Waiting]] = ([], [])  # work, transfers
        self._running: list[tuple[int, int] | None] = [None, None]
        self._left = [0.0, 0.0]
        self._cores = 0.0  # that the transfer under way keeps busy

    def run(self) -> Step:
        while True:
            self._release()
            self._start()
            speeds = self._speeds()
            seconds = self._until(speeds)
            if seconds is None:
                return Step(self._now, self._over)
            self._advance(seconds, speeds)

    def _release(self) -> None:
        """Begin what has become ready."""
        loads = self._loads
        while self._next < len(loads) and self._ready(loads[self._next]) <= self._progress:
            self._enqueue(self._next, 0)
            self._next += 1
        while self._later and self._later[0][0] <= self._now + _EPSILON:
            _, load, stage = heapq.heappop(self._later)
            self._enqueue(load, stage)

    def _ready(self, load: Load) -> float:
        return min(load.ready, self._backward) - _EPSILON

    def _enqueue(self, load: int, stage: int) -> None:
        stages = self._loads[load].stages
        if stage < len(stages):
            last, wire = stage == len(stages) - 1, stages[stage].wire
            waiting = (last and not wire, self._now if wire else 0.0, load, stage)
            heapq.heappush(self._queues[wire], waiting)

    def _start(self) -> None:
        for wire in (0, 1):
            if self._running[wire] is None and self._queues[wire]:
                _, _, load, number = heapq.heappop(self._queues[wire])
                stage = self._loads[load].stages[number]
                self._running[wire], self._left[wire] = (load, number), stage.seconds
                if wire:
                    self._cores = min(1.0, stage.cores)

    def _speeds(self) -> tuple[float, float, float]:
        """Of the backward pass, of work and of transfers; see [Note: shared cores]."""
        passing, working = self._progress < self._backward - _EPSILON, self._running[0] is not None
        cores = self._cores if self._running[1] is not None else 0.0
        demand = passing + working + cores
        speed = 1.0
        if demand > 1.0:
            speed = min(1.0, (1.0 + self._overlap * (demand - 1.0)) / demand)
        return speed * passing, speed * working, 1.0 - cores + cores * speed

    def _until(self, speeds: tuple[float, float, float]) -> float | None:
        """Seconds until something changes; None where nothing will."""
        passing, working, sending = speeds
        found = []
        if passing:
            to = self._backward
            if self._next < len(self._loads):
                to = min(to, self._loads[self._next].ready)
            found.append(max(0.0, to - self._progress) / passing)
        if working:
            found.append(self._left[0] / working)
        if self._running[1] is not None:
            found.append(self._left[1] / sending)
        if self._later:
            found.append(max(0.0, self._later[0][0] - self._now))
        return min(found, default=None)

    def _advance(self, seconds: float, speeds: tuple[float, float, float]) -> None:
        self._now += seconds
        if speeds[0]:
            self._progress += seconds * speeds[0]
            self._over = self._now
        for wire in (0, 1):
            running = self._running[wire]
            if running is None:
                continue
            self._left[wire] -= seconds * speeds[1 + wire]
            if self._left[wire] <= _EPSILON:
                self._running[wire] = None
                self._finish(*running)

    def _finish(self, load: int, number: int) -> None:
        stage = self._loads[load].stages[number]
        if stage.delay > 0:
            heapq.heappush(self._later, (self._now + stage.delay, load, number + 1))
        else:
            self._enqueue(load, number + 1)
