"""Switches between plans, between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from casync.memory import Memory
from hipress.model import Param
from hipress.plan.plan import Plan
from hipress.sync.buckets import BucketPlans
from hipress.sync.state import in_layout, in_shape

if TYPE_CHECKING:
    from hipress.control.plan_controller import PlanController


class PlanSwitch:
    """A module's buckets by its current plan, and gradients owed from earlier plans.

    What this rank has not delivered moves to another plan in one of two ways: as the codecs' own
    states, bit for bit, where these fit; else as a gradient, added to the next one before the new
    plan's codec encodes it. See [Note: undelivered gradient] in state.py.
    """

    def __init__(
        self, make: Callable[[Plan], BucketPlans], plan: Plan, tuner: PlanController | None
    ) -> None:
        """make: returns buckets of a plan, without any state."""
        self.make, self._tuner = make, tuner
        self.buckets = make(plan)
        #: undelivered gradients of this rank by parameter, flat float32 in bucket order
        self.owed: dict[int, torch.Tensor] = {}

    def begin(self, step: int) -> None:
        """Begin a step, maybe by another plan."""
        if self._tuner is None:
            return
        plan = self._tuner.next(step)
        if plan is not self.buckets.plan:
            self._go_by(plan)

    def resume(self, buckets: BucketPlans, owed: Mapping[int, torch.Tensor]) -> None:
        """Go on with these buckets and their state, and these undelivered gradients."""
        if self._tuner is not None and buckets is not self.buckets:
            self._tuner.hold(buckets.plan)
        memory = buckets.residuals.memory
        self.buckets = buckets
        self.owed = {index: _in(memory, values) for index, values in owed.items()}

    def lay_out(self, old: Param, new: Param) -> None:
        """Move the kept values of a parameter to the new layout of its elements."""
        self.buckets.residuals.lay_out(old, new)
        if old.index in self.owed:
            self.owed[old.index] = in_layout(in_shape(self.owed[old.index], old), new)

    def owe(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to this rank's next one of the parameter. It is flat float32 in bucket
        order."""
        self.owed[index] = self.owed.get(index, 0) + gradient

    def add_owed(self, indices: tuple[int, ...], buffer: torch.Tensor) -> dict[int, torch.Tensor]:
        """Add owed gradients to those of a bucket, unless these are zero, as for parameters that
        this rank did not use: see [Note: unused parameters] in state.py. Returns the added ones."""
        added: dict[int, torch.Tensor] = {}
        if self.owed.keys().isdisjoint(indices):
            return added
        for index, piece in zip(indices, self.buckets.pieces(indices, buffer), strict=True):
            if index in self.owed and piece.any():
                added[index] = self.owed.pop(index)
                piece.add_(added[index])
        return added

    def _go_by(self, plan: Plan) -> None:
        """Switch to a plan between two steps."""
        before, made = self.buckets, self.make(plan)
        moved, memory = made.adopt(before), made.residuals.memory
        self.owed = {index: _in(memory, values) for index, values in self.owed.items()}
        for index in before.residuals.places.keys() - moved:
            values = before.residuals.undelivered(index)
            if values is not None and values.any():
                self.owe(index, _in(memory, values))
        self.buckets = made


def _in(memory: Memory, values: torch.Tensor) -> torch.Tensor:
    """The values in the memory in which gradients are compressed now."""
    if values.device == memory.device:
        return values
    host = values.cpu()
    return host if memory.host else memory.zeros(len(host), host.dtype).copy_(host)
