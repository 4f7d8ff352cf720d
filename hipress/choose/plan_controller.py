"""The interface of plan choosers, which may change an engine's plan between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any, Protocol

import torch

from casync.codec import Codec
from casync.cost import Costs
from casync.runtime.options import Capture
from hipress.choose.plan import Plan
from hipress.choose.trial import Tried

__all__ = ["FixedPlan"]


class StepEvent(Enum):
    """A moment of a step."""

    BACKWARD_OVER = "the backward pass is over"
    AVERAGED = "all buckets are averaged"


class StepObserver(Protocol):
    """Sees each step of an engine. All ranks make the calls alike."""

    def observe(
        self, indices: Sequence[int], buffer: torch.Tensor, undelivered: Callable[[], torch.Tensor]
    ) -> None:
        """Take a ready bucket of the step, which is not averaged yet. undelivered: returns what
        this rank has not delivered of these parameters, as a gradient like `buffer`."""
        ...

    def mark(self, event: StepEvent) -> None:
        """Note that the step is there. Once it is averaged, codecs that share a device's memory are
        idle, and the observer may use them."""
        ...


class Measurements(Protocol):
    """Inputs of later decisions, in checkpoints."""

    def state(self) -> str:
        """JSON; "" if there is nothing yet."""
        ...

    def load(self, state: str) -> None:
        """Go on with measurements of `state`. Raises StateError for others."""
        ...


class Trials(Protocol):
    """Results of tried plans, for reports."""

    @property
    def costs(self) -> Costs | None:
        """Costs by which plans were predicted, if they were."""
        ...

    @property
    def trial_seconds(self) -> float | None:
        """Extra seconds of the last trial's steps over steps with the kept plan; None before its
        end, or without one."""
        ...

    @property
    def tried(self) -> tuple[Tried, ...]:
        """Tried plans."""
        ...


class PlanController(Protocol):
    """Chooses the plan of each step, the same on all ranks, which make all calls alike."""

    @property
    def codecs(self) -> MutableMapping[str, Codec]:
        """Codecs of all possible plans, by key; one may be replaced, in this mapping, before a plan
        uses it."""
        ...

    @property
    def plan(self) -> Plan:
        """Plan of the current step."""
        ...

    @property
    def observer(self) -> StepObserver | None:
        """The present observer of steps; None if the choice needs no observation."""
        ...

    @property
    def measurements(self) -> Measurements | None:
        """Measurements that decide later plans; None if a checkpoint needs none."""
        ...

    @property
    def trials(self) -> Trials | None:
        """Results of trials; None if plans are not tried."""
        ...

    @property
    def capture(self) -> Capture:
        """Use of CUDA graphs in the current step, unless options decide it."""
        ...

    def next(self, step: int, uncaptured: str = "") -> Plan:
        """The plan of step `step`, which begins now. uncaptured: the reason why a capture failed on
        this rank in the last step. Raises HipressError if ranks cannot agree."""
        ...

    def restored(self, saved: Mapping[str, Any]) -> Plan | None:
        """The plan of a saved state (see Plan.by_name); None if there is no such plan."""
        ...

    def hold(self, plan: Plan) -> None:
        """Go on with this plan of a loaded state."""
        ...

    def close(self) -> None:
        """End the communication with other ranks."""
        ...


class FixedPlan:
    """A PlanController of one plan."""

    observer: StepObserver | None = None
    measurements: Measurements | None = None

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.codecs = dict(plan.codecs)

    @property
    def trials(self) -> Trials | None:
        """Implements PlanController.trials."""
        return None

    @property
    def capture(self) -> Capture:
        """Implements PlanController.capture."""
        return Capture.NEVER

    def next(self, step: int, uncaptured: str = "") -> Plan:
        """Implements PlanController.next."""
        return self.plan

    def restored(self, saved: Mapping[str, Any]) -> Plan | None:
        """Implements PlanController.restored."""
        return self.plan if saved == self.plan.by_name else None

    def hold(self, plan: Plan) -> None:
        """Implements PlanController.hold."""
        self.plan = plan

    def close(self) -> None:
        """Implements PlanController.close: it has no connections."""
