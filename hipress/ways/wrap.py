"""wrap and attach: a DistributedDataParallel whose gradients travel compressed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hipress import compat, registry
from hipress.arguments import Arguments, group_of, with_arguments
from hipress.errors import ConfigError, HipressError, unknown
from hipress.model.params import (
    as_ddp,
    frozen_tensors,
    refuse_broadcast,
    refuse_part,
    refuse_shared,
    trainable,
)
from hipress.model.shards import fsdp_parts
from hipress.model.torch_modes import without_inference_mode
from hipress.ranks import coordinator as coordinators
from hipress.session import Session, prepare, tell_plan, wrapped_modules
from hipress.ways.ddp import PYTHON_REDUCER, HookState, gradient_hook
from hipress.ways.forward_checks import advise, check_forward_passes

#: types that DDP broadcasts, whatever the backend; complex ones as pairs
SENT_BY_DDP = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
        *(torch.complex32, torch.complex64, torch.complex128),
    )
)


@with_arguments.function
@without_inference_mode()
def wrap(arguments: Arguments) -> DistributedDataParallel:
    """A DistributedDataParallel of `model` whose gradients travel compressed.

    compressor: "auto", a spec's name or path (str or os.PathLike), or a compiled codec; `params`
    are the codec's parameters. `help(hipress.options.Options)` explains the other options.
    `ddp_kwargs` go to DistributedDataParallel, whose defaults are unchanged; a device_mesh among
    them selects the ranks over which gradients are averaged. Every rank must call this, with the
    same arguments (`timeout` may differ).

    torch.distributed must be initialized; with one rank nothing is installed.

    Raises ConfigError for options that cannot work; ConfigMismatch if ranks differ;
    AgreementTimeout for ranks that do not arrive, or a job's store that does not answer in time;
    RankLost if another rank ends or is interrupted meanwhile; and HipressError, their base, if the
    store fails, ranks cannot connect, or their link cannot be measured.
    """
    group = group_of(_requested_group(arguments.process_group, arguments.ddp_kwargs))
    with coordinators.failures_told(group):
        options = arguments.checked_options("wrap", group)
        settings = _ddp_arguments(arguments.model, arguments.ddp_kwargs)
        if options.scope == "model":
            settings |= _one_bucket(arguments.model, settings)
        facts = _facts(arguments.model, settings) | arguments.optimizer_facts()
    # Before DDP: DDP's own check of shapes cannot name the parameter, and may hang.
    session = prepare(arguments.model, options, group, facts, optimizer=arguments.averaging)
    with session.coordinator.failures_told():
        _refuse_uncompressed(session)
        return _finish(_make_ddp(arguments, session, settings), session)


@with_arguments.function
@without_inference_mode()
def attach(arguments: Arguments) -> DistributedDataParallel:
    """Compress the gradients of an existing DistributedDataParallel, and return it.

    The returned module has no torch.compile wrapper. Call this before the first backward pass.
    Arguments and errors as for `wrap`, except those of DistributedDataParallel itself.
    """
    ddp = as_ddp(arguments.model)
    group, why = ddp.process_group, "the DistributedDataParallel has its own"
    with coordinators.failures_told(group):
        options = arguments.checked_options("attach", group, process_group=why, ddp_kwargs=why)
        _refuse_python_reducer()
        _refuse_attached(ddp)
        if options.scope == "model":
            raise ConfigError(
                'scope="model" is for wrap, which has DDP make one bucket, and for Synchronizer'
            )
        facts = {"called": "hipress.attach", **arguments.optimizer_facts()}
    session = prepare(ddp, options, group, facts, optimizer=arguments.averaging)
    with session.coordinator.failures_told():
        return _finish(ddp, session)


def _requested_group(
    process_group: dist.ProcessGroup | None, ddp_kwargs: Mapping[str, Any] | None
) -> dist.ProcessGroup | None:
    """The group that DDP will use: `process_group`, or that of a device_mesh in ddp_kwargs."""
    mesh = ddp_kwargs.get("device_mesh") if isinstance(ddp_kwargs, Mapping) else None
    if mesh is None:
        return process_group
    if process_group is not None:
        raise ConfigError("process_group and a device_mesh in ddp_kwargs: pass one of them")
    if mesh.ndim != 1:
        raise ConfigError(
            f"device_mesh has {mesh.ndim} dimensions; pass the one over which gradients are "
            'averaged, such as mesh["dp"]'
        )
    group: dist.ProcessGroup = mesh.get_group()
    return group


def _ddp_arguments(model: nn.Module, ddp_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Checked arguments of DistributedDataParallel."""
    _refuse_python_reducer()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model must be a torch.nn.Module, got {model!r}")
    inner = compat.uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        _refuse_attached(inner)
        raise ConfigError(
            "the model is a DistributedDataParallel already; pass it to hipress.attach instead"
        )
    if any(fsdp_parts(inner)):
        raise ConfigError(
            "the model is sharded by fully_shard, which DistributedDataParallel cannot average: "
            "hipress.shard(model) compresses what FSDP2 sends; hipress.Synchronizer averages "
            "replicas, with the process_group of the ranks that hold the same shard"
        )
    others = wrapped_modules()
    wrapped = [each for each in others if isinstance(each, DistributedDataParallel)]
    refuse_part(inner, wrapped)
    refuse_shared(inner, [each.module for each in others if each not in wrapped])
    if not isinstance(ddp_kwargs, Mapping | None):
        raise ConfigError(
            f"ddp_kwargs={ddp_kwargs!r}: pass a dict of DistributedDataParallel's arguments"
        )
    settings = dict(ddp_kwargs or {})
    _check_ddp_kwargs(settings)
    if settings.get("init_sync", True) or settings.get("broadcast_buffers", True):
        refuse_broadcast(inner, SENT_BY_DDP)
    return settings


def _check_ddp_kwargs(ddp_kwargs: Mapping[str, Any]) -> None:
    for argument, ours in (("process_group", "process_group"), ("module", "model")):
        if argument in ddp_kwargs:
            raise ConfigError(
                f"{ours} is an argument of hipress.wrap; ddp_kwargs has no {argument}"
            )
    if ddp_kwargs.get("mixed_precision") is not None:
        raise ConfigError(
            "mixed_precision in ddp_kwargs takes DDP's communication hook for itself; "
            "use torch.autocast instead"
        )
    known = set(inspect.signature(DistributedDataParallel).parameters)
    for name in ddp_kwargs:
        if name not in known:
            raise unknown("argument of ddp_kwargs", str(name), known - {"module", "process_group"})


def _one_bucket(model: nn.Module, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by which DDP has all gradients in one bucket; ConfigError if it cannot."""
    if "bucket_cap_mb" in settings:
        raise ConfigError('scope="model" makes one bucket: leave bucket_cap_mb out')
    parameters = [parameter for _, parameter in trainable(model)]
    if len({parameter.dtype for parameter in parameters}) > 1:
        raise ConfigError(
            'scope="model" with parameters of several types, for each of which DDP has a bucket of '
            "its own; use hipress.Synchronizer"
        )
    return {"bucket_cap_mb": sum(p.numel() * p.element_size() for p in parameters) / 2**20 + 1}


def _refuse_uncompressed(session: Session) -> None:
    """Raise ConfigError if scope="model" would leave a parameter uncompressed."""
    for decision in session.plan.decisions:
        if session.options.scope == "model" and session.plan.compresses and not decision.codec:
            raise ConfigError(
                f'scope="model" compresses a bucket of DDP as one, but {decision.name!r} stays '
                f"uncompressed in it ({decision.why}); use hipress.Synchronizer"
            )


def _facts(model: nn.Module, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Facts in which ranks must be equal before DDP is made."""
    facts: dict[str, Any] = {"called": "hipress.wrap", "ddp_kwargs": _plain(settings)}
    if settings.get("init_sync", True):
        facts["frozen parameters and buffers"] = frozen_tensors(model)
    return facts


def _plain(ddp_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Arguments as text; of objects only the type, since their text may contain an address."""
    simple = bool | int | float | str | None
    return {
        key: repr(value) if isinstance(value, simple) else type(value).__name__
        for key, value in ddp_kwargs.items()
    }


def _make_ddp(
    arguments: Arguments, session: Session, settings: Mapping[str, Any]
) -> DistributedDataParallel:
    try:
        ddp = DistributedDataParallel(
            arguments.model, process_group=arguments.process_group, **settings
        )
    except (TypeError, ValueError) as error:  # on every rank: their arguments are equal
        message = f"DistributedDataParallel refuses the model or ddp_kwargs: {error}"
        raise ConfigError(message) from error
    except RuntimeError as error:  # of gloo, perhaps
        session.coordinator.raise_reason(error)
        raise HipressError(session.coordinator.explained(error, "making DDP")) from error
    advise(ddp)
    return ddp


def _finish(ddp: DistributedDataParallel, session: Session) -> DistributedDataParallel:
    _refuse_attached(ddp)
    named = dict(ddp.module.named_parameters())
    parameters = [named[param.name] for param in session.params]
    if session.world_size > 1:
        check_forward_passes(ddp, session, parameters)
    if session.plan.compresses or session.controller is not None or session.optimizer is not None:
        _install(ddp, session, parameters)
    tell_plan(session)
    registry.put(ddp, session)
    return ddp


def _install(
    ddp: DistributedDataParallel, session: Session, parameters: Sequence[nn.Parameter]
) -> None:
    """Start the engine and register its hook with DDP (once: DDP cannot forget a hook)."""
    engine = session.make_engine(
        session.group, parameters,
        skips=compat.skips_unused_buckets(ddp), unused=ddp.find_unused_parameters,
    )  # fmt: skip
    states = [state for _, state in compat.comm_hooks(ddp) if isinstance(state, HookState)]
    registered = [state for state in states if state.registered]
    if not registered:  # else that of before a detach, which DDP keeps
        registered = [HookState(ddp, session.group)]
        ddp.register_comm_hook(registered[0], gradient_hook)
    (hook,) = registered
    hook.bind(engine, parameters, session.coordinator)
    session.start(ddp, engine, hook.release)


def _refuse_attached(ddp: DistributedDataParallel) -> None:
    if registry.get(ddp, Session) is not None:
        raise ConfigError(
            "hipress is attached to this module already: train it as it is. For other options, "
            "hipress.detach it, then hipress.attach it with these"
        )
    for hook, state in compat.comm_hooks(ddp):
        if not isinstance(state, HookState):
            message = f"this module has a communication hook already ({hook.__qualname__})"
            raise ConfigError(f"{message}; DDP takes one")


def _refuse_python_reducer() -> None:
    if compat.uses_python_reducer():
        raise ConfigError(PYTHON_REDUCER)
