"""Handles: what `report`, `state_dict`, `load_state_dict` and `detach` do for each way in.

Each is a thin object for one call, since neither sessions nor shards' collectives may refer to
their module: a dropped model is collected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from casync.errors import copy_to_raise
from hipress import compat, registry
from hipress.channel.records import GRADIENTS, SHARDS, check_record
from hipress.choose.trial import REFUSED
from hipress.choose.tuner import forbidden
from hipress.engine import saving
from hipress.engine.residuals import Residuals
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
from hipress.session import Session, plain_options, session_of
from hipress.sharding.sharding import Sharding
from hipress.ways.gossip import Gossip
from hipress.ways.outer import Outer
from hipress.ways.process_group import CompressingGroup
from hipress.ways.synchronizer import Synchronizer

if TYPE_CHECKING:
    from hipress.choose.chooser import Chooser
    from hipress.engine.buckets import BucketPlans
    from hipress.reporting.report import Report
    from hipress.reporting.shard_report import ShardReport

__all__ = ["Handle", "ModelHandle", "handle_of", "model_handle"]


class Handle(Protocol):
    """Functions of the results of wrap, attach, Synchronizer, Gossip, shard, Outer and of a process
    group: see hipress/api.py."""

    def report(self) -> Any: ...

    def state_dict(self, *, portable: bool = False) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None: ...

    def detach(self) -> None: ...


class ModelHandle(Handle, Protocol):
    """A handle of a model's parameters, which FSDP2 may shard."""

    def parameters(self) -> tuple[Sequence[Param], dict[str, torch.Tensor]]:
        """The synchronized parameters in their order, and all of the model by name; shards, where
        FSDP2 shards it."""
        ...

    def portable_shards(self) -> dict[str, Any]:
        """The portable record, of this rank's shards. All ranks must call this."""
        ...


def handle_of(target: Any) -> Handle:
    """The handle of a result of wrap, attach, Synchronizer, Gossip, shard or Outer, or of a process
    group `hipress`. Raises ConfigError for anything else."""
    if isinstance(target, Outer | CompressingGroup):
        return target
    if isinstance(target, dist.ProcessGroup):
        raise ConfigError(f"this group is of backend {dist.get_backend(target)!r}, not 'hipress'")
    return model_handle(target)


def model_handle(target: Any) -> ModelHandle:
    """The same for a module, a Synchronizer or a Gossip."""
    inner = compat.uncompiled(target) if isinstance(target, nn.Module) else target
    if (sharding := registry.get(inner, Sharding)) is not None:
        return ShardHandle(inner, sharding)
    if not isinstance(target, Synchronizer | Gossip):
        known = isinstance(target, DistributedDataParallel) or not isinstance(target, nn.Module)
        if not known and any(fsdp_parts(target)):
            raise ConfigError("hipress.shard was not called for this model, or detached from it")
        target = as_ddp(target)
    return SessionHandle(target, session_of(target))


class ShardHandle:
    """The handle of a model of `hipress.shard`."""

    def __init__(self, model: nn.Module, sharding: Sharding) -> None:
        self._model, self._sharding = model, sharding

    def report(self) -> ShardReport:
        return self._sharding.report()

    def state_dict(self, *, portable: bool = False) -> dict[str, Any]:
        if portable:
            return with_whole_tensors(self.portable_shards(), self.parameters()[1])
        return self._sharding.state_dict(self.parameters()[0])

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        params, named = self.parameters()
        with self._sharding.coordinator.failures_told():
            state = with_own_shards(state, named)
        self._sharding.load_state_dict(state, params, [named[each.name] for each in params])

    def detach(self) -> None:
        registry.drop(self._model)
        self._sharding.detach()

    def parameters(self) -> tuple[Sequence[Param], dict[str, torch.Tensor]]:
        reshard(self._model)
        return describe(self._model), dict(self._model.named_parameters())

    def portable_shards(self) -> dict[str, Any]:
        return self._sharding.portable_state_dict(self.parameters()[0])


class SessionHandle:
    """The handle of a DDP module, a Synchronizer or a Gossip."""

    def __init__(self, target: Any, session: Session) -> None:
        self._target, self._session = target, session

    def detach(self) -> None:
        session = self._session
        step = None if session.engine is None else session.engine.reduction
        if step is not None and compat.backward_id() is not None:
            raise StateError(
                f"rank {session.rank}: hipress.detach in a backward pass of which gradients are on "
                "their way; call it between steps"
            )
        session.close()
        registry.drop(self._target)

    def parameters(self) -> tuple[Sequence[Param], dict[str, torch.Tensor]]:
        target, module = self._target, self._target.module
        if isinstance(target, Synchronizer | Gossip):
            module = compat.uncompiled(module)
        return self._session.params, dict(module.named_parameters())

    def report(self) -> Report:
        from hipress.reporting.measured import measure_of
        from hipress.reporting.report import Report

        session = self._session
        engine, size = session.engine, session.world_size
        chooser = None if engine is None else engine.chooser
        probe = session.probe
        measured = before = None
        if engine is not None:
            traffic, counters = engine.traffic, engine.counters
            if engine.at_freeze is not None:
                before = measure_of(*engine.at_freeze, size)
                traffic, counters = traffic - engine.at_freeze[0], counters - engine.at_freeze[1]
            measured = measure_of(traffic, counters, size)
        if probe and chooser and chooser.costs:
            probe = replace(probe, costs=chooser.costs)
        return Report(
            rank=session.rank,
            world_size=size,
            installed=engine is not None,
            why=_why(session, chooser),
            options=plain_options(session.options),
            decisions=session.current_plan.decisions,
            measured=measured,
            probe=probe,
            cuts={name: codec.cuts for name, codec in session.current_plan.codecs.items()},
            tried=chooser.tried if chooser else (),
            trial_seconds=chooser.trial_seconds if chooser else None,
            before_freeze=before,
            capture=_capture_of(session, chooser) if engine and session.placement.by_nccl else "",
        )

    def state_dict(self, *, portable: bool = False) -> dict[str, Any]:
        if portable:
            return with_whole_tensors(self.portable_shards(), self.parameters()[1])
        session = self._session
        if session.world_size == 1 and not isinstance(self._target, Gossip):  # its state is all's
            return self.portable_shards()
        _refuse_unfinished(session)
        return saving.export(session.place, *session.progress())

    def portable_shards(self) -> dict[str, Any]:
        session, (_, named) = self._session, self.parameters()
        if session.engine is not None and isinstance(self._target, Gossip):
            raise StateError(
                "Gossip has no portable state: it holds estimates of these ranks' parameters. "
                "Average the parameters (hipress.all_reduce with compressor 'none'), save them "
                "once, and make a new Gossip, which begins with them"
            )
        _refuse_unfinished(session)
        sharded = any(map(is_sharded, named.values()))
        return saving.export_portable(*session.progress(), session.mean, sharded=sharded)

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        session = self._session
        _refuse_unfinished(session)
        with session.coordinator.failures_told():
            state, residuals, buckets, fitting = self._fit(state, strict=strict)
        engine = session.engine
        try:
            if session.world_size > 1:  # equal steps give equal random draws and initial factors
                facts = {"the step of the state to load": state["counter"]}
                if engine is not None and engine.chooser and buckets:
                    facts["its plan"] = buckets.plan.label
                session.coordinator.require_equal(facts | saving.means_of(state, fitting))
            saving.restore(residuals, state, fitting)
            if session.loaded is not None:
                session.loaded(residuals)
            session.loaded_step = state["counter"]
            undelivered = saving.undelivered_of(residuals, state)
            measured = state["more"].get("measured", "")
            if state["portable"]:  # of any policy, or none
                saving.load_measured(None if engine is None else engine.chooser, measured)
                measured = ""
            if engine is not None and buckets is not None:
                engine.resume(session.loaded_step, buckets, undelivered, measured)
            else:
                params, named = self.parameters()
                session.carry(undelivered, [named[each.name] for each in params])
        except ConfigMismatch:  # on every rank
            raise
        except BaseException as error:  # a KeyboardInterrupt, too: another rank may have loaded it
            if engine is not None:
                engine.fail(copy_to_raise(error), "load_state_dict")
            raise

    def _fit(
        self, state: Mapping[str, Any], *, strict: bool
    ) -> tuple[Mapping[str, Any], Residuals, BucketPlans | None, list[Param]]:
        """The record as this rank loads it; residuals, and buckets, if any, into which; and the
        parameters whose states fit. Raises StateError."""
        session, engine = self._session, self._session.engine
        check_record(state, GRADIENTS)
        portable = state["portable"]
        if portable and isinstance(self._target, Gossip):
            raise StateError("Gossip averages parameters: it cannot deliver a portable state")
        if portable:
            state = with_own_shards(state, self.parameters()[1])
        buckets = None if engine is None else engine.buckets_for(state)
        residuals = buckets.residuals if buckets else Residuals(session.params, session.plan)
        if not portable:
            fitting = saving.validate(residuals, state, session.place, strict=strict)
            return state, residuals, buckets, fitting
        fitting = saving.portable_params(residuals, state, strict=strict)
        state = saving.without_sums(state, {param.name for param in fitting})
        return saving.own_shares(residuals, state, fitting), residuals, buckets, fitting


def compressible(handle: ModelHandle) -> dict[str, torch.Tensor]:
    """Parameters of which a record may hold undelivered gradients, by name."""
    params, named = handle.parameters()
    return {param.name: named[param.name] for param in params if param.compressible}


def with_whole_tensors(
    state: dict[str, Any], parameters: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """A portable record with all ranks' shards of undelivered gradients."""
    if not any(map(is_sharded, parameters.values())):
        return state
    mine: Mapping[str, torch.Tensor] = state["undelivered"]
    flags = {name: name in mine and bool(mine[name].any()) for name in parameters}
    some = on_some_rank(flags, parameters)
    return state | {
        "undelivered": {
            name: whole(mine.get(name, torch.zeros(local(each).shape, device="cpu")), each)
            for name, each in parameters.items()
            if name in some
        }
    }


def with_own_shards(
    state: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> Mapping[str, Any]:
    """The inverse; shards stay as they are, and so do records that are not portable."""
    check_record(state, GRADIENTS, SHARDS)
    if not state["portable"]:
        return state
    mine = {
        name: own_shard(values, parameters[name])
        if is_sharded(parameters.get(name)) and values.shape == parameters[name].shape
        else values
        for name, values in state["undelivered"].items()
    }
    return {**state, "undelivered": mine}


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


def _capture_of(session: Session, chooser: Chooser | None) -> str:
    """Text on the use of CUDA graphs, and why there is none."""
    plan, options = session.current_plan, session.options
    if plan.captured or options.capture is True:
        return "buckets are launched as CUDA graphs"
    why = forbidden(plan, options)
    if not why and chooser is not None:
        failed = any(each.verdict == REFUSED for each in chooser.tried)
        why = "a capture failed" if failed else "as fast in a trial"
        why = "graphs are being tried" if chooser.trial_seconds is None else why
    return f"tasks are launched one by one: {why}"


def _why(session: Session, chooser: Chooser | None) -> str:
    """Text on the plan of gradients, and on that of momentum."""
    from hipress.choose.chooser import Phases
    from hipress.optim.adam import Freezing
    from hipress.reporting.tables import describe_phases, describe_plan

    if isinstance(chooser, Phases) and isinstance(session.optimizer, Freezing):
        return describe_phases(session.optimizer, *chooser.plans, session.params)
    plan = describe_plan(session.current_plan, session.params)
    if session.optimizer is None:
        return plan
    return f"{plan}; averages of the momentum of hipress.optim.{type(session.optimizer).__name__}"
