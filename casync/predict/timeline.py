"""Predicted time of a training step: backward pass, codecs and link on one timeline.

[Note: one rank] To follow every task of every rank takes some tenths of a second for a step of a
large model, and a planner needs hundreds of steps. All ranks do the same, so this simulates one,
with a chain of stages (casync/stages.py) per bucket, each on a lane. A lane takes one stage at a
time: the work lane the most urgent first, like the executor's compute lane, the others in the order
of arrival. Tests compare it with a simulation of every task.

[Note: shared cores] On a CPU the backward pass, codecs and the transfers' threads share cores. The
gain of two threads over one is measured (`Costs.overlap`); if more threads than cores run, all slow
down alike. So encoding during the backward pass delays later gradients. On a device the pass and
codecs share it, and the overlap is that of kernels; transfers take nothing from them (`cores` is
0). If the host compresses a device's gradients, the overlap is that of a thread beside a device.
Other lanes take nothing, unless a stage `slows` the pass, as collectives do that take a device's
processors or memory bandwidth.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from casync import strategies
from casync.cost import FREE, CodecCost, Copies, Costs
from casync.graph.plan import BATCH_BYTES
from casync.stages import ENTER, INSIDE, LEAVE, WIRE, WORK, Item, Setting, Stage
from casync.topology import Topology

__all__ = ["PREDICTED", "Event", "Load", "PredictedStep", "native", "simulate_step", "stages_of"]

_EPSILON = 1e-12
_Waiting = tuple[float, bool, float, int, int]  # urgency, last stage, time of arrival, piece, stage


@dataclass(frozen=True)
class Load:
    """A chain of stages that starts when gradients are ready."""

    ready: float  # seconds of an undisturbed backward pass, and of a clock after its end
    stages: tuple[Stage, ...]
    pieces: int = 1  # successive pieces, so that work and transfers overlap
    urgency: float = 0.0  # a lane serves waiting loads with smaller values first


@dataclass(frozen=True)
class Event:
    """An interval in which a lane was busy. Seconds."""

    lane: str
    load: int  # position of the load
    stage: int  # position in its chain
    begin: float
    end: float


@dataclass(frozen=True)
class PredictedStep:
    """Result of a simulation. Seconds."""

    seconds: float  # until all averages are ready and the backward pass is over
    backward: float  # until the backward pass is over, slowed down by work beside it
    done: tuple[float, ...] = ()  # until the averages of each load are ready
    busy: tuple[tuple[str, float], ...] = ()  # lanes, and seconds in which they were busy
    events: tuple[Event, ...] = ()  # in the order of their ends, if asked for


def simulate_step(
    loads: Sequence[Load], backward: float, overlap: float, events: bool = False
) -> PredictedStep:
    """A step whose backward pass takes `backward` seconds if undisturbed.

    overlap: gain of two threads that share a core, 0 to 1. events: True to keep them.
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
    """Equal pieces of a load."""
    stages = load.stages
    if load.pieces > 1:
        stages = tuple(replace(stage, seconds=stage.seconds / load.pieces) for stage in stages)
    return [_Piece(number, load.ready, load.urgency, stages)] * max(1, load.pieces)


@dataclass
class _Lane:
    """A lane: its queue, and its present stage."""

    name: str
    queue: list[_Waiting] = field(default_factory=list)
    stage: Stage | None = None  # present stage, with its piece and position
    piece: int = 0
    position: int = 0
    remaining: float = 0.0  # seconds of the stage, at full speed
    speed: float = 1.0
    begin: float = 0.0
    busy: float = 0.0


class _Timeline:
    def __init__(
        self, pieces: Sequence[_Piece], loads: int, backward: float, overlap: float, events: bool
    ) -> None:
        self._pieces, self._backward, self._overlap = pieces, backward, overlap
        self._now = self._progress = 0.0
        self._over = 0.0  # time at which the backward pass ended
        self._next = 0  # next piece, in order of readiness
        self._later: list[tuple[float, int, int]] = []  # time, piece, stage: after a delay
        self._lanes: dict[str, _Lane] = {}
        self._done, self._traced, self._events = [0.0] * loads, events, list[Event]()

    def run(self) -> PredictedStep:
        while True:
            self._release()
            self._start()
            pace = self._set_speeds()
            seconds = self._until(pace)
            if seconds is None:
                busy = tuple((lane.name, lane.busy) for lane in self._lanes.values())
                done, events = tuple(self._done), tuple(self._events)
                return PredictedStep(self._now, self._over, done, busy, events)
            self._advance(seconds, pace)

    @property
    def _passing(self) -> bool:
        return self._progress < self._backward - _EPSILON

    def _release(self) -> None:
        """Enqueue the pieces and stages that have become ready."""
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
                lane.remaining, lane.begin = lane.stage.seconds, self._now

    def _set_speeds(self) -> float:
        """Set the speeds of lanes; return that of the backward pass. See [Note: shared cores]."""
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
        """Seconds until the next change; None if there is none."""
        ends = [
            lane.remaining / lane.speed for lane in self._lanes.values() if lane.stage is not None
        ]
        ahead = [self._backward] if self._passing else []
        if self._next < len(self._pieces):
            ahead.append(self._pieces[self._next].ready)
        if ahead and (speed := self._speed(pace)):
            ends.append(max(0.0, min(ahead) - self._progress) / speed)
        if self._later:
            ends.append(max(0.0, self._later[0][0] - self._now))
        return min(ends, default=None)

    def _speed(self, pace: float) -> float:
        """Speed at which gradients become ready: 1 after the backward pass."""
        return pace if self._passing else 1.0

    def _advance(self, seconds: float, pace: float) -> None:
        self._now += seconds
        passing = self._passing
        self._progress += seconds * self._speed(pace)
        if passing:
            self._over = self._now
        for lane in list(self._lanes.values()):  # an ending stage may create a lane
            if lane.stage is not None:
                lane.remaining -= seconds * lane.speed
                if lane.remaining <= _EPSILON:
                    self._finish(lane, lane.stage)

    def _finish(self, lane: _Lane, stage: Stage) -> None:
        lane.stage, lane.busy = None, lane.busy + self._now - lane.begin
        if self._traced:
            load = self._pieces[lane.piece].load
            self._events.append(Event(lane.name, load, lane.position, lane.begin, self._now))
        if stage.delay > 0:
            following = (self._now + stage.delay, lane.piece, lane.position + 1)
            heapq.heappush(self._later, following)
        else:
            self._enqueue(lane.piece, lane.position + 1)


#: strategies whose steps are predicted
PREDICTED = tuple(name for name in strategies.list_strategies() if strategies.load(name).stages)


def native(size: float, costs: Costs) -> tuple[Stage, ...]:
    """Stages of a native all-reduce of `size` bytes."""
    one = Topology.flat(1)
    setting = Setting(one, costs, CodecCost(FREE, FREE), BATCH_BYTES, one)
    return _with_copies((setting.reduce(size, 1, "float32"),), size, costs.copies)


def stages_of(
    strategy: str,
    item: Item,
    codec: CodecCost,
    topology: Topology,
    costs: Costs,
) -> tuple[Stage, ...]:
    """Stages of each rank for `item`, by one of PREDICTED."""
    make = strategies.load(strategy).stages
    assert make is not None
    groups = strategies.groups(strategy, topology)
    setting = Setting(topology, costs, codec, BATCH_BYTES, groups)
    return _with_copies(make(item, setting), item.gradient, costs.copies)


def _with_copies(
    chain: tuple[Stage, ...], gradient: float, copies: Copies | None
) -> tuple[Stage, ...]:
    """The stages with copies from and to a device: of gradients, or of payloads."""
    if copies is None:
        return chain
    if copies.gradients:
        leave, enter = _copies(gradient, copies)
        return (leave, *chain, enter)
    copied: list[Stage] = []
    for stage in chain:
        leave, enter = _copies(stage.size, copies)
        copied += [leave, stage, enter] if stage.lane in (WIRE, INSIDE) else [stage]
    return tuple(copied)


def _copies(size: float, copies: Copies) -> tuple[Stage, Stage]:
    return Stage(LEAVE, copies.leave(size)), Stage(ENTER, copies.enter(size))
