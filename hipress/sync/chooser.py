"""What an engine asks of what may change its plan between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from casync.codec import Codec
    from casync.cost import Costs
    from hipress.plan.rules import Plan
    from hipress.plan.trial import Tried


class Chooser(Protocol):
    """Chooses the plan of each step, the same on all ranks. They call all of this alike."""

    @property
    def codecs(self) -> Mapping[str, Codec]:
        """Of all plans that there may be, by key; one may be replaced before a plan has it."""
        ...

    @property
    def plan(self) -> Plan:
        """Of the current step."""
        ...

    @property
    def costs(self) -> Costs | None:
        """By which plans were predicted, if they were."""
        ...

    @property
    def trial_seconds(self) -> float | None:
        """What the last trial cost; None before its end, and where there was none."""
        ...

    @property
    def tried(self) -> tuple[Tried, ...]:
        """What was tried, for reports."""
        ...

    def next(self, step: int) -> Plan:
        """The plan of the step that begins now, of this number. Raises HipressError where ranks
        cannot agree."""
        ...

    def handed(
        self, indices: Sequence[int], buffer: torch.Tensor, unsent: Callable[[], torch.Tensor]
    ) -> None:
        """A bucket of the step is ready, and not averaged yet. `unsent`: what residuals hold of
        these parameters, as a gradient of this rank."""
        ...

    def backward_over(self) -> None:
        """The step's backward pass is over."""
        ...

    def averaged(self) -> None:
        """All buckets of the step are averages."""
        ...

    def restored(self, saved: Mapping[str, Any]) -> Plan | None:
        """The plan by which a state was saved, as Plan.by_name has it; None where there can be no
        such plan."""
        ...

    def hold(self, plan: Plan) -> None:
        """Go on by this plan, which a state was saved by."""
        ...

    def close(self) -> None:
        """Ask the other ranks nothing more."""
        ...
