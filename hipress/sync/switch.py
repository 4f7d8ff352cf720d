"""Switches between plans, between steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from casync.memory import Memory
from hipress.model import Param
from hipress.plan.plan import Plan
from hipress.sync.buckets import BucketPlan, BucketPlans
from hipress.sync.state import in_layout, in_shape

if TYPE_CHECKING:
    from hipress.control.plan_controller import PlanController


class PlanSwitch:
    """A module's buckets by its current plan, and residuals owed from those of earlier plans."""

    def __init__(
        self, make: Callable[[Plan], BucketPlans], plan: Plan, tuner: PlanController | None
    ) -> None:
        """make: returns buckets of a plan, without any state."""
        self.make, self._tuner = make, tuner
        self.buckets = make(plan)
        self._owed: dict[int, torch.Tensor] = {}  # by parameter, see `_go_by`

    def begin(self, step: int) -> None:
        """Begin a step, maybe by another plan."""
        if self._tuner is None:
            return
        plan = self._tuner.next(step)
        if plan is not self.buckets.plan:
            self._go_by(plan)

    def resume(self, buckets: BucketPlans) -> None:
        """Go on with these buckets and their state."""
        if self._tuner is not None and buckets is not self.buckets:
            self._tuner.hold(buckets.plan)
        self.buckets = buckets
        self._owed.clear()

    def lay_out(self, old: Param, new: Param) -> None:
        """Move the kept values of a parameter to the new layout of its elements."""
        self.buckets.residuals.lay_out(old, new)
        if old.index in self._owed:
            self._owed[old.index] = in_layout(in_shape(self._owed[old.index], old), new)

    def hand(self, indices: tuple[int, ...], buffer: torch.Tensor, plan: BucketPlan | None) -> None:
        """Add owed residuals to a ready bucket's gradients, and show them to the tuner. plan: of
        the bucket; None if nothing of it is compressed."""
        self._add_leftover_residuals(indices, buffer)
        if self._tuner is not None:
            self._tuner.handed(indices, buffer, partial(self._unsent, plan))

    def _unsent(self, plan: BucketPlan | None) -> torch.Tensor:
        return torch.zeros(()) if plan is None else plan.unsent(self.buckets.residuals.memory)

    def _add_leftover_residuals(self, indices: tuple[int, ...], buffer: torch.Tensor) -> None:
        """Add owed residuals to the gradients of a bucket, unless these are zero, as for parameters
        that this rank did not use: see [Note: unused parameters] in state.py."""
        if self._owed.keys().isdisjoint(indices):
            return
        for index, piece in zip(indices, self.buckets.pieces(indices, buffer), strict=True):
            if index in self._owed and piece.any():
                piece.add_(self._owed.pop(index))

    def _go_by(self, plan: Plan) -> None:
        """Switch to a plan. States move along if only codec parameters differ. Other residuals are
        not lost: they are owed, and added to the gradients of this step, before codecs encode them.
        """
        before, made = self.buckets, self.make(plan)
        moved, memory = made.adopt(before), made.residuals.memory
        self._owed = {index: _in(memory, values) for index, values in self._owed.items()}
        for index, values in before.unsent().items():
            if index not in moved:
                self._owed[index] = self._owed.get(index, 0) + _in(memory, values)
        self.buckets = made


def _in(memory: Memory, values: torch.Tensor) -> torch.Tensor:
    """The values in the memory in which gradients are compressed now."""
    if values.device == memory.device:
        return values
    host = values.cpu()
    return host if memory.host else memory.zeros(len(host), host.dtype).copy_(host)
