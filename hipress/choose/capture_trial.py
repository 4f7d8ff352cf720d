"""A plan that is given, launched task by task or as CUDA graphs, whichever takes less time."""

from __future__ import annotations

import math
from collections.abc import Callable

from casync.memory import Moment
from casync.runtime.options import Capture
from hipress.choose.plan import Plan
from hipress.choose.plan_controller import FixedPlan
from hipress.choose.trial import Trial, Tried, results
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.link import Agreement

STEADY = 3  # steps before the trial; DDP rebuilds its buckets after the first


class CaptureTrial(FixedPlan):
    """A PlanController of the two; see [Note: captured plans] in captured.py. All ranks of the
    group must make one."""

    def __init__(
        self, plans: tuple[Plan, ...], coordinator: Coordinator, moment: Callable[[], Moment]
    ) -> None:
        """plans: the two of `with_captured`. moment: returns the present moment of the memory in
        which gradients are compressed."""
        super().__init__(plans[0])
        self._plans, self._moment = plans, moment
        self._agreement = Agreement(coordinator, "capture")
        self._trial = Trial(len(plans), kept=0)
        self._begun: Moment | None = None  # beginning of the current step
        self._steps = 0

    @property
    def capture(self) -> Capture:
        """Implements PlanController.capture."""
        return capture_of(self.plan, self._trial)

    @property
    def trials(self) -> CaptureTrial:
        """Implements PlanController.trials."""
        return self

    @property
    def costs(self) -> None:
        """Implements Trials.costs: nothing is predicted."""

    @property
    def tried(self) -> tuple[Tried, ...]:
        """Both plans, and their times so far."""
        return results(self._trial, [plan.label for plan in self._plans], [0.0, 0.0])

    @property
    def trial_seconds(self) -> float | None:
        """Implements Trials.trial_seconds."""
        return self._trial.cost

    def next(self, step: int, uncaptured: str = "") -> Plan:
        """Implements PlanController.next; the host waits for the device only in the trial."""
        if self._agreement.open:
            before, self._begun = self._begun, self._moment()
            if before is not None and self._steps >= STEADY:
                self._observe(math.inf if uncaptured else self._begun.since(before))
            self._steps += 1
        return self.plan

    def hold(self, plan: Plan) -> None:
        """Implements PlanController.hold: there is no other plan."""

    def close(self) -> None:
        """Implements PlanController.close."""
        self._agreement.close()

    def _observe(self, seconds: float) -> None:
        (slowest,) = self._agreement.largest([seconds], "comparing the times of steps")
        if self._trial.observe(slowest):
            self._agreement.close()
        self.plan = self._plans[self._trial.current]


def capture_of(plan: Plan, trial: Trial) -> Capture:
    """The use of graphs in a step of a trial, or after it."""
    if not plan.captured:
        return Capture.NEVER
    return Capture.MAKE if trial.settling else Capture.LAUNCH
