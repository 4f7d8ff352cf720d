"""Which plan the next step goes by: watches the first steps, tries plans of "auto", keeps one, and
looks again.

Every rank asks as a step begins, so all switch between the same two steps. What decides is the same
on all ranks: times of the slowest one, by an all-reduce of a number, after every step of a trial
and once in WINDOW steps from then on. The first steps go by the native all-reduce: they show when
gradients are ready and how long payloads are, while codecs are compiled.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from hipress.errors import ConfigMismatch, SyncError
from hipress.plan.rules import Plan, restored
from hipress.plan.trial import WINDOW, Trial, Tried, Watch, results
from hipress.plan.workload import Workload
from hipress.ranks.link import all_reduce_max, connect
from hipress.ranks.meeting import Meeting
from hipress.sync.observer import Observer

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from casync.codec import Codec
    from casync.cost import Costs
    from casync.memory import Moment
    from hipress.plan.places import Places

WATCHED = 3  # steps, at least; DDP makes its buckets anew after the first one
MOST_PATIENCE = 64  # windows
T = TypeVar("T")
Span: TypeAlias = tuple["Moment", "Moment"]  # of a step
log = logging.getLogger("hipress")


class Tuner:
    """Chooses among plans by trying them. All ranks of the meeting must make one, and call `next`
    and `hold` alike."""

    def __init__(
        self,
        places: Places,
        compiling: Future[dict[str, Codec]],
        meeting: Meeting,
        when: str = "",
    ) -> None:
        """`places`: with costs of links, the same on all ranks. `compiling`: the codecs that these
        may use. `when`: what tells it from another tuner of the meeting."""
        search, memory = places.first.search, places.first.site.memory
        self._places, self._meeting, self._moment = places, meeting, memory.moment
        self._compiling = compiling
        self._group: dist.ProcessGroup | None = connect(
            meeting, f"trial{when}"
        )  # None after `close`
        self.plans: tuple[Plan, ...] = (search.unplanned(),)
        self._trial = Trial(1, kept=0)
        self._observer: Observer | None = Observer(search.params, memory)  # None after some steps
        self._workload: Workload | None = None  # None where it was not watched
        self._watch, self._in_vain = Watch(), 0  # trials in a row that changed nothing
        self._begun: Moment | None = None  # the step that is under way
        self._window: list[Span] = []
        #: of all plans that there may be
        self.codecs: dict[str, Codec] = {**places.codecs, **search.overrides.codecs}

    @property
    def costs(self) -> Costs:
        """See Chooser."""
        return self._places.told

    @property
    def plan(self) -> Plan:
        """Of the current step."""
        return self.plans[self._trial.current]

    @property
    def tried(self) -> tuple[Tried, ...]:
        """What the last trial has found so far; () before it."""
        if self._observer is not None:
            return ()
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

    def next(self, step: int) -> Plan:
        """See Chooser."""
        now = self._moment()
        if self._observer is not None:
            self._observer.begin(now)
        if self._group is not None and self._begun is not None:
            self._take((self._begun, now), self._group)
        self._begun = self._moment()
        return self.plan

    def handed(
        self, indices: Sequence[int], buffer: torch.Tensor, unsent: Callable[[], torch.Tensor]
    ) -> None:
        """See Chooser."""
        if self._observer is not None:
            self._observer.handed(indices, buffer, self._moment())

    def backward_over(self) -> None:
        """See Chooser."""
        if self._observer is not None:
            self._observer.backward_over(self._moment())

    def averaged(self) -> None:
        """See Chooser."""
        if self._observer is not None:
            self._observer.averaged(self._moment())

    def restored(self, saved: Mapping[str, Any]) -> Plan | None:
        """See Chooser."""
        search = self._places.first.search
        return restored(saved, search.params, self.codecs, search.topology)

    def hold(self, plan: Plan) -> None:
        """Try no more; keep this one until times drift."""
        if plan not in self.plans:
            self.plans = (plan, *self.plans)
        if self._observer is not None:
            self._settle(self._compiling.result())
            self._observer = None
        self._trial = Trial(len(self.plans), kept=self.plans.index(plan))
        self._trial.stop()
        self._watch, self._begun = Watch(), None
        self._window.clear()

    def close(self) -> None:
        """Compare no more; the others then learn at once that this rank does not."""
        self._group = None  # ends with the last reference
        self._places.close()

    def _take(self, span: Span, group: dist.ProcessGroup) -> None:
        """A step was taken. On a device the host waits for its time only where that decides."""
        if self._observer is not None:
            compiling = self._slowest(float(not self._compiling.done()), group)
            if self._observer.steps >= WATCHED and not compiling:
                self._plan(self._observer, group)
        elif not self._trial.over:
            if self._trial.observe(self._slowest(_seconds(span), group)):
                self._kept()
        else:
            self._window.append(span)
            if len(self._window) == WINDOW:
                self._compare(group)

    def _plan(self, observer: Observer, group: dist.ProcessGroup) -> None:
        """The first steps have been watched: begin the trial."""
        codecs = self._attend(self._compiling.result)
        self._settle(codecs)
        self._places = self._attend(lambda: self._places.measure_codecs(group))
        self._workload = self._attend(
            lambda: observer.workload(lambda values: all_reduce_max(values, group), self._first)
        )
        self._observer = None
        self._try(self._places.plans(self._workload))

    @property
    def _first(self) -> Mapping[str, Codec]:
        """What may be used where the model is."""
        return self._places.first.search.codecs

    def _settle(self, codecs: Mapping[str, Codec]) -> None:
        """From now on go by what was compiled."""
        self._places = self._places.compiled(codecs)
        self.codecs.update(codecs)

    def _try(self, plans: tuple[Plan, ...]) -> None:
        self.plans = plans
        self._trial = Trial(len(plans), kept=len(plans) - 1)  # the native all-reduce
        if self._trial.over:
            self._kept()

    def _compare(self, group: dist.ProcessGroup) -> None:
        """A window is full: see whether times have drifted."""
        step = self._slowest(statistics.median(map(_seconds, self._window)), group)
        self._window.clear()
        message = self._attend(lambda: self._places.message_seconds(group))
        if self._watch.drifted(step, message):
            self._look_again(group)

    def _slowest(self, seconds: float, group: dist.ProcessGroup) -> float:
        """That of the slowest rank."""
        return self._attend(lambda: all_reduce_max([seconds], group)[0])

    def _attend(self, call: Callable[[], T]) -> T:
        try:
            return self._meeting.attend(call, "comparing the times of steps")
        except BaseException as error:
            self._places.abort()
            if isinstance(error, ConfigMismatch):  # another rank failed
                raise SyncError(str(error)) from error
            raise

    def _look_again(self, group: dist.ProcessGroup) -> None:
        """Another trial, with the current plan as the one to beat."""
        before = self.plan
        self._places = self._attend(lambda: self._places.measure_links(group))
        if not self.costs.codecs:  # after `hold`
            self._places = self._attend(lambda: self._places.measure_codecs(group))
        facts = before.facts()
        others = [p for p in self._places.plans(self._workload) if p.facts() != facts]
        self.plans = (before, *others)
        self._trial = Trial(len(self.plans), kept=0)
        if self._trial.over:
            self._kept()

    def _kept(self) -> None:
        """The trial is over."""
        self._in_vain = self._in_vain + 1 if self._trial.kept == self._trial.current else 0
        patience = min(Watch.patience * 2 ** max(0, self._in_vain - 1), MOST_PATIENCE)
        step = self._trial.median(self._trial.current)
        self._watch = Watch(step, patience=patience)
        if self._meeting.rank == 0:
            took = "" if step is None else f": {step * 1e3:.4g} ms a step"
            log.info("hipress: after a trial of %d steps, keeps %s%s", self._trial.steps,
                     self.plan.label, took)  # fmt: skip


def _seconds(span: Span) -> float:
    begin, end = span
    return end.since(begin)
