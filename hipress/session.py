"""The session of a synchronized module: agreement of the ranks, plan, engine."""

from __future__ import annotations

import functools
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from casync.codec import Codec
from casync.shutdown import end_with
from hipress import registry
from hipress.channel.failures import Failures
from hipress.choose import evidence, rules
from hipress.choose.plan import check_patterns
from hipress.choose.planner import Planner, codecs_of, compile_ahead, refuse_misplaced
from hipress.codecs import (
    call,
    compilations_told_by,
    full_name,
    resolve,
)
from hipress.engine import momentum
from hipress.engine.channels import Channels
from hipress.engine.engine import Engine
from hipress.engine.loaded import LoadedGradients
from hipress.engine.momentum import Momentum
from hipress.errors import ConfigError
from hipress.model.devices import Placement, backends_of, place
from hipress.model.params import Param, describe
from hipress.optim import Averaging
from hipress.optim.adam import Freezing
from hipress.options import AUTO, Options
from hipress.ranks import coordinator as coordinators
from hipress.ranks import nodes
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.groups import Mean

if TYPE_CHECKING:
    from hipress.choose.chooser import Chooser
    from hipress.choose.plan import Plan
    from hipress.choose.probe import Probe
    from hipress.engine.residuals import Residuals
    from hipress.model.snapshot import Snapshot

log = logging.getLogger("hipress")


@dataclass(eq=False)
class Session:
    """The state of a synchronized module. `engine` is None if none is needed: DDP's own all-reduce
    remains, or there is one rank."""

    params: tuple[Param, ...]
    options: Options
    plan: Plan
    group: dist.ProcessGroup  # the averaging ranks
    failures: Failures
    placement: Placement
    probe: Probe | None = None
    #: of plans during training; all ranks make one
    controller: Callable[[], Chooser] | None = None
    optimizer: Averaging | None = None  # an optimizer whose momentum is averaged
    after: Plan | None = None  # of momentum, from the freeze of `optimizer` on
    engine: Engine | None = None
    end: Callable[[], None] | None = None  # closes the engine and removes hooks
    loaded_step: int = 0  # of a loaded state, if there is no engine
    loaded_gradients: LoadedGradients | None = (
        None  # what that state had not delivered, if there is no engine
    )
    loaded: Callable[[Residuals], None] | None = None  # called with loaded residuals
    snapshot: Snapshot | None = None  # parameters, to detect changes

    @property
    def coordinator(self) -> Coordinator:
        """The place where the averaging ranks meet."""
        return self.failures.coordinator

    @property
    def rank(self) -> int:
        """The rank of this process in the group, also after torch.distributed was shut down."""
        return self.coordinator.rank

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return len(self.coordinator.ranks)

    @property
    def current_plan(self) -> Plan:
        """The plan by which gradients travel now."""
        return self.plan if self.engine is None else self.engine.plan

    def make_engine(
        self,
        group: dist.ProcessGroup,
        parameters: Sequence[torch.Tensor] = (),
        *,
        skips: bool,
        unused: bool = False,
    ) -> Engine:
        """An engine for `start`. Every rank must call this.

        group: of uncompressed buckets; parameters: those of `params`, for an optimizer whose
        momentum is averaged; skips, unused: see Engine and Channels.
        """
        chooser = None if self.controller is None else self.controller()
        plan, codecs = self.plan, self.plan.codecs
        if chooser is not None:
            plan, codecs = chooser.plan, chooser.codecs
        momentum = self._momentum(parameters, unused)
        channels = Channels(
            codecs, plan.topology, self.options, group, self.failures,
            placement=self.placement, unused=unused,
        )  # fmt: skip
        return Engine(
            self.params,
            plan,
            self.options,
            channels,
            chooser=chooser,
            skips=skips,
            momentum=momentum,
        )

    def _momentum(self, parameters: Sequence[torch.Tensor], unused: bool) -> Momentum | None:
        if self.optimizer is None:
            return None
        return Momentum(self.optimizer, parameters, self.params, unused=unused)

    def start(self, owner: object, engine: Engine | None, release: Callable[[], None]) -> None:
        """Synchronize by this engine, if any, until `close`, or until `owner` is collected; then
        `release` removes its hooks."""
        self.engine = engine
        self.end = end_with(owner, functools.partial(_end, engine, release))

    @functools.cached_property
    def mean(self) -> Mean:
        """Takes means of states over the ranks."""
        return Mean(self.coordinator)

    @property
    def place(self) -> list[int]:
        """This rank and the number of ranks, as records have them."""
        return [self.rank, self.world_size]

    def progress(self) -> tuple[Residuals, int, Mapping[int, torch.Tensor], str]:
        """States, step, other undelivered gradients and measurements, between two steps."""
        from hipress.engine.residuals import Residuals

        engine = self.engine
        if engine is None:
            loaded = self.loaded_gradients
            undelivered = {} if loaded is None else loaded.undelivered
            return Residuals(self.params, self.plan), self.loaded_step, undelivered, ""
        measurements = None if engine.chooser is None else engine.chooser.measurements
        measured = "" if measurements is None else measurements.state()
        return engine.buckets.residuals, engine.step, engine.undelivered, measured

    def carry(
        self, undelivered: Mapping[int, torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Add what a loaded state had not delivered to the next gradients, without an engine."""
        if self.loaded_gradients is not None:
            self.loaded_gradients.close()
        self.loaded_gradients = LoadedGradients(undelivered, self.params, parameters)

    def failing(self, what: str) -> AbstractContextManager[None]:
        """A context whose error ends the session on all ranks."""
        return nullcontext() if self.engine is None else self.engine.failing(what)

    def close(self) -> None:
        """End threads and groups; the module is then synchronized by DDP alone, or not at all."""
        if self.loaded_gradients is not None:
            self.loaded_gradients.close()
        self.mean.close()
        self.failures.close()
        if self.end is not None:
            self.end()


def _end(engine: Engine | None, release: Callable[[], None]) -> None:
    release()
    if engine is not None:
        engine.close()


def session_of(target: object) -> Session:
    """The session of a DDP module, a Synchronizer or a Gossip. Raises ConfigError if it has
    none."""
    session = registry.get(target, Session)
    if session is None:
        raise ConfigError("hipress is not attached to this module; use hipress.wrap or attach")
    return session


def wrapped_modules() -> list[Any]:
    """DDP modules, Synchronizers and Gossips with a session."""
    return [target for target, _ in registry.every(Session)]


def prepare(
    module: nn.Module,
    options: Options,
    group: dist.ProcessGroup,
    facts: Mapping[str, Any],
    parameters: Callable[[nn.Module], tuple[Param, ...]] = describe,
    adapt: Callable[[Plan], Plan] = lambda plan: plan,
    optimizer: Averaging | None = None,
) -> Session:
    """Agree with the other ranks and plan. See [Note: agreement].

    Args:
        module: the model, before it is wrapped, or the DDP module.
        facts: further values on which ranks must agree, such as the arguments of DDP.
        parameters: selects the parameters to synchronize.
        adapt: changes the plan for gradients.
        optimizer: one whose momentum is averaged, if any.

    Raises ConfigError, ConfigMismatch, AgreementTimeout or RankLost; on every rank, if on one.
    """
    coordinator = coordinators.coordinator(group, options.timeout)
    with coordinator.failures_told(), compilations_told_by(coordinator.rank == 0):
        params = parameters(module)
        check_patterns(params, options)
        where = [(param.name, param.device) for param in params]
        placement = place(where, options.transport, backends_of(group))
        placement.refuse_capture(options.capture)
        placement.refuse_checksum(options.checksum)
        placement.refuse_other_current()
        placement.refuse_sparse(params)
        codecs = codecs_of(options, placement)
        if optimizer is not None:
            codec = None if options.automatic else next(iter(codecs.values()))
            momentum.check(optimizer, params, codec, options)
            facts = {**facts, "momentum": optimizer.facts}
        ruled = rules.compiled(options, placement.target)
        rules.assign(ruled, params)
    ours = facts_of(params, options, codecs, ruled, placement)
    places = coordinator.require_equal({**ours, **facts}, nodes.place())
    with coordinator.failures_told(), compilations_told_by(coordinator.rank == 0):
        topology = nodes.topology_of(options.topology, places, coordinator.ranks)
        others = list(codecs.values())
        rules_ = rules.decide(ruled, params, others, options, topology.world_size)
        planner = Planner(params, options, topology, rules_, coordinator, placement)
        planned = planner.plan(codecs, optimizer)
        plan = adapt(planned.plan)
        refuse_misplaced(plan, placement)
        compile_ahead(plan)
    coordinator.require_equal({"plan": plan.facts()})
    return Session(
        params, options, plan, group, Failures(coordinator, options.timeout), placement,
        planned.probe, planned.controller, optimizer, planned.after,
    )  # fmt: skip


def tell_plan(session: Session) -> None:
    """Log the plan on rank 0: at INFO, or as a warning if a compressor was named and most stays
    uncompressed; warn if the compressor lost under the optimizer in measurements."""
    from hipress.reporting.tables import compressed_share, describe_phases, describe_plan

    if session.rank != 0:
        return
    by_name = session.world_size > 1 and not session.options.automatic
    all_asked = by_name and not (session.options.exclude or session.options.rules)
    params, named = session.params, session.after or session.plan
    unexpected = all_asked and compressed_share(named, params) < 0.5
    text = describe_plan(session.plan, params)
    if session.after is not None and isinstance(session.optimizer, Freezing):
        text = describe_phases(session.optimizer, session.plan, session.after, params)
    log.log(logging.WARNING if unexpected else logging.INFO, "hipress: %s", text)
    _tell_swamped(session.plan, session.world_size)
    if by_name and session.options.optimizer is not None and session.options.policy is None:
        _tell_loss(session.options)


def _tell_swamped(plan: Plan, ranks: int) -> None:
    """Warn of codecs whose errors add up around a ring of so many ranks."""
    ways = {(each.codec, each.strategy) for each in plan.decisions if each.codec is not None}
    for key, strategy in sorted(ways):
        if evidence.swamps(plan.codecs[key], strategy, ranks):
            log.warning(
                "hipress: %s by ring rounds growing sums at each of %d ranks, and its errors add "
                "up: use strategy 'ps'", plan.codecs[key].name, ranks,
            )  # fmt: skip


def _tell_loss(options: Options) -> None:
    """Warn of a codec that did not keep the loss under this kind of optimizer in measurements."""
    lost = evidence.worst(resolve(options), options.optimizer)
    if lost is not None:
        log.warning(
            "hipress: %s did not keep the loss under %s: %s; \"auto\" takes codecs that did",
            label(options), options.optimizer, lost,
        )  # fmt: skip


def facts_of(
    params: tuple[Param, ...],
    options: Options,
    codecs: Mapping[str, Codec],
    ruled: Sequence[rules.Rule],
    placement: Placement,
) -> dict[str, Any]:
    """All values that must be equal on all ranks."""
    every = [full_name(codec) for codec in codecs.values()]
    return {
        "compressor": AUTO if options.automatic else every[0],
        "down": [] if options.automatic else every[1:],
        "policy": str(options.policy),
        "strategy": options.strategy,
        "topology": str(options.topology),
        "kind of optimizer": str(options.optimizer),
        "accept_loss": str(options.accept_loss),
        "scope": options.scope,
        "transport": placement.transport,
        "kind of device": placement.device.type,
        "exclude": sorted(set(options.exclude)),  # sorted, since ranks order sets differently
        "min_size": str(options.min_size),
        "seed": options.seed,
        "verify": options.verify,
        "checksum": options.checksum,
        "capture": options.capture,
        "scratch": options.scratch,
        "parameters": [str(p) for p in params],
        "rules": list(map(str, ruled)),
        "digests": {
            _label(number, key, codec, options): codec.digest
            for number, (key, codec) in enumerate(codecs.items())
        }
        | {rule.why: rule.codec.digest for rule in ruled if rule.codec is not None},
        **versions(),
    }


def _label(number: int, key: str, codec: Codec, options: Options) -> str:
    """Label such as `compressor 'mine.yaml'`, for ranks whose digests differ."""
    if options.automatic or options.policy is not None:
        return f"compressor {key!r}"
    option, value = (("compressor", options.compressor), ("down", options.down))[number]
    return f"{option} {(value if isinstance(value, str) else codec.name)!r}"


def label(options: Options) -> str:
    """The given compressor, such as `topk(ratio=0.01)`; a compiled codec with all parameters."""
    if options.policy is not None:
        return str(options.policy)
    if not isinstance(options.compressor, str):
        return full_name(options.compressor)
    return AUTO if options.automatic else call(options.compressor, options.params)


def plain_options(options: Options) -> dict[str, Any]:
    """Options as values for JSON."""
    # not asdict, which copies values: a compiled codec holds locks, and has a label
    own = {each.name: getattr(options, each.name) for each in fields(options)}
    down = options.down
    own["down"] = down if isinstance(down, str | None) else full_name(down)
    own["policy"] = None if options.policy is None else str(options.policy)
    own["rules"] = rules.for_json(options.rules)
    return own | {"compressor": label(options), "params": dict(options.params)}


def versions() -> dict[str, Any]:
    """Versions that must be equal on all ranks, by what they are of."""
    import compll  # takes a while

    ours = {"hipress": compll.__version__, "torch": torch.__version__}
    return {
        "versions": {**ours, "machine": platform.machine()},
        "payload format": compll.PAYLOAD_FORMAT,
    }
