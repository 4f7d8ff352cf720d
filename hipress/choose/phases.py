"""Two phases: a controller for gradients until an optimizer freezes, then one for its momentum."""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from casync.codec import Codec
from casync.runtime.options import Capture
from hipress.choose.plan import Plan
from hipress.choose.plan_controller import (
    Measurements,
    PlanController,
    StepEvent,
    StepObserver,
    Trials,
)
from hipress.errors import StateError, SyncError
from hipress.optim.adam import Freezing
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.link import Agreement

log = logging.getLogger("hipress")


class Phases:
    """A PlanController that delegates to one of two, and a StepObserver, since the optimizer takes
    part in each step. All ranks of the group must make one."""

    def __init__(
        self,
        optimizer: Freezing,
        before: PlanController,
        after: PlanController,
        coordinator: Coordinator,
    ) -> None:
        """after: used from the step in which the optimizer is frozen."""
        self._optimizer, self._before, self._after = optimizer, before, after
        #: a view: a tuner replaces its codecs by compiled ones
        self.codecs = ChainMap[str, Codec]({}, after.codecs, before.codecs)
        self._rank = coordinator.rank
        self._agreement = Agreement(coordinator, "freeze")

    @property
    def _now(self) -> PlanController:
        return self._after if self._optimizer.phase.momentum else self._before

    @property
    def plans(self) -> tuple[Plan, Plan]:
        """Plans of gradients and of momentum."""
        return self._before.plan, self._after.plan

    @property
    def plan(self) -> Plan:
        """Implements PlanController.plan."""
        return self._now.plan

    @property
    def observer(self) -> StepObserver:
        """Implements PlanController.observer."""
        return self

    @property
    def measurements(self) -> Measurements | None:
        """Implements PlanController.measurements."""
        return self._now.measurements

    @property
    def trials(self) -> Trials | None:
        """Implements PlanController.trials."""
        return self._now.trials

    @property
    def capture(self) -> Capture:
        """Implements PlanController.capture."""
        return self._now.capture

    def next(self, step: int, uncaptured: str = "") -> Plan:
        """Implements PlanController.next."""
        if not self._optimizer.phase.momentum and self._agreement.open:
            self._agree()
        return self._now.next(step, uncaptured)

    def _agree(self) -> None:
        """Freeze before this step if all ranks want to. Their inputs are equal to the last bit with
        equal kernels and numbers of threads; they are asked nevertheless."""
        due, steps = self._optimizer.due(), self._optimizer.steps
        ours = [-float(due), float(steps), -float(steps)]
        largest = self._agreement.largest(ours, "agreeing on a freeze")
        all_due, most, fewest = -largest[0], largest[1], -largest[2]
        if most != fewest:
            raise SyncError(
                f"ranks have taken between {fewest:.0f} and {most:.0f} steps of their optimizer, "
                f"this one {steps}, so they would freeze at different ones. Every rank must call "
                "optimizer.step() after the same averages, and load the same state of it"
            )
        if all_due:
            if self._rank == 0 and self._optimizer.early:
                log.warning("hipress: %s", self._optimizer.early)
            self._optimizer.freeze_now()

    def _agree_on_norm(self, square: torch.Tensor) -> None:
        """Let all ranks take the middle of their largest and least norm, as one rank may save the
        optimizer for all."""
        ours = [float(square), -float(square)]
        largest, least = self._agreement.largest(ours, "agreeing on a norm")
        self._optimizer.phase.rank_square = square.new_tensor((largest - least) / 2)

    def observe(
        self, indices: Sequence[int], buffer: torch.Tensor, undelivered: Callable[[], torch.Tensor]
    ) -> None:
        """Implements StepObserver.observe."""
        if self._now.observer is not None:
            self._now.observer.observe(indices, buffer, undelivered)

    def mark(self, event: StepEvent) -> None:
        """Implements StepObserver.mark."""
        square = self._optimizer.phase.rank_square
        if event is StepEvent.AVERAGED and square is not None and self._agreement.open:
            self._agree_on_norm(square)
        if self._now.observer is not None:
            self._now.observer.mark(event)

    def restored(self, saved: Mapping[str, Any]) -> Plan | None:
        """Implements PlanController.restored. Raises StateError for a state of the other phase."""
        plan = self._now.restored(saved)
        frozen = self._optimizer.phase.momentum
        other = self._before if frozen else self._after
        if plan is None and other.restored(saved) is not None:
            when = ("before", "after") if frozen else ("after", "before")
            raise StateError(
                f"the state was saved {when[0]} the freeze, and the optimizer is as {when[1]} it: "
                "load the optimizer's state of the same step first"
            )
        return plan

    def hold(self, plan: Plan) -> None:
        """Implements PlanController.hold."""
        self._now.hold(plan)

    def close(self) -> None:
        """Implements PlanController.close."""
        self._agreement.close()
        self._before.close()
        self._after.close()
