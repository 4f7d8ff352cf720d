"""Functions on the results of wrap, attach, Synchronizer, Gossip and shard: detach, report,
states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from casync.errors import copy_to_raise
from hipress import compat
from hipress.choose.captured import forbidden
from hipress.choose.trial import REFUSED
from hipress.errors import ConfigError, ConfigMismatch, StateError
from hipress.model.params import Param, as_ddp, describe
from hipress.model.shards import (
    fsdp_parts,
    is_sharded,
    local,
    on_some_rank,
    own_shard,
    reshard,
    whole,
)
from hipress.model.torch_modes import without_inference_mode
from hipress.outer import outer_state
from hipress.outer.outer import Outer
from hipress.session import SESSIONS, Session, plain_options
from hipress.sharding.sharding import sharding_of
from hipress.ways.gossip import Gossip
from hipress.ways.process_group import CompressingGroup
from hipress.ways.synchronizer import Synchronizer

if TYPE_CHECKING:
    from hipress.choose.plan_controller import PlanController, Trials
    from hipress.engine.buckets import BucketPlans
    from hipress.engine.engine import Engine
    from hipress.engine.residuals import Residuals
    from hipress.outer.outer_report import OuterReport
    from hipress.reporting.report import Report
    from hipress.sharding.shard_report import ShardReport
    from hipress.ways.process_group import GroupReport

Synchronized: TypeAlias = DistributedDataParallel | Synchronizer | Gossip | Outer | nn.Module


def detach(ddp: Synchronized) -> None:
    """Stop compressing: end threads and connections.

    Every rank must call this between the same two steps. A DDP module then averages uncompressed,
    and `attach` may be called again. The module of a Synchronizer is a plain module again; the
    Synchronizer's `step` raises ConfigError. Raises StateError within a backward pass (from a hook,
    for example) whose gradients still travel.
    """
    if isinstance(ddp, Outer):
        ddp.close()
        return
    if (sharding := sharding_of(ddp)) is not None:
        sharding.detach()
        return
    ddp = _target(ddp)
    session = _session(ddp)
    step = None if session.engine is None else session.engine.round
    if step is not None and compat.backward_id() is not None:
        raise StateError(
            f"rank {session.rank}: hipress.detach in a backward pass of which gradients are on "
            "their way; call it between steps"
        )
    session.close()
    del SESSIONS[ddp]


@overload
def report(ddp: Outer) -> OuterReport: ...
@overload
def report(ddp: DistributedDataParallel | Synchronizer | Gossip) -> Report: ...
@overload
def report(ddp: nn.Module) -> Report | ShardReport: ...
@overload
def report(ddp: dist.ProcessGroup) -> GroupReport: ...
def report(
    ddp: Synchronized | dist.ProcessGroup,
) -> Report | ShardReport | OuterReport | GroupReport:
    """Choices, bytes and times so far; print it, or take its `to_dict()`. Also of a process group
    `hipress`."""
    if isinstance(ddp, Outer):
        return ddp.report()
    from hipress.reporting.measured import measure_of
    from hipress.reporting.report import Report

    if isinstance(ddp, CompressingGroup):
        return ddp.report()
    if (sharding := sharding_of(ddp)) is not None:
        return sharding.report()
    session = _session(_target(ddp))
    engine, size = session.engine, session.world_size
    tuner = None if engine is None else engine.tuner
    trials, probe = None if tuner is None else tuner.trials, session.probe
    measured = before = None
    if engine is not None:
        traffic, counters = engine.traffic, engine.counters
        if engine.at_freeze is not None:
            before = measure_of(*engine.at_freeze, size)
            traffic, counters = traffic - engine.at_freeze[0], counters - engine.at_freeze[1]
        measured = measure_of(traffic, counters, size)
    return Report(
        rank=session.rank,
        world_size=size,
        installed=engine is not None,
        why=_why(session, tuner),
        options=plain_options(session.options),
        decisions=session.current_plan.decisions,
        measured=measured,
        probe=replace(probe, costs=trials.costs) if probe and trials and trials.costs else probe,
        cuts={name: codec.cuts for name, codec in session.current_plan.codecs.items()},
        tried=trials.tried if trials else (),
        trial_seconds=trials.trial_seconds if trials else None,
        before_freeze=before,
        capture=_capture_of(session, trials) if engine and session.placement.by_nccl else "",
    )


def _capture_of(session: Session, trials: Trials | None) -> str:
    """Text on the use of CUDA graphs, and why there is none."""
    plan, options = session.current_plan, session.options
    if plan.captured or options.capture is True:
        return "buckets are launched as CUDA graphs"
    why = forbidden(plan, options)
    if not why and trials is not None:
        failed = any(each.verdict == REFUSED for each in trials.tried)
        why = "a capture failed" if failed else "as fast in a trial"
        why = "graphs are being tried" if trials.trial_seconds is None else why
    return f"tasks are launched one by one: {why}"


def _why(session: Session, tuner: PlanController | None) -> str:
    """Text on the plan of gradients, and on that of momentum."""
    from hipress.choose.phases import Phases
    from hipress.optim.adam import Freezing
    from hipress.reporting.tables import describe_phases, describe_plan

    if isinstance(tuner, Phases) and isinstance(session.optimizer, Freezing):
        return describe_phases(session.optimizer, *tuner.plans, session.params)
    plan = describe_plan(session.current_plan, session.params)
    if session.optimizer is None:
        return plan
    return f"{plan}; averages of the momentum of hipress.optim.{type(session.optimizer).__name__}"


def state_dict(ddp: Synchronized | dist.ProcessGroup, *, portable: bool = False) -> dict[str, Any]:
    """This rank's step counter and residuals, by parameter name; call it between steps.

    With one rank nothing travels, and the counter stays: random draws, and a policy's `Warmup`, go
    on from there when there are more.

    Residuals differ between ranks: save one file per rank, or use torch.distributed.checkpoint with
    hipress.Stateful. With `portable` the state is the same on all ranks, which must all call this,
    and loads with any number of ranks (and of FSDP2's shards), codec and strategy; no gradient is
    lost, but a training does not go on bit for bit. The state holds only tensors, numbers and
    texts, so torch.load(weights_only=True) reads it.

    Raises StateError during a step, or after a step failed: ranks may differ in their progress in
    it; with `portable`, the errors of Coordinator.run_watched, too.
    """
    from hipress.state import checkpoint

    if isinstance(ddp, Outer):
        return outer_state.export(ddp, portable=portable)
    if isinstance(ddp, CompressingGroup):
        return ddp.state_dict()
    if portable:
        return _with_whole_tensors(state_of_shards(ddp), compressible_parameters(ddp))
    if (sharding := sharding_of(ddp)) is not None:
        return sharding.state_dict(_params_of(ddp)[0])
    session = _session(_target(ddp))
    if session.world_size == 1 and not isinstance(ddp, Gossip):  # its state is that of all
        return state_of_shards(ddp)
    residuals, step, owed, measured = _progress(session)
    rank, size = session.rank, session.world_size
    return checkpoint.export(residuals, step, rank, size, owed, measured)


def state_of_shards(ddp: Any) -> dict[str, Any]:
    """The portable state; where FSDP2 shards the model, of this rank's shards, and without codecs'
    other states. All ranks must call this."""
    from hipress.state.portable import export_portable

    params, named = _params_of(ddp)
    if (sharding := sharding_of(ddp)) is not None:
        return sharding.portable_state_dict(params)
    session = _session(_target(ddp))
    if session.engine is not None and isinstance(ddp, Gossip):
        raise StateError(
            "Gossip has no portable state: it holds estimates of these ranks' parameters. Average "
            "the parameters (hipress.all_reduce with compressor 'none'), save them once, and make "
            "a new Gossip, which begins with them"
        )
    sharded = any(map(is_sharded, named.values()))
    return export_portable(*_progress(session), session.mean, sharded=sharded)


def _progress(session: Session) -> tuple[Residuals, int, Mapping[int, torch.Tensor], str]:
    """States, step, owed gradients and measurements of a session, between two steps."""
    from hipress.engine.residuals import Residuals

    _refuse_unfinished(session)
    engine = session.engine
    if engine is None:
        owed = {} if session.carried is None else session.carried.owed
        return Residuals(session.params, session.plan), session.loaded_step, owed, ""
    measurements = None if engine.tuner is None else engine.tuner.measurements
    measured = "" if measurements is None else measurements.state()
    return engine.buckets.residuals, engine.step, engine.owed, measured


def _with_whole_tensors(
    state: dict[str, Any], parameters: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """A portable state with all ranks' shards of undelivered gradients."""
    if not any(map(is_sharded, parameters.values())):
        return state
    owed: Mapping[str, torch.Tensor] = state["owed"]
    flags = {name: name in owed and bool(owed[name].any()) for name in parameters}
    some = on_some_rank(flags, parameters)
    return state | {
        "owed": {
            name: whole(owed.get(name, torch.zeros(local(each).shape)), each)
            for name, each in parameters.items()
            if name in some
        }
    }


def _with_own_shards(
    state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> Mapping[str, Any]:
    """The inverse; shards stay as they are, and so do states that are not portable."""
    from hipress.state.checkpoint_format import check_format

    if not state.get("portable"):
        return state
    check_format(state)
    owed = {
        name: own_shard(values, parameters[name])
        if is_sharded(parameters.get(name)) and values.shape == parameters[name].shape
        else values
        for name, values in state["owed"].items()
    }
    return {**state, "owed": owed}


@without_inference_mode()
def load_state_dict(
    ddp: Synchronized | dist.ProcessGroup, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Continue from a state of `state_dict`: bit for bit with scope "tensor", the same world size
    and strategy. A portable state fits any: what it had not delivered is added to each rank's next
    gradient, also where nothing is compressed.

    Every rank must call this, between the same two steps, with states of the same step.

    Raises StateError listing all entries that do not fit (with `strict=False` these start from
    zero), and during a step or after one failed. Raises ConfigMismatch if ranks' states are of
    different steps, or another rank refused its state; then no rank has loaded its state. Raises
    AgreementTimeout for ranks that do not arrive; another rank may then have loaded its state, so
    the module cannot take another step.
    """
    from hipress.engine.residuals import Residuals
    from hipress.state import checkpoint
    from hipress.state import portable as portables
    from hipress.state.checkpoint_format import check_format

    if isinstance(ddp, Outer):
        return outer_state.restore(ddp, state)
    if isinstance(ddp, CompressingGroup):
        return ddp.load_state_dict(state)
    if (sharding := sharding_of(ddp)) is not None:
        params, named = _params_of(ddp)
        with sharding.coordinator.failures_told():
            state = _with_own_shards(state, named)
        return sharding.load_state_dict(state, params, [named[each.name] for each in params])
    ddp = _target(ddp)
    session = _session(ddp)
    _refuse_unfinished(session)
    engine = session.engine
    try:
        check_format(state)
        portable = state.get("portable", False)
        if portable and isinstance(ddp, Gossip):
            raise StateError("Gossip averages parameters: it cannot deliver a portable state")
        if portable:
            state = _with_own_shards(state, _params_of(ddp)[1])
        buckets = None if engine is None else _buckets_for(engine, state)
        residuals = buckets.residuals if buckets else Residuals(session.params, session.plan)
        if portable:
            fitting = portables.portable_params(residuals, state, strict=strict)
            state = portables.without_sums(state, {param.name for param in fitting})
            state = portables.own_shares(residuals, state, fitting)
        else:
            fitting = checkpoint.validate(
                residuals, state, session.rank, session.world_size, strict
            )
    except Exception as error:
        session.coordinator.fail(error)
        raise
    try:
        if session.world_size > 1:  # equal steps give equal random draws and initial factors
            plan = {"its plan": buckets.plan.label} if engine and engine.tuner and buckets else {}
            facts = plan | checkpoint.means_of(state, fitting)
            session.coordinator.require_equal(
                {"the step of the state to load": state["step"], **facts}
            )
        checkpoint.restore(residuals, state, fitting)
        if session.loaded is not None:
            session.loaded(residuals)
        session.loaded_step, owed = state["step"], checkpoint.owed_of(residuals, state)
        measured = state.get("measured", "")
        if portable:  # of any policy, or none
            portables.load_measured(None if engine is None else engine.tuner, measured)
            measured = ""
        if engine is not None and buckets is not None:
            engine.resume(session.loaded_step, buckets, owed, measured)
        else:
            params, named = _params_of(ddp)
            session.carry(owed, [named[each.name] for each in params])
    except ConfigMismatch:  # on every rank
        raise
    except BaseException as error:  # a KeyboardInterrupt, too: another rank may have loaded it
        if engine is not None:
            engine.fail(copy_to_raise(error), "load_state_dict")
        raise


def _buckets_for(engine: Engine, state: Mapping[str, Any]) -> BucketPlans:
    """The engine's buckets; if its plan may change, those of the state's plan."""
    from hipress.state import checkpoint

    if engine.tuner is None or state.get("portable"):
        return engine.buckets
    saved = checkpoint.plan_of(state)
    plan = engine.tuner.restored(saved) if saved else None
    if plan is None or saved == engine.plan.by_name:
        return engine.buckets
    return engine.buckets_of(plan)


def compressible_parameters(ddp: Any) -> dict[str, torch.Tensor]:
    """Parameters of which a state may hold undelivered gradients, by name."""
    params, named = _params_of(ddp)
    return {param.name: named[param.name] for param in params if param.compressible}


def _params_of(ddp: Any) -> tuple[Sequence[Param], dict[str, torch.Tensor]]:
    """The synchronized parameters in their order, and all of the model by name; shards, where FSDP2
    shards it."""
    if sharding_of(ddp) is not None:
        model = compat.uncompiled(ddp)
        reshard(model)
        return describe(model), dict(model.named_parameters())
    session, plain = _session(_target(ddp)), isinstance(ddp, Synchronizer | Gossip)
    module = compat.uncompiled(ddp.module) if plain else _target(ddp).module
    return session.params, dict(module.named_parameters())


def _target(module: Any) -> Any:
    """The key of its session: the DDP module, the Synchronizer or the Gossip."""
    if isinstance(module, Synchronizer | Gossip | Outer):
        return module
    if isinstance(module, dist.ProcessGroup) and not isinstance(module, CompressingGroup):
        raise ConfigError(f"this group is of backend {dist.get_backend(module)!r}, not 'hipress'")
    known = isinstance(module, DistributedDataParallel) or not isinstance(module, nn.Module)
    if not known and any(fsdp_parts(module)):
        raise ConfigError("hipress.shard was not called for this model, or detached from it")
    return as_ddp(module)


def _session(ddp: Any) -> Session:
    session = SESSIONS.get(ddp)
    if session is None:
        raise ConfigError("hipress is not attached to this module; use hipress.wrap or attach")
    return session


def _refuse_unfinished(session: Session) -> None:
    """Raise StateError during a step or after a failure: ranks' states would not fit together."""
    reason = session.engine.unfinished if session.engine is not None else None
    if reason is not None:
        raise StateError(
            f"rank {session.rank}: {reason.rstrip('.')}: states are saved and loaded "
            "between two steps. After a failure: make the process group anew "
            "(destroy_process_group, init_process_group), wrap the model again, and load the "
            "model and the state that were saved last"
        )
