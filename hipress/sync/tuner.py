"""Which plan the next step goes by: tries those of "auto", keeps one, and looks again.

Every rank asks as a step begins, so all switch between the same two steps. What decides is the same
on all ranks: times of the slowest one, by an all-reduce of a number, after every step of a trial
and once in WINDOW steps from then on.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from casync.predict.cost import Costs
from hipress.errors import ConfigMismatch, SyncError
from hipress.plan import probe
from hipress.plan.rules import Plan
from hipress.plan.trial import WINDOW, Trial, Tried, Watch, results
from hipress.ranks.link import all_reduce_max, connect
from hipress.ranks.meeting import Meeting

if TYPE_CHECKING:
    import torch.distributed as dist

    from casync.codec import Codec
    from hipress.plan.auto import Search

MOST_PATIENCE = 64  # windows
T = TypeVar("T")
log = logging.getLogger("hipress")


class Tuner:
    """Chooses among plans by trying them. All ranks of the meeting must make one, and call `next`
    and `hold` alike."""

    def __init__(
        self,
        search: Search,
        costs: Costs,
        meeting: Meeting,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`costs`: as measured, the same on all ranks. `clock`: in seconds."""
        self._search, self._costs, self._clock, self._meeting = search, costs, clock, meeting
        self._group: dist.ProcessGroup | None = connect(meeting, "trial")  # None after `close`
        self.plans = search.plans(costs)
        self._trial = Trial(len(self.plans), kept=len(self.plans) - 1)  # the native all-reduce
        self._watch, self._patience = Watch(), Watch.patience
        self._begun: float | None = None  # the step that is under way
        self._window: list[float] = []

    @property
    def codecs(self) -> Mapping[str, Codec]:
        """Of all plans that there may be."""
        return {**self._search.codecs, **self._search.overrides.codecs}

    @property
    def plan(self) -> Plan:
        """Of the current step."""
        return self.plans[self._trial.current]

    @property
    def tried(self) -> tuple[Tried, ...]:
        """What the last trial has found so far."""
        labels = [plan.label for plan in self.plans]
        return results(self._trial, labels, [plan.seconds for plan in self.plans])

    @property
    def trial_seconds(self) -> float | None:
        """What the last trial cost: how much longer its steps took than with the plan that was
        kept. None before its end, and where there was none."""
        median = self._trial.median(self._trial.current)
        if not self._trial.over or median is None:
            return None
        return self._trial.spent - self._trial.steps * median

    def next(self) -> Plan:
        """The plan of the step that begins now. Raises HipressError where ranks cannot compare."""
        now = self._clock()
        if self._group is not None and self._begun is not None:
            self._take(now - self._begun, self._group)
        self._begun = self._clock()
        return self.plan

    def hold(self, plan: Plan) -> None:
        """Try no more; keep this one until times drift."""
        self._trial = Trial(len(self.plans), kept=self.plans.index(plan))
        self._trial.stop()
        self._watch, self._begun = Watch(), None
        self._window.clear()

    def close(self) -> None:
        """Compare no more; the others then learn at once that this rank does not."""
        self._group = None  # ends with the last reference

    def _take(self, seconds: float, group: dist.ProcessGroup) -> None:
        """A step took this long, here."""
        if not self._trial.over:
            if self._trial.observe(self._slowest(seconds, group)):
                self._kept()
            return
        self._window.append(seconds)
        if len(self._window) == WINDOW:
            step = self._slowest(statistics.median(self._window), group)
            self._window.clear()
            topology = self._search.topology
            message = self._attend(lambda: probe.message_seconds(group, topology))
            if self._watch.drifted(step, message):
                self._look_again(group)

    def _slowest(self, seconds: float, group: dist.ProcessGroup) -> float:
        """That of the slowest rank."""
        return self._attend(lambda: all_reduce_max([seconds], group)[0])

    def _attend(self, call: Callable[[], T]) -> T:
        try:
            return self._meeting.attend(call, "comparing the times of steps")
        except ConfigMismatch as error:  # another rank failed
            raise SyncError(str(error)) from error

    def _look_again(self, group: dist.ProcessGroup) -> None:
        """Another trial, with the current plan as the one to beat."""
        before, costs, topology = self.plan, self._costs, self._search.topology
        self._costs = self._attend(lambda: probe.measure_link(group, costs, topology))
        facts = before.facts()
        others = [p for p in self._search.plans(self._costs) if p.facts() != facts]
        self.plans = (before, *others)
        self._trial = Trial(len(self.plans), kept=0)
        self._patience = min(2 * self._patience, MOST_PATIENCE)
        if self._trial.over:
            self._kept()

    def _kept(self) -> None:
        """The trial is over."""
        if self._trial.kept != self._trial.current:
            self._patience = Watch.patience  # a look that changes nothing doubles it
        step = self._trial.median(self._trial.current)
        self._watch = Watch(step, patience=self._patience)
        if self._meeting.rank == 0:
            took = "" if step is None else f": {step * 1e3:.4g} ms a step"
            log.info("hipress: after a trial of %d steps, keeps %s%s", self._trial.steps,
                     self.plan.label, took)  # fmt: skip
