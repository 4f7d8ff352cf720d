"""A controller of one plan, for all steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from casync.runtime.options import Capture
from hipress.control.plan_controller import Measurements, StepObserver, Trials
from hipress.plan.plan import Plan

__all__ = ["FixedPlan"]


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
