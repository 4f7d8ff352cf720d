"""The tuner of "auto": observes the first steps, tries plans, keeps one, and watches for changes.

Every rank asks as a step begins, so all switch between the same two steps. Decisions depend on
values that are the same on all ranks: times of the slowest one, by an all-reduce of a number, after
every step of a trial and later once in WINDOW steps. The first steps use the native all-reduce:
they show when gradients are ready and how long payloads are, while codecs are compiled.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from casync.codec import Codec
from casync.cost import Costs
from casync.memory import Moment
from casync.runtime.options import Capture
from hipress.choose.capture_trial import capture_of
from hipress.choose.captured import with_captured
from hipress.choose.compilation import Compilation
from hipress.choose.observer import Observer
from hipress.choose.places import Places
from hipress.choose.plan import Plan, restored
from hipress.choose.plan_controller import Measurements
from hipress.choose.trial import WINDOW, Trial, Tried, Watch, results
from hipress.choose.workload import Workload
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.link import Agreement, all_reduce_max

WATCHED = 3  # least number of observed steps; DDP rebuilds its buckets after the first
MOST_PATIENCE = 64  # windows
LINK = "measuring the link"
T = TypeVar("T")
Span: TypeAlias = tuple[Moment, Moment]  # beginning and end of a step
log = logging.getLogger("hipress")


class Tuner:
    """Chooses among plans by trying them. All ranks must make one, with the same calls."""

    #: a checkpoint's plan is kept as it is
    measurements: Measurements | None = None

    def __init__(
        self,
        places: Places,
        compilation: Compilation,
        coordinator: Coordinator,
        when: str = "",
    ) -> None:
        """places: with costs of links, the same on all ranks. compilation: of the codecs that
        these may use. when: a suffix that distinguishes several tuners of a coordinator."""
        search, memory = places.first.search, places.first.setup.memory
        self._places, self._coordinator, self._moment = places, coordinator, memory.moment
        self._compilation = compilation
        self._agreement = Agreement(coordinator, f"trial{when}")
        self.plans: tuple[Plan, ...] = (search.unplanned(),)
        self._trial = Trial(1, kept=0)
        self._observer: Observer | None = Observer(search.params, memory)  # None after some steps
        self._workload: Workload | None = None  # None if it was not observed
        self._watch, self._in_vain = Watch(), 0  # successive trials without a change
        self._begun: Moment | None = None  # beginning of the current step
        self._window: list[Span] = []
        #: of all possible plans
        self.codecs: dict[str, Codec] = {**places.codecs, **search.overrides.codecs}

    @property
    def observer(self) -> Observer | None:
        """Implements PlanController.observer: the first steps are observed."""
        return self._observer

    @property
    def trials(self) -> Tuner:
        """Implements PlanController.trials."""
        return self

    @property
    def costs(self) -> Costs:
        """Implements Trials.costs."""
        return self._places.reported

    @property
    def plan(self) -> Plan:
        """Plan of the current step."""
        return self.plans[self._trial.current]

    @property
    def tried(self) -> tuple[Tried, ...]:
        """Results of the last trial so far; () before it."""
        if self._observer is not None:
            return ()
        labels = [plan.label for plan in self.plans]
        return results(self._trial, labels, [plan.seconds for plan in self.plans])

    @property
    def trial_seconds(self) -> float | None:
        """Implements Trials.trial_seconds."""
        return self._trial.cost

    @property
    def capture(self) -> Capture:
        """Implements PlanController.capture."""
        return capture_of(self.plan, self._trial)

    def next(self, step: int, uncaptured: str = "") -> Plan:
        """Implements PlanController.next."""
        now = self._moment()
        if self._observer is not None:
            self._observer.begin()
        if self._agreement.open and self._begun is not None:
            self._observe_step((self._begun, now), uncaptured)
        self._begun = self._moment()
        return self.plan

    def restored(self, saved: Mapping[str, Any]) -> Plan | None:
        """Implements PlanController.restored."""
        search = self._places.first.search
        return restored(saved, search.params, self.codecs, search.topology)

    def hold(self, plan: Plan) -> None:
        """Try at most if this plan gains by CUDA graphs, and keep it until times drift."""
        if self._observer is not None:
            self._use_compiled(self._compilation.result())
            self._observer = None
        self.plans = self._with_captured((plan,))
        self._trial = Trial(len(self.plans), kept=0)
        self._watch, self._begun = Watch(), None
        self._window.clear()

    def close(self) -> None:
        """Implements PlanController.close."""
        self._compilation.stop()
        self._agreement.close()
        self._places.close()

    def _observe_step(self, span: Span, uncaptured: str) -> None:
        """Decide by a step's time; the host waits for a device's only if a decision needs it."""
        if self._observer is not None:
            compiling = self._slowest(float(not self._compilation.done()))
            if self._observer.steps >= WATCHED and not compiling:
                self._try_first(self._observer)
        elif not self._trial.over:
            seconds = math.inf if uncaptured else _seconds(span)
            if self._trial.observe(self._slowest(seconds)):
                self._end_trial()
        else:
            self._window.append(span)
            if len(self._window) == WINDOW:
                self._compare()

    def _try_first(self, observer: Observer) -> None:
        """Begin the first trial, after steps have been observed."""
        self._use_compiled(self._compilation.result())  # all ranks have compiled
        self._measure_codecs()
        codecs = self._places.first.search.codecs
        self._workload = self._agree(
            lambda group: observer.workload(lambda values: all_reduce_max(values, group), codecs),
            "comparing the times of gradients",
        )
        self._observer = None
        plans = self._with_captured(self._places.plans(self._workload))
        self._try(plans, kept=len(plans) - 1)  # the native all-reduce

    def _use_compiled(self, codecs: Mapping[str, Codec]) -> None:
        self._places.use_compiled(codecs)
        self.codecs.update(codecs)

    def _try(self, plans: tuple[Plan, ...], kept: int) -> None:
        """Begin a trial of the plans, of which number `kept` stays unless another one wins."""
        self.plans, self._trial = plans, Trial(len(plans), kept)
        if self._trial.over:
            self._end_trial()

    def _with_captured(self, plans: Iterable[Plan]) -> tuple[Plan, ...]:
        """The plans, each followed by it captured if that may be tried."""
        search = self._places.first.search
        each = (with_captured(plan, search.options, by_nccl=search.slots) for plan in plans)
        return tuple(chain.from_iterable(each))

    def _compare(self) -> None:
        """Check, after a full window, if times have drifted."""
        step = self._slowest(statistics.median(map(_seconds, self._window)))
        self._window.clear()
        if self._watch.drifted(step, self._agree(self._places.message_seconds, LINK)):
            self._look_again()

    def _slowest(self, seconds: float) -> float:
        """The seconds of the slowest rank."""
        return self._agree(
            lambda group: all_reduce_max([seconds], group)[0], "comparing the times of steps"
        )

    def _measure_codecs(self) -> None:
        self._places = self._agree(self._places.measure_codecs, "measuring compressors")

    def _agree(self, call: Callable[[dist.ProcessGroup], T], what: str) -> T:
        """The result of a call that every rank makes. what: the call's name in errors."""
        try:
            return self._agreement.run_in_step(call, what)
        except BaseException:
            self._places.abort()
            raise

    def _look_again(self) -> None:
        """Begin another trial, with the current plan as the one to beat."""
        before = self.plan
        self._places = self._agree(self._places.measure_links, LINK)
        if not self.costs.codecs:  # after `hold`
            self._measure_codecs()
        plans = self._places.plans(self._workload)
        variants = self._with_captured(plan.owned_as(before) for plan in plans)
        others = [plan for plan in variants if plan.facts() != before.facts()]
        self._try((before, *others), kept=0)

    def _end_trial(self) -> None:
        """Keep the plan, and watch for times that differ from its own."""
        self._in_vain = self._in_vain + 1 if self._trial.kept == self._trial.current else 0
        patience = min(Watch.patience * 2 ** max(0, self._in_vain - 1), MOST_PATIENCE)
        step = self._trial.median(self._trial.current)
        self._watch = Watch(step, patience=patience)
        if self._coordinator.rank == 0:
            seconds = "" if step is None else f": {step * 1e3:.4g} ms a step"
            log.info("hipress: after a trial of %d steps, keeps %s%s", self._trial.steps,
                     self.plan.label, seconds)  # fmt: skip


def _seconds(span: Span) -> float:
    begin, end = span
    return end.since(begin)
