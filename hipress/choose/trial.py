"""Trials: plans are tried in real steps, and the fastest is kept.

[Note: turns] A prediction only selects the plans to try. They take turns in the first steps of
training, so that a busy moment of the machine does not decide. Every time is that of the slowest
rank, so all ranks know the same times and decide alike. The first steps of a turn do not count:
buffers are made, and DDP rebuilds its buckets after one step. A plan that is clearly slower than
another one is dropped as soon as that shows, and so is one that cannot run as planned.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

TURNS = 2  # turns of a plan
COUNTED = 5  # counted steps of a turn; ten per plan
SETTLING = 2  # uncounted first steps of a turn
SLOW = 1.25  # times the best median: a plan with two steps above that is dropped
REFUSED = "could not be captured"  # verdict on a plan that could not run
DRIFT = 0.25  # relative change of a step's or message's time that starts a new trial
WINDOW = 25  # steps of a median; two windows in a row must have drifted
MESSAGE_NOISE = 1e-3  # seconds: smaller differences of a message's time are ignored


@dataclass
class Trial:
    """Plans in turns, by position. `observe` takes each step's time; `current` is the next plan."""

    plans: int
    kept: int  # kept unless another wins by more than the spread
    times: list[list[float]] = field(init=False)  # seconds of counted steps, by plan
    current: int = field(default=0, init=False)
    spent: float = field(default=0.0, init=False)  # seconds of all steps
    steps: int = field(default=0, init=False)
    refused: set[int] = field(default_factory=set, init=False)  # plans that could not run

    def __post_init__(self) -> None:
        self.times = [[] for _ in range(self.plans)]
        self._waiting = [*range(self.plans)] * TURNS
        self._left = 0  # steps of this turn
        self._begin()

    @property
    def over(self) -> bool:
        """True if there is nothing left to try; `current` is the choice then."""
        return self._left == 0

    @property
    def settling(self) -> bool:
        """True in the uncounted first steps of a turn."""
        return self._left > COUNTED

    def observe(self, seconds: float) -> bool:
        """Take a step's seconds by `current` on the slowest rank, math.inf if the plan could not
        run; True if the trial is over."""
        if math.isinf(seconds):
            self.refused.add(self.current)
            self.times[self.current].clear()
            self._begin()
            return self.over
        self.spent += seconds
        self.steps += 1
        self._left -= 1
        if self._left < COUNTED:
            self.times[self.current].append(seconds)
            if self._lost(self.current):
                self._left = 0
        if self._left == 0:
            self._begin()
        return self.over

    @property
    def cost(self) -> float | None:
        """Seconds of all steps beyond those of as many with the choice; None before the end, or
        without a trial."""
        median = self.median(self.current)
        return self.spent - self.steps * median if self.over and median is not None else None

    def stop(self) -> None:
        """Stop trying."""
        self._waiting, self._left = [], 0
        self.current = self._choice()

    def median(self, plan: int) -> float | None:
        """Median seconds of a plan's counted steps; None without any."""
        return statistics.median(self.times[plan]) if self.times[plan] else None

    def spread(self, plan: int) -> float:
        """Median deviation, in seconds, of a plan's counted steps from their median."""
        middle = statistics.median(self.times[plan])
        return statistics.median(abs(each - middle) for each in self.times[plan])

    def _begin(self) -> None:
        """Begin the next turn, or make the choice."""
        left = [plan for plan in range(self.plans) if not self._lost(plan)]
        waiting = [plan for plan in self._waiting if plan in left] if len(left) > 1 else []
        self._left = SETTLING + COUNTED if waiting else 0
        self.current = waiting[0] if waiting else self._choice()
        self._waiting = waiting[1:]

    def _lost(self, plan: int) -> bool:
        """True if this plan cannot run, or is clearly slower than another one."""
        if plan in self.refused:
            return True
        mine, others = self.times[plan], self.times[:plan] + self.times[plan + 1 :]
        medians = [statistics.median(times) for times in others if len(times) > 1]
        return len(mine) > 1 and bool(medians) and min(mine[-2:]) > SLOW * min(medians)

    def _choice(self) -> int:
        tried = [plan for plan in range(self.plans) if self.times[plan]]
        best = min(tried, key=lambda plan: statistics.median(self.times[plan]), default=self.kept)
        if self.kept not in tried:
            return best
        gain = statistics.median(self.times[self.kept]) - statistics.median(self.times[best])
        return best if gain > max(self.spread(self.kept), self.spread(best)) else self.kept


@dataclass
class Watch:
    """Detects steps, or a link, that have changed since a plan was chosen."""

    step: float | None = None  # seconds at the choice; None: of the first window
    message: float | None = None  # seconds at the choice
    patience: int = 2  # windows in a row
    drifting: int = field(default=0, init=False)

    def drifted(self, step: float, message: float) -> bool:
        """Take a window's median step and a message's time, of the slowest rank; return True if the
        choice should be made again."""
        self.step = step if self.step is None else self.step
        self.message = message if self.message is None else self.message
        link = abs(message - self.message) > MESSAGE_NOISE and _far(message, self.message)
        self.drifting = self.drifting + 1 if link or _far(step, self.step) else 0
        return self.drifting >= self.patience


def _far(now: float, before: float) -> bool:
    return abs(now - before) > DRIFT * before


@dataclass(frozen=True)
class Tried:
    """A plan as predicted and as measured. Seconds are of the slowest rank; None: not tried."""

    plan: str
    predicted_seconds: float  # of a step
    steps: int  # counted steps
    step_seconds: float | None
    spread_seconds: float | None
    verdict: str


def results(trial: Trial, labels: Sequence[str], predicted: Sequence[float]) -> tuple[Tried, ...]:
    """Results of a trial, by plan."""
    return tuple(
        Tried(
            label,
            seconds,
            len(trial.times[plan]),
            trial.median(plan),
            trial.spread(plan) if trial.times[plan] else None,
            _verdict(trial, plan),
        )
        for plan, (label, seconds) in enumerate(zip(labels, predicted, strict=True))
    )


def _verdict(trial: Trial, plan: int) -> str:
    if not trial.over:
        return "being tried"
    if plan == trial.current:
        return "kept"
    if plan in trial.refused:
        return REFUSED
    mine, best = trial.median(plan), trial.median(trial.current)
    if mine is None or best is None:
        return "not tried"
    return "slower" if mine >= best else "faster by less than the spread"
