"""Execution of a policy: measures its inputs, and makes a plan of the levels that it chooses."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from casync.codec import Codec
from casync.memory import Moment
from casync.runtime.options import Capture
from hipress.choose.plan import Plan, raw, restored
from hipress.choose.plan_controller import StepEvent, Trials
from hipress.model.params import Param
from hipress.policies import DENSE, PolicyState
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.link import Agreement, all_reduce_sum

log = logging.getLogger("hipress")


class PolicyController:
    """A PlanController whose plans a policy decides, and a StepObserver if the policy measures. All
    ranks of the group must make one."""

    trials: Trials | None = None
    capture = Capture.NEVER

    def __init__(
        self,
        state: PolicyState,
        plans: Sequence[Plan],
        params: Sequence[Param],
        coordinator: Coordinator,
        moment: Callable[[], Moment],
    ) -> None:
        """plans: by level, equal except for the levels' codecs. moment: returns the present moment
        of the memory in which gradients are compressed."""
        self._moment = moment
        self._state, self._levels, self._params = state, plans, params
        self._coordinator = coordinator
        self._agreement = Agreement(coordinator, "policy")
        self.codecs: dict[str, Codec] = {k: c for plan in plans for k, c in plan.codecs.items()}
        self._made: dict[tuple[int, ...], Plan] = {}
        self._buckets: list[tuple[Sequence[int], torch.Tensor]] = []
        self._to_measure: list[tuple[Sequence[int], torch.Tensor]] = []  # with residuals
        self._moments: list[Moment] = []  # beginnings of the window's steps
        self._step = 0
        self.plan = self._choose(0)

    @property
    def observer(self) -> PolicyController | None:
        """Implements PlanController.observer."""
        return self if self._state.window else None

    @property
    def measurements(self) -> PolicyState:
        """Implements PlanController.measurements; a window under way begins anew."""
        return self._state

    def next(self, step: int, uncaptured: str = "") -> Plan:
        """Implements PlanController.next."""
        if self._state.window:
            self._moments.append(self._moment())
        if self._agreement.open and len(self._moments) > self._state.window > 0:
            self._end_window()
        before, self.plan, self._step = self.plan, self._choose(step), step
        if before is not self.plan and self._coordinator.rank == 0:
            log.info("hipress: from step %d on %s", step, self.plan.label)
        self._buckets.clear()
        self._to_measure.clear()
        return self.plan

    def observe(
        self, indices: Sequence[int], buffer: torch.Tensor, undelivered: Callable[[], torch.Tensor]
    ) -> None:
        """Implements StepObserver.observe."""
        if buffer.is_sparse:
            return
        self._buckets.append((indices, buffer))
        if self._state.measures(self._step):
            self._to_measure.append((indices, buffer.float() + undelivered()))

    def mark(self, event: StepEvent) -> None:
        """Implements StepObserver.mark."""
        if event is not StepEvent.AVERAGED:
            return
        for indices, values in self._to_measure:
            for index, piece in self._pieces(indices, values):
                self._state.observe(index, piece)
        for indices, buffer in self._buckets:
            for index, piece in self._pieces(indices, buffer.float()):
                self._state.averaged(index, piece)
        self._to_measure.clear()
        self._buckets.clear()

    def restored(self, saved: Mapping[str, Any]) -> Plan | None:
        """Implements PlanController.restored."""
        return restored(saved, self._params, self.codecs, self.plan.topology)

    def hold(self, plan: Plan) -> None:
        """Implements PlanController.hold: the policy goes on from there."""
        self.plan = plan
        self._moments.clear()

    def close(self) -> None:
        """Implements PlanController.close."""
        self._agreement.close()

    def _end_window(self) -> None:
        """Share the measurements of a window, by which the policy decides."""
        steps = pairwise(self._moments)
        middle = statistics.median(end.since(begin) for begin, end in steps)
        del self._moments[:-1]
        measured = self._state.measured()
        what = "comparing the measurements of a policy"
        sums = self._agreement.run_in_step(lambda group: all_reduce_sum(measured, group), what)
        (slowest,) = self._agreement.largest([middle], what)
        self._state.decide(sums, slowest)

    def _choose(self, step: int) -> Plan:
        levels = tuple(self._state.level(step, param.index) for param in self._params)
        if levels not in self._made:
            self._made[levels] = self._make(levels)
        return self._made[levels]

    def _make(self, levels: Sequence[int]) -> Plan:
        """The plan with each parameter's decision from the plan of its level."""
        decisions = [
            raw(param, "the policy wants it whole")
            if level == DENSE and self._levels[0].decisions[param.index].codec is not None
            else self._levels[max(level, 0)].decisions[param.index]
            for param, level in zip(self._params, levels, strict=True)
        ]
        used = {decision.codec for decision in decisions}
        codecs = {key: codec for key, codec in self.codecs.items() if key in used}
        return replace(self._levels[0], decisions=tuple(decisions), codecs=codecs)

    def _pieces(self, indices: Sequence[int], flat: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Pieces of a bucket for parameters whose levels are decided, by index."""
        pieces = torch.split(flat.detach(), [self._params[index].reals for index in indices])
        return [
            (index, piece)
            for index, piece in zip(indices, pieces, strict=True)
            if self._levels[0].decisions[index].codec is not None
        ]
