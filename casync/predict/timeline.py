"""How long a training step takes: the backward pass, codecs and the link, on one timeline.

[Note: one rank] `simulate` follows every task of every rank, some tenths of a second for a step of
a large model. A planner asks for hundreds of steps. All ranks do alike, so here is one rank, with
what it does for a bucket as a chain of stages (casync/stages.py), each on a lane. A lane takes one
stage at a time: work what is urgent first, as the executor's compute lane does, the others in the
order of arrival. Tests hold it to `simulate`.

[Note: shared cores] On a CPU the backward pass, codecs and the transfers' threads share cores. What
two threads gain over one is measured (`Costs.overlap`); more than there are cores for slow down
alike. So what encodes while gradients are computed delays the gradients that follow. On a device
the pass and codecs share that, and the overlap is that of kernels; transfers take nothing from
them (`cores` is 0). Where the host compresses a device's gradients, the overlap is that of a thread
beside a device. Other lanes take nothing from anybody, unless a stage says by how much it `slows`
the pass, as collectives do that take a device's processors or its memory's bandwidth.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from casync.stages import WORK, Stage

__all__ = ["Event", "Load", "Step", "simulate_step"]

_EPSILON = 1e-12
_Waiting = tuple[float, bool, float, int, int]  # urgency, last stage, since when, piece, stage


@dataclass(frozen=True)
class Load:
    """What follows when gradients are there."""

    ready: float  # seconds of an undisturbed backward pass till then, and of a clock after it
    stages: tuple[Stage, ...]
    pieces: int = 1  # that follow one another, so that work and transfers overlap
    urgency: float = 0.0  # of loads that wait for a lane the one with less is served first


@dataclass(frozen=True)
class Event:
    """A lane was taken. Seconds."""

    lane: str
    load: int  # position of the load
    stage: int  # position in its chain
    begin: float
    end: float


@dataclass(frozen=True)
class Step:
    """What a simulation found. Seconds."""

    seconds: float  # until all averages are there and the backward pass is over
    backward: float  # until it is over, slowed down by what shares its cores
    done: tuple[float, ...] = ()  # until the averages of each load are there
    busy: tuple[tuple[str, float], ...] = ()  # lanes, and how long they were taken
    events: tuple[Event, ...] = ()  # in the order of their ends, if they were asked for


def simulate_step(
    loads: Sequence[Load], backward: float, overlap: float, events: bool = False
) -> Step:
    """A step whose backward pass takes `backward` seconds where nothing disturbs it.

    `overlap`: what two threads gain that share a core, 0 to 1. `events`: whether to keep them.
    """
    order = sorted(range(len(loads)), key=lambda i: loads[i].ready)
    pieces = [piece for i in order for piece in _pieces(i, loads[i])]
    return _Timeline(pieces, len(loads), backward, overlap, events).run()


@dataclass(frozen=True)
class _Piece:
    load: int
    ready: float
    urgency: float
    stages: tuple[Stage, ...]


def _pieces(number: int, load: Load) -> list[_Piece]:
    """Equal parts of a load."""
    stages = load.stages
    if load.pieces > 1:
        stages = tuple(replace(stage, seconds=stage.seconds / load.pieces) for stage in stages)
    return [_Piece(number, load.ready, load.urgency, stages)] * max(1, load.pieces)


@dataclass
class _Lane:
    """What waits for a lane, and what it does."""

    name: str
    queue: list[_Waiting] = field(default_factory=list)
    stage: Stage | None = None  # under way, with its piece and position
    piece: int = 0
    position: int = 0
    left: float = 0.0  # seconds of it, at full speed
    speed: float = 1.0
    begin: float = 0.0
    busy: float = 0.0


class _Timeline:
    def __init__(
        self, pieces: Sequence[_Piece], loads: int, backward: float, overlap: float, events: bool
    ) -> None:
        self._pieces, self._backward, self._overlap = pieces, backward, overlap
        self._now = self._progress = 0.0
        self._over = 0.0  # when the backward pass was
        self._next = 0  # of the pieces, in order of readiness
        self._later: list[tuple[float, int, int]] = []  # time, piece, stage: after a delay
        self._lanes: dict[str, _Lane] = {}
        self._done, self._kept, self._events = [0.0] * loads, events, list[Event]()

    def run(self) -> Step:
        while True:
            self._release()
            self._start()
            pace = self._set_speeds()
            seconds = self._until(pace)
            if seconds is None:
                busy = tuple((lane.name, lane.busy) for lane in self._lanes.values())
                done, events = tuple(self._done), tuple(self._events)
                return Step(self._now, self._over, done, busy, events)
            self._advance(seconds, pace)

    @property
    def _passing(self) -> bool:
        return self._progress < self._backward - _EPSILON

    def _release(self) -> None:
        """Begin what has become ready."""
        pieces, here = self._pieces, self._progress + _EPSILON
        while self._next < len(pieces) and pieces[self._next].ready <= here:
            self._enqueue(self._next, 0)
            self._next += 1
        while self._later and self._later[0][0] <= self._now + _EPSILON:
            _, piece, position = heapq.heappop(self._later)
            self._enqueue(piece, position)

    def _enqueue(self, number: int, position: int) -> None:
        piece = self._pieces[number]
        if position == len(piece.stages):
            self._done[piece.load] = self._now
            return
        name, last = piece.stages[position].lane, position == len(piece.stages) - 1
        lane = self._lanes.setdefault(name, _Lane(name))
        order = (last, 0.0) if name == WORK else (False, self._now)
        heapq.heappush(lane.queue, (piece.urgency, *order, number, position))

    def _start(self) -> None:
        for lane in self._lanes.values():
            if lane.stage is None and lane.queue:
                *_, lane.piece, lane.position = heapq.heappop(lane.queue)
                lane.stage = self._pieces[lane.piece].stages[lane.position]
                lane.left, lane.begin = lane.stage.seconds, self._now

    def _set_speeds(self) -> float:
        """Of the lanes; returns that of the backward pass. See [Note: shared cores]."""
        running = [lane.stage for lane in self._lanes.values() if lane.stage is not None]
        cores = min(1.0, sum(stage.cores for stage in running))
        demand = self._passing + any(stage.lane == WORK for stage in running) + cores
        speed = 1.0
        if demand > 1.0:
            speed = min(1.0, (1.0 + self._overlap * (demand - 1.0)) / demand)
        for lane in self._lanes.values():
            if lane.stage is not None:
                shared = 1.0 if lane.name == WORK else min(1.0, lane.stage.cores)
                lane.speed = 1.0 - shared + shared * speed
        return speed * max(0.0, 1.0 - sum(stage.slows for stage in running))

    def _until(self, pace: float) -> float | None:
        """Seconds until something changes; None where nothing will."""
        found = [lane.left / lane.speed for lane in self._lanes.values() if lane.stage is not None]
        ahead = [self._backward] if self._passing else []
        if self._next < len(self._pieces):
            ahead.append(self._pieces[self._next].ready)
        if ahead and (speed := self._speed(pace)):
            found.append(max(0.0, min(ahead) - self._progress) / speed)
        if self._later:
            found.append(max(0.0, self._later[0][0] - self._now))
        return min(found, default=None)

    def _speed(self, pace: float) -> float:
        """How fast gradients become ready: by the clock where the backward pass is over."""
        return pace if self._passing else 1.0

    def _advance(self, seconds: float, pace: float) -> None:
        self._now += seconds
        passing = self._passing
        self._progress += seconds * self._speed(pace)
        if passing:
            self._over = self._now
        for lane in list(self._lanes.values()):  # what ends may be the first to enter another
            if lane.stage is not None:
                lane.left -= seconds * lane.speed
                if lane.left <= _EPSILON:
                    self._finish(lane, lane.stage)

    def _finish(self, lane: _Lane, stage: Stage) -> None:
        lane.stage, lane.busy = None, lane.busy + self._now - lane.begin
        if self._kept:
            load = self._pieces[lane.piece].load
            self._events.append(Event(lane.name, load, lane.position, lane.begin, self._now))
        if stage.delay > 0:
            following = (self._now + stage.delay, lane.piece, lane.position + 1)
            heapq.heappush(self._later, following)
        else:
            self._enqueue(lane.piece, lane.position + 1)
