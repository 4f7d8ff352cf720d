"""Choosers that try plans in real steps: `CaptureTrial` a given plan with CUDA graphs and without,
`Tuner` those of "auto", which it chooses after it has observed some steps.

Every rank asks as a step begins, so all switch between the same two steps. Decisions depend on
values that are the same on all ranks: times of the slowest one, by an all-reduce of a number, after
every step of a trial and later once in WINDOW steps. The first steps use the native all-reduce:
they show when gradients are ready and how long payloads are, while codecs are compiled.

[Note: captured plans] With capture="auto" such a plan takes turns with the same one launched task
by task, and is kept if its steps are faster. In the first steps of a turn graphs are made, and
tasks launched: a rank where that fails says so, and no rank launches a graph. Averages have the
same bits either way, and a graph ends with the plan, its buckets, or its states (see [Note:
capture] in casync/runtime/capture.py). DDP's buckets live as long as DDP; those of a Synchronizer
would only live on for their graphs, which is why it captures only if it is told to.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from casync.codec import Codec
from casync.cost import Costs
from casync.memory import Moment
from casync.runtime.capture import capture_obstacle
from casync.runtime.options import Capture
from casync.shutdown import close_at_exit
from hipress.choose.chooser import Chooser, StepEvent
from hipress.choose.places import Places
from hipress.choose.plan import Plan, restored
from hipress.choose.trial import WINDOW, Trial, Tried, Watch, results
from hipress.choose.workload import Observer, Workload
from hipress.options import AUTO, Options
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.groups import Agreement, all_reduce_max
from hipress.ranks.store import fulfil

__all__ = ["Compilation"]

WATCHED = 3  # least number of steps before a trial; DDP rebuilds its buckets after the first
MOST_PATIENCE = 64  # windows
LINK = "measuring the link"
_PATIENCE = 5.0  # seconds that Compilation.close waits for the codec that is being compiled
T = TypeVar("T")
Span: TypeAlias = tuple[Moment, Moment]  # beginning and end of a step
log = logging.getLogger("hipress")


def forbidden(plan: Plan, options: Options) -> str:
    """The reason why a plan over NCCL is not tried with CUDA graphs; "" if it is."""
    if options.capture != AUTO:
        return f"capture={options.capture}"
    if options.policy is not None:
        return "a policy changes what is launched"
    if not plan.compresses or plan.hosted:
        return "nothing is compressed on the GPU"
    return capture_obstacle(plan.codecs)


def with_captured(plan: Plan, options: Options, *, by_nccl: bool) -> tuple[Plan, ...]:
    """The plan, and it captured if that may be tried."""
    if not by_nccl or forbidden(plan, options):
        return (plan,)
    return plan, replace(plan, captured=True)


class Compilation:
    """A thread that compiles the codecs of places."""

    def __init__(self, places: Places) -> None:
        self._stopped = threading.Event()
        self._codecs: Future[dict[str, Codec]] = Future()
        work = partial(fulfil, self._codecs, partial(places.compile, self._refuse_stopped))
        self._thread = threading.Thread(target=work, name="hipress-compile", daemon=True)
        self._thread.start()
        close_at_exit(self)

    def done(self) -> bool:
        """True if `result` does not wait."""
        return self._codecs.done()

    def result(self) -> dict[str, Codec]:
        """The compiled codecs, by key. Raises the error that ended the compilation, CancelledError
        after `stop`."""
        return self._codecs.result()

    def stop(self) -> None:
        """Let the thread end before its next codec."""
        self._stopped.set()

    def close(self) -> None:
        """Stop, and wait for that: no compiler may run as the interpreter ends."""
        self.stop()
        self._thread.join(_PATIENCE)

    def _refuse_stopped(self) -> None:
        if self._stopped.is_set():
            raise CancelledError


class Trying(Chooser):
    """Plans that take turns in a trial, by the times of steps on the slowest rank."""

    def __init__(
        self,
        plans: tuple[Plan, ...],
        coordinator: Coordinator,
        purpose: str,
        moment: Callable[[], Moment],
        codecs: Mapping[str, Codec] | None = None,
    ) -> None:
        """purpose: of the connections by which ranks agree. moment: returns the present moment of
        the memory in which gradients are compressed."""
        super().__init__(plans[0], codecs)
        self._moment, self._agreement = moment, Agreement(coordinator, purpose)
        self.plans = plans
        self._trial = Trial(len(plans), kept=0)
        self._begun: Moment | None = None  # beginning of the current step

    @property
    def plan(self) -> Plan:
        return self.plans[self._trial.current]

    @property
    def tried(self) -> tuple[Tried, ...]:
        labels = [plan.label for plan in self.plans]
        return results(self._trial, labels, [plan.seconds for plan in self.plans])

    @property
    def trial_seconds(self) -> float | None:
        return self._trial.cost

    @property
    def capture(self) -> Capture:
        if not self.plan.captured:
            return Capture.NEVER
        return Capture.MAKE if self._trial.settling else Capture.LAUNCH

    def next(self, step: int, uncaptured: str = "") -> Plan:
        if self._agreement.open:  # the host waits for a device's moments only if one is decided by
            before, now = self._begun, self._moment()
            if before is not None:
                self._take_step((before, now), uncaptured)
            self._begun = self._moment()
        return self.plan

    def close(self) -> None:
        self._agreement.close()

    def _take_step(self, span: Span, uncaptured: str) -> None:
        """Decide by a step's time."""
        raise NotImplementedError

    def _try_step(self, span: Span, uncaptured: str) -> bool:
        """Take a step of the trial; True if that is over."""
        return self._trial.observe(self._slowest(math.inf if uncaptured else _seconds(span)))

    def _slowest(self, seconds: float) -> float:
        """The seconds of the slowest rank."""
        return self._agree(
            lambda group: all_reduce_max([seconds], group)[0], "comparing the times of steps"
        )

    def _agree(self, call: Callable[[dist.ProcessGroup], T], what: str) -> T:
        """The result of a call that every rank makes. what: the call's name in errors."""
        return self._agreement.run_in_step(call, what)


class CaptureTrial(Trying):
    """A plan that is given, launched task by task or as CUDA graphs, whichever takes less time; see
    [Note: captured plans]."""

    def __init__(
        self, plans: tuple[Plan, ...], coordinator: Coordinator, moment: Callable[[], Moment]
    ) -> None:
        """plans: the two of `with_captured`."""
        super().__init__(plans, coordinator, "capture", moment)
        self._steps = 0

    def hold(self, plan: Plan) -> None:
        """There is no other plan."""

    def _take_step(self, span: Span, uncaptured: str) -> None:
        self._steps += 1
        if self._steps >= WATCHED and self._try_step(span, uncaptured):
            self._agreement.close()


class Tuner(Trying):
    """Plans of "auto", by prediction and trial; it keeps the fastest, and watches for changes."""

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
        codecs = {**places.codecs, **search.overrides.codecs}
        plans = (search.unplanned(),)
        super().__init__(plans, coordinator, f"trial{when}", memory.moment, codecs)
        self._places, self._coordinator, self._compilation = places, coordinator, compilation
        self._observer: Observer | None = Observer(search.params, memory)  # None after some steps
        self._workload: Workload | None = None  # None if it was not observed
        self._watch, self._in_vain = Watch(), 0  # successive trials without a change
        self._window: list[Span] = []

    @property
    def observes(self) -> bool:
        return self._observer is not None

    @property
    def costs(self) -> Costs:
        return self._places.reported

    @property
    def tried(self) -> tuple[Tried, ...]:
        return () if self._observer is not None else super().tried

    def next(self, step: int, uncaptured: str = "") -> Plan:
        if self._observer is not None:
            self._observer.begin()
        return super().next(step, uncaptured)

    def observe(
        self, indices: Sequence[int], buffer: torch.Tensor, undelivered: Callable[[], torch.Tensor]
    ) -> None:
        if self._observer is not None:
            self._observer.observe(indices, buffer)

    def mark(self, event: StepEvent) -> None:
        if self._observer is not None:
            self._observer.mark(event)

    def restored(self, saved: Mapping[str, Any]) -> Plan | None:
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
        super().close()
        self._compilation.stop()
        self._places.close()

    def _take_step(self, span: Span, uncaptured: str) -> None:
        if self._observer is not None:
            compiling = self._slowest(float(not self._compilation.done()))
            if self._observer.steps >= WATCHED and not compiling:
                self._try_first(self._observer)
        elif not self._trial.over:
            if self._try_step(span, uncaptured):
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

    def _measure_codecs(self) -> None:
        self._places = self._agree(self._places.measure_codecs, "measuring compressors")

    def _agree(self, call: Callable[[dist.ProcessGroup], T], what: str) -> T:
        try:
            return super()._agree(call, what)
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
