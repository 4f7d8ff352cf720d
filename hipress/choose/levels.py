"""Plans by a policy: it measures its inputs, and makes a plan of the levels that it chooses."""

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
from casync.topology import Topology
from hipress.choose.chooser import Chooser, StepEvent
from hipress.choose.plan import Plan, fixed_plan, raw, restored
from hipress.choose.rules import Overrides
from hipress.codecs import compile_codec, full_name, strategy_for
from hipress.errors import ConfigError
from hipress.model.params import Param
from hipress.options import Options
from hipress.policies import DENSE, Policy, PolicyState
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.groups import Agreement, all_reduce_sum

log = logging.getLogger("hipress")
ELEMENTS = 1 << 20  # of a tensor by which levels are compared


def compiled(policy: Policy, options: Options, target: str = "cpu") -> dict[str, Codec]:
    """The compressor at each level, by description, for a backend of compll; or ConfigError."""
    codecs = dict[str, Codec]()
    for params in policy.levels:
        try:
            codec = compile_codec(policy.compressor, params, target)
            strategy_for(codec, options.strategy)
        except ConfigError as error:
            raise ConfigError(f"policy {type(policy).__name__}: {error}") from error
        codecs[full_name(codec)] = codec
    if len(codecs) < len(policy.levels):
        name = type(policy).__name__
        raise ConfigError(f"policy {name}: two of its levels are the same: {', '.join(codecs)}")
    for (before, less), (after, more) in pairwise(codecs.items()):
        if less.payload_bytes(ELEMENTS) < more.payload_bytes(ELEMENTS):
            raise ConfigError(
                f"policy {type(policy).__name__}: levels go from the least compressed on, and "
                f"{before}, which compresses more, comes before {after}: turn them round"
            )
    return codecs


def plans(
    policy: Policy,
    codecs: Sequence[Codec],
    params: Sequence[Param],
    options: Options,
    topology: Topology,
    overrides: Overrides,
) -> list[Plan]:
    """A plan for each level."""
    by_level = []
    for number, codec in enumerate(codecs):
        plan = _rename(fixed_plan(params, codec, options, topology), f"level {number}")
        by_level.append(overrides.apply(replace(plan, why=f"by {policy}")))
    return by_level


def _rename(plan: Plan, suffix: str) -> Plan:
    """The plan with a suffix on its keys: the codecs of all levels have the same name."""
    decisions = [
        replace(d, codec=None if d.codec is None else f"{d.codec} {suffix}") for d in plan.decisions
    ]
    codecs = {f"{key} {suffix}": codec for key, codec in plan.codecs.items()}
    return replace(plan, decisions=tuple(decisions), codecs=codecs)


class ByPolicy(Chooser):
    """Plans of the levels that a policy decides; it observes steps if the policy measures."""

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
        super().__init__(plans[0], {k: c for plan in plans for k, c in plan.codecs.items()})
        self._moment, self._rank = moment, coordinator.rank
        self._state, self._levels, self._params = state, plans, params
        self._agreement = Agreement(coordinator, "policy")
        self._made: dict[tuple[int, ...], Plan] = {}
        self._buckets: list[tuple[Sequence[int], torch.Tensor]] = []
        self._to_measure: list[tuple[Sequence[int], torch.Tensor]] = []  # with residuals
        self._moments: list[Moment] = []  # beginnings of the window's steps
        self._step = 0
        self._plan = self._choose(0)

    @property
    def observes(self) -> bool:
        return self._state.window > 0

    @property
    def measurements(self) -> PolicyState:
        """Measurements of past windows; one under way begins anew."""
        return self._state

    def next(self, step: int, uncaptured: str = "") -> Plan:
        if self._state.window:
            self._moments.append(self._moment())
        if self._agreement.open and len(self._moments) > self._state.window > 0:
            self._end_window()
        before, self._plan, self._step = self.plan, self._choose(step), step
        if before is not self.plan and self._rank == 0:
            log.info("hipress: from step %d on %s", step, self.plan.label)
        self._buckets.clear()
        self._to_measure.clear()
        return self.plan

    def observe(
        self, indices: Sequence[int], buffer: torch.Tensor, undelivered: Callable[[], torch.Tensor]
    ) -> None:
        if buffer.is_sparse:
            return
        self._buckets.append((indices, buffer))
        if self._state.measures(self._step):
            self._to_measure.append((indices, buffer.float() + undelivered()))

    def mark(self, event: StepEvent) -> None:
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
        return restored(saved, self._params, self.codecs, self.plan.topology)

    def hold(self, plan: Plan) -> None:
        """The policy goes on from this plan."""
        self._plan = plan
        self._moments.clear()

    def close(self) -> None:
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
