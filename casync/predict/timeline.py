"""How long a training step takes: the backward pass, codecs and the link, on one timeline.

[Note: one rank] `simulate` follows every task of every rank, some tenths of a second for a step of
a large model. A planner asks for hundreds of steps. All ranks do alike, so here is one rank, with
what it does for a bucket as a chain of stages (stages.py): work on one thread, which takes what is
urgent first, as the executor's compute lane does, and transfers, one after the other. Tests hold it
to `simulate`.

[Note: shared cores] On a CPU the backward pass, codecs and the transfers' threads share cores. What
two threads gain over one is measured (`Costs.overlap`); more than there are cores for slow down
alike. So what encodes while gradients are computed delays the gradients that follow. On a device
the pass and codecs share that, and the overlap is that of kernels; transfers take nothing from
them (`cores` is 0). Where the host compresses a device's gradients, the overlap is that of a thread
beside a device. Copies either way have an engine each, which takes nothing from anybody.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from casync.predict.stages import ENTER, LEAVE, WIRE, WORK, Stage

__all__ = ["Load", "Step", "simulate_step"]

_EPSILON = 1e-12
_LANES = (WORK, WIRE, LEAVE, ENTER)
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


def _pieces(load: Load) -> list[Load]:
    if load.pieces <= 1:
        return [load]
    cut = tuple(replace(stage, seconds=stage.seconds / load.pieces) for stage in load.stages)
    return [Load(load.ready, cut)] * load.pieces


class _Timeline:
    def __init__(self, loads: Sequence[Load], backward: float, overlap: float) -> None:
        self._loads, self._backward, self._overlap = loads, backward, overlap
        self._now = self._progress = 0.0
        self._over = 0.0  # when the backward pass was
        self._next = 0  # of the loads, in order of readiness
        self._later: list[tuple[float, int, int]] = []  # time, load, stage: after a delay
        self._queues: list[list[_Waiting]] = [[] for _ in _LANES]
        self._running: list[tuple[int, int] | None] = [None for _ in _LANES]
        self._left = [0.0 for _ in _LANES]
        self._cores = 0.0  # that the transfer under way keeps busy

    def run(self) -> Step:
        while True:
            self._release()
            self._start()
            passing, speeds = self._speeds()
            seconds = self._until(passing, speeds)
            if seconds is None:
                return Step(self._now, self._over)
            self._advance(seconds, passing, speeds)

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
            last, lane = stage == len(stages) - 1, stages[stage].lane
            waiting = (last and lane == WORK, 0.0 if lane == WORK else self._now, load, stage)
            heapq.heappush(self._queues[lane], waiting)

    def _start(self) -> None:
        for lane in _LANES:
            if self._running[lane] is None and self._queues[lane]:
                _, _, load, number = heapq.heappop(self._queues[lane])
                stage = self._loads[load].stages[number]
                self._running[lane], self._left[lane] = (load, number), stage.seconds
                if lane == WIRE:
                    self._cores = min(1.0, stage.cores)

    def _speeds(self) -> tuple[float, list[float]]:
        """Of the backward pass, and by lane; see [Note: shared cores]."""
        passing = self._progress < self._backward - _EPSILON
        cores = self._cores if self._running[WIRE] is not None else 0.0
        demand = passing + (self._running[WORK] is not None) + cores
        speed = 1.0
        if demand > 1.0:
            speed = min(1.0, (1.0 + self._overlap * (demand - 1.0)) / demand)
        return speed * passing, [speed, 1.0 - cores + cores * speed, 1.0, 1.0]

    def _until(self, passing: float, speeds: Sequence[float]) -> float | None:
        """Seconds until something changes; None where nothing will."""
        found = []
        if passing:
            to = self._backward
            if self._next < len(self._loads):
                to = min(to, self._loads[self._next].ready)
            found.append(max(0.0, to - self._progress) / passing)
        found += [self._left[i] / speeds[i] for i in _LANES if self._running[i] is not None]
        if self._later:
            found.append(max(0.0, self._later[0][0] - self._now))
        return min(found, default=None)

    def _advance(self, seconds: float, passing: float, speeds: Sequence[float]) -> None:
        self._now += seconds
        if passing:
            self._progress += seconds * passing
            self._over = self._now
        for lane in _LANES:
            running = self._running[lane]
            if running is None:
                continue
            self._left[lane] -= seconds * speeds[lane]
            if self._left[lane] <= _EPSILON:
                self._running[lane] = None
                self._finish(*running)

    def _finish(self, load: int, number: int) -> None:
        stage = self._loads[load].stages[number]
        if stage.delay > 0:
            heapq.heappush(self._later, (self._now + stage.delay, load, number + 1))
        else:
            self._enqueue(load, number + 1)
