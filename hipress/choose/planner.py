"""From options to a plan, or to a controller of plans during training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from casync import strategies
from casync.codec import Codec
from casync.memory.host import HostMemory
from casync.topology import Topology
from hipress.choose import levels, search
from hipress.choose.chooser import Chooser, Phases
from hipress.choose.levels import ByPolicy
from hipress.choose.places import Places
from hipress.choose.plan import Plan, fixed_plan, raw
from hipress.choose.probe import Probe
from hipress.choose.rules import Overrides
from hipress.choose.search import Registry, Search
from hipress.choose.tuner import CaptureTrial, Compilation, Tuner, with_captured
from hipress.codecs import resolve, resolve_down, strategy_for
from hipress.model.devices import Placement
from hipress.model.params import Param
from hipress.optim import Averaging
from hipress.optim.adam import Freezing
from hipress.options import AUTO, Options
from hipress.policies import Policy
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.groups import Agreement


@dataclass(frozen=True)
class Planned:
    """The plan, probe and controller with which a module begins."""

    plan: Plan
    probe: Probe | None = None
    #: of plans during training; all ranks make one
    controller: Callable[[], Chooser] | None = None
    after: Plan | None = None  # of momentum, from the freeze of an optimizer on


def codecs_of(options: Options, placement: Placement) -> dict[str, Codec]:
    """Codecs by key: the planner's candidates; a policy's levels; or the requested codec, with that
    of owners if it is another. Raises ConfigError."""
    if options.policy is not None:
        return levels.compiled(options.policy, options, placement.target)
    if options.automatic:  # compiled for the device only if they are tried
        codecs = search.candidates(options, "reference")
        if not placement.on_host:  # report a missing compiler now
            search.candidates(options, placement.target, only=[*codecs][:1])
        return codecs
    codec = resolve(options, placement.target)
    down = resolve_down(options, codec, placement.target)
    strategy_for(codec, options.strategy, down)
    return {codec.name: codec} | ({} if down is None else {"down": down})


@dataclass(frozen=True)
class Planner:
    """Plans the synchronization of a model. All ranks of the group must call it alike."""

    params: tuple[Param, ...]
    options: Options
    topology: Topology
    overrides: Overrides  # decisions of the rules
    coordinator: Coordinator
    placement: Placement

    def plan(self, codecs: Mapping[str, Codec], optimizer: Averaging | None = None) -> Planned:
        """codecs: result of `codecs_of`. optimizer: one whose momentum is averaged. Raises
        ConfigError."""
        if self.topology.world_size == 1:
            why = "one rank: there is nothing to synchronize"
            decisions = tuple(raw(p, why) for p in self.params)
            return Planned(Plan(decisions, self.topology, why=why))
        if isinstance(optimizer, Freezing):
            return self._two_phases(codecs, optimizer)
        return self._one_phase(codecs)

    def _two_phases(self, codecs: Mapping[str, Codec], optimizer: Freezing) -> Planned:
        """ "auto" for gradients until the optimizer freezes, then `codecs` for its momentum."""
        first = replace(
            self.options, compressor=AUTO, params={}, down=AUTO, strategy=AUTO, scope="tensor",
            optimizer="adam",
        )  # fmt: skip
        gradients = codecs_of(first, self.placement)
        before = replace(self, options=first)._one_phase(gradients, " before a freeze")
        after = self._one_phase(codecs)
        compile_ahead(after.plan)
        refuse_misplaced(after.plan, self.placement)

        def phases() -> Chooser:
            makers = [each.controller or partial(Chooser, each.plan) for each in (before, after)]
            first, second = (make() for make in makers)
            return Phases(optimizer, first, second, self.coordinator)

        return Planned(before.plan, before.probe or after.probe, phases, after.plan)

    def _one_phase(self, codecs: Mapping[str, Codec], when: str = "") -> Planned:
        """A plan, or more to choose from; connections are named by `when`."""
        if self.options.policy is not None:
            return self._by_policy(self.options.policy, [*codecs.values()])
        if self.options.automatic:
            return self._automatic(codecs, when)
        codec, *down = codecs.values()
        plan = fixed_plan(self.params, codec, self.options, self.topology, *down)
        plan = self.overrides.apply(plan)
        return Planned(plan, controller=self._capturing(plan))

    def _capturing(self, plan: Plan) -> Callable[[], Chooser] | None:
        """A controller that tries the plan with CUDA graphs, if that may be tried."""
        plans = with_captured(plan, self.options, by_nccl=self.placement.by_nccl)
        if len(plans) == 1:
            return None
        return lambda: CaptureTrial(plans, self.coordinator, self.placement.memory().moment)

    def _automatic(self, codecs: Mapping[str, Codec], when: str) -> Planned:
        """A plan without compression, and a chooser that tries codecs that promise to pay here."""
        registry = Registry(codecs, self.options, self.placement.target)
        wanted = Search(self.params, registry, self.options, self.topology, self.overrides)
        places, probe = self._probed(wanted, when)
        if not places.codecs:
            places.close()
            why = "no compressor would make a step faster here"
            if not codecs:
                why = "no compressor was measured to keep the loss under this optimizer"
            return Planned(wanted.unplanned(why), probe)

        def chooser() -> Chooser:
            return Tuner(places, Compilation(places), self.coordinator, when)

        return Planned(wanted.unplanned(), probe, chooser)

    def _probed(self, search: Search, when: str) -> tuple[Places, Probe]:
        """Places with measured links, and the codecs that promise to pay there."""
        link = Agreement(self.coordinator, f"probe{when}")
        places = Places.of(search, self.coordinator, self.placement)
        what = f"measuring the link between ranks {self.coordinator.ranks}"
        begun = time.perf_counter()
        try:
            places = link.run(places.measure_links, what).promising()
        except BaseException:
            places.abort()
            raise
        return places, Probe(places.reported, time.perf_counter() - begun)

    def _by_policy(self, policy: Policy, codecs: Sequence[Codec]) -> Planned:
        """A plan for each level of a policy, and the controller that switches between them."""
        plans = levels.plans(
            policy, codecs, self.params, self.options, self.topology, self.overrides
        )
        state = policy.new_state(codecs, len(self.params))
        memory = HostMemory() if self.placement.on_host else self.placement.memory()
        for plan in plans:
            compile_ahead(plan)

        def controller() -> Chooser:
            return ByPolicy(state, plans, self.params, self.coordinator, memory.moment)

        return Planned(plans[0], controller=controller)


def refuse_misplaced(plan: Plan, placement: Placement) -> None:
    """Raise ConfigError for codecs that do not work on the model's device."""
    for key in {d.codec for d in plan.decisions if d.codec is not None}:
        for codec in plan.both(key):
            placement.refuse(codec)


def compile_ahead(plan: Plan) -> None:
    """Compile the kernels of aggregators now, not in the first step, where other ranks wait."""
    for key, strategy in {(d.codec, d.strategy) for d in plan.decisions}:
        spreads = strategies.load(strategy).SPREADS
        if spreads and key is not None and key not in plan.downs:
            plan.codecs[key].prepare()
