"""The plan of each step: an engine asks one chooser, which may change it between steps."""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any

import torch

from casync.codec import Codec
from casync.cost import Costs
from casync.runtime.options import Capture
from hipress.choose.plan import Plan
from hipress.choose.trial import Tried
from hipress.errors import StateError, SyncError
from hipress.optim.adam import Freezing
from hipress.policies import PolicyState
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.groups import Agreement

log = logging.getLogger("hipress")


class StepEvent(Enum):
    """A moment of a step."""

    BACKWARD_OVER = "the backward pass is over"
    AVERAGED = "all buckets are averaged"


class Chooser:
    """The same plan in each step; others override what they do otherwise. All ranks of a group make
    a chooser with the same calls, and get the same plans."""

    def __init__(self, plan: Plan, codecs: Mapping[str, Codec] | None = None) -> None:
        """codecs: of all possible plans, by key; by default the plan's."""
        self._plan = plan
        #: one may be replaced, in this mapping, before a plan uses it
        self.codecs: MutableMapping[str, Codec] = dict(plan.codecs if codecs is None else codecs)

    @property
    def plan(self) -> Plan:
        """Plan of the current step."""
        return self._plan

    @property
    def observes(self) -> bool:
        """True if `observe` and `mark` should be called."""
        return False

    @property
    def measurements(self) -> PolicyState | None:
        """Measurements that decide later plans; None if a checkpoint needs none."""
        return None

    @property
    def costs(self) -> Costs | None:
        """Costs by which plans were predicted, if they were."""
        return None

    @property
    def tried(self) -> tuple[Tried, ...]:
        """Results of the last trial so far; () before it, or without one."""
        return ()

    @property
    def trial_seconds(self) -> float | None:
        """Extra seconds of the last trial's steps over steps with the kept plan; None before its
        end, or without one."""
        return None

    @property
    def capture(self) -> Capture:
        """Use of CUDA graphs in the current step, unless options decide it."""
        return Capture.NEVER

    def next(self, step: int, uncaptured: str = "") -> Plan:
        """The plan of step `step`, which begins now. uncaptured: the reason why a capture failed on
        this rank in the last step. Raises HipressError if ranks cannot agree."""
        return self.plan

    def observe(
        self, indices: Sequence[int], buffer: torch.Tensor, undelivered: Callable[[], torch.Tensor]
    ) -> None:
        """Take a ready bucket of the step, which is not averaged yet. undelivered: returns what
        this rank has not delivered of these parameters, as a gradient like `buffer`."""

    def mark(self, event: StepEvent) -> None:
        """Note that the step is there. Once it is averaged, codecs that share a device's memory are
        idle, and may be used."""

    def restored(self, saved: Mapping[str, Any]) -> Plan | None:
        """The plan of a saved state (see Plan.by_name); None if there is no such plan."""
        return self.plan if saved == self.plan.by_name else None

    def hold(self, plan: Plan) -> None:
        """Go on with this plan of a loaded state."""
        self._plan = plan

    def close(self) -> None:
        """End the communication with other ranks."""


class Phases(Chooser):
    """A chooser for gradients until an optimizer freezes, then another for its momentum."""

    def __init__(
        self, optimizer: Freezing, before: Chooser, after: Chooser, coordinator: Coordinator
    ) -> None:
        """after: used from the step in which the optimizer is frozen."""
        self._optimizer, self._before, self._after = optimizer, before, after
        #: a view: a chooser replaces its codecs by compiled ones
        self.codecs = ChainMap[str, Codec]({}, after.codecs, before.codecs)
        self._rank = coordinator.rank
        self._agreement = Agreement(coordinator, "freeze")

    @property
    def _now(self) -> Chooser:
        return self._after if self._optimizer.phase.momentum else self._before

    @property
    def plans(self) -> tuple[Plan, Plan]:
        """Plans of gradients and of momentum."""
        return self._before.plan, self._after.plan

    @property
    def plan(self) -> Plan:
        return self._now.plan

    @property
    def observes(self) -> bool:
        return True  # the optimizer takes part in each step

    @property
    def measurements(self) -> PolicyState | None:
        return self._now.measurements

    @property
    def costs(self) -> Costs | None:
        return self._now.costs

    @property
    def tried(self) -> tuple[Tried, ...]:
        return self._now.tried

    @property
    def trial_seconds(self) -> float | None:
        return self._now.trial_seconds

    @property
    def capture(self) -> Capture:
        return self._now.capture

    def next(self, step: int, uncaptured: str = "") -> Plan:
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
        if self._now.observes:
            self._now.observe(indices, buffer, undelivered)

    def mark(self, event: StepEvent) -> None:
        square = self._optimizer.phase.rank_square
        if event is StepEvent.AVERAGED and square is not None and self._agreement.open:
            self._agree_on_norm(square)
        if self._now.observes:
            self._now.mark(event)

    def restored(self, saved: Mapping[str, Any]) -> Plan | None:
        """The plan of a saved state. Raises StateError for a state of the other phase."""
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
        self._now.hold(plan)

    def close(self) -> None:
        self._agreement.close()
        self._before.close()
        self._after.close()
