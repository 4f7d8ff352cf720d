"""The interface of plan choosers, which may change an engine's plan between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from casync.codec import Codec
    from casync.cost import Costs
    from hipress.auto.trial import Tried
    from hipress.plan.plan import Plan


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
    def costs(self) -> Costs | None:
        """Costs by which plans were predicted, or None."""
        ...

    @property
    def trial_seconds(self) -> float | None:
        """Extra seconds of the last trial; None before its end, or without one."""
        ...

    @property
    def tried(self) -> tuple[Tried, ...]:
        """Tried plans, for reports."""
        ...

    def next(self, step: int) -> Plan:
        """The plan of step `step`, which begins now. Raises HipressError if ranks cannot agree."""
        ...

    def observe(
        self, indices: Sequence[int], buffer: torch.Tensor, undelivered: Callable[[], torch.Tensor]
    ) -> None:
        """Take a ready bucket of the step, which is not averaged yet. undelivered: returns what
        this rank has not delivered of these parameters, as a gradient like `buffer`."""
        ...

    def backward_over(self) -> None:
        """Note the end of the step's backward pass."""
        ...

    def averaged(self) -> None:
        """Note that all buckets of the step are averaged."""
        ...

    def restored(self, saved: Mapping[str, Any]) -> Plan | None:
        """The plan of a saved state (see Plan.by_name); None if there is no such plan."""
        ...

    def hold(self, plan: Plan) -> None:
        """Go on with this plan of a loaded state."""
        ...

    def state(self) -> str:
        """Measurements that decide later plans, as JSON for checkpoints; "" if there are none."""
        ...

    def load(self, state: str) -> None:
        """Go on with measurements of `state`. Raises StateError for others."""
        ...

    def close(self) -> None:
        """End the communication with other ranks."""
        ...
