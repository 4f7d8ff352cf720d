"""The functions a user calls: wrap, attach, detach, report, state_dict, load_state_dict."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from casync.errors import copy_to_raise
from hipress import compat
from hipress import options as options_
from hipress.errors import ConfigError, ConfigMismatch, StateError, unknown
from hipress.model import as_ddp, refuse_part
from hipress.options import AUTO
from hipress.ranks import meeting as meetings
from hipress.ranks.link import group_timeout
from hipress.session import REGISTRY, Session, install, plain_options, prepare

if TYPE_CHECKING:
    from casync.codec import Codec
    from hipress.reporting import Report

log = logging.getLogger("hipress")
NOT_INITIALIZED = (
    "torch.distributed is not initialized. Start the script with `torchrun` and call "
    'torch.distributed.init_process_group("gloo") first; for a single process: '
    'init_process_group("gloo", init_method="tcp://127.0.0.1:29500", rank=0, world_size=1).'
)


def wrap(
    model: nn.Module,
    compressor: str | os.PathLike[str] | Codec = AUTO,
    *,
    strategy: str = AUTO,
    scope: str = "tensor",
    exclude: str | Iterable[str] = (),
    min_size: SupportsIndex | None = None,
    seed: SupportsIndex = 0,
    timeout: float | timedelta | None = None,
    verify: bool = False,
    checksum: bool = False,
    process_group: dist.ProcessGroup | None = None,
    ddp_kwargs: Mapping[str, Any] | None = None,
    **params: Any,
) -> DistributedDataParallel:
    """A DistributedDataParallel of `model` whose gradients travel compressed.

    `compressor` is "auto", a spec's name or path (a str or an os.PathLike), or a compiled codec;
    `params` are the codec's.
    The other options are explained by `help(hipress.options.Options)`. `ddp_kwargs` go to
    DistributedDataParallel, with gradient_as_bucket_view=True unless they say otherwise; gradients
    are averaged over the ranks of a device_mesh among them. Every rank must call this, with the
    same arguments (`timeout` may differ).
    torch.distributed must be initialized; with one rank nothing is installed.

    Raises ConfigError for options that cannot work, ConfigMismatch when ranks differ,
    AgreementTimeout for ranks that do not arrive or a job's store that does not answer in time, and
    HipressError, of which these are kinds, where that store fails, or ranks cannot be connected or
    their link not be measured.
    """
    group = _ddp_group(_requested_group(process_group, ddp_kwargs))
    with meetings.failures_told(group):
        options = options_.make(
            compressor, strategy=strategy, scope=scope, exclude=exclude, min_size=min_size,
            seed=seed, timeout=group_timeout(group) if timeout is None else timeout, verify=verify,
            checksum=checksum, params=params,
        )  # fmt: skip
        settings = _ddp_arguments(model, ddp_kwargs)
    # Before DDP: its own check of shapes cannot name the parameter, and may hang.
    session = prepare(model, options, group, settings)
    try:
        ddp = DistributedDataParallel(model, process_group=process_group, **settings)
    except (TypeError, ValueError) as error:  # on every rank: they agree on all of it
        message = f"DistributedDataParallel refuses the model or ddp_kwargs: {error}"
        raise ConfigError(message) from error
    return _finish(ddp, session)


def attach(
    ddp: DistributedDataParallel,
    compressor: str | os.PathLike[str] | Codec = AUTO,
    *,
    strategy: str = AUTO,
    scope: str = "tensor",
    exclude: str | Iterable[str] = (),
    min_size: SupportsIndex | None = None,
    seed: SupportsIndex = 0,
    timeout: float | timedelta | None = None,
    verify: bool = False,
    checksum: bool = False,
    **params: Any,
) -> DistributedDataParallel:
    """Compress the gradients of an existing DistributedDataParallel; returns it, also where it
    comes as what torch.compile made of it.

    Arguments and errors as for `wrap`. Call it before the first backward pass.
    """
    ddp = as_ddp(ddp)
    group = ddp.process_group
    with meetings.failures_told(group):
        options = options_.make(
            compressor, strategy=strategy, scope=scope, exclude=exclude, min_size=min_size,
            seed=seed, timeout=group_timeout(group) if timeout is None else timeout, verify=verify,
            checksum=checksum, params=params,
        )  # fmt: skip
        _refuse_python_reducer()
        _refuse_taken(ddp)
    return _finish(ddp, prepare(ddp, options, group))


def detach(ddp: DistributedDataParallel) -> None:
    """Stop compressing: end threads and connections. The module then averages uncompressed.

    `attach` may be called again. Every rank must call this between the same two steps.

    Raises StateError in a backward pass (from a hook, say) of which gradients are on their way.
    """
    from hipress.adapters.ddp import in_backward

    ddp = as_ddp(ddp)
    session = _session(ddp)
    if session.engine is not None and session.engine.under_way and in_backward():
        raise StateError(
            f"rank {session.rank}: hipress.detach in a backward pass of which gradients are on "
            "their way; call it between steps"
        )
    if ddp in REGISTRY.hooks:
        REGISTRY.hooks[ddp].engine = None
    session.close()
    del REGISTRY.sessions[ddp]


def report(ddp: DistributedDataParallel) -> Report:
    """Choices, bytes and times so far; print it or take its `to_dict()`."""
    from hipress.reporting import Report, describe_plan, measure_of

    session = _session(as_ddp(ddp))
    engine, size = session.engine, session.world_size
    measured = measure_of(engine.traffic, engine.counters, size) if engine else None
    return Report(
        rank=session.rank,
        world_size=size,
        installed=engine is not None,
        why=describe_plan(session.plan, session.params),
        options=plain_options(session.options),
        decisions=session.plan.decisions,
        measured=measured,
        probe=session.probe,
    )


def state_dict(ddp: DistributedDataParallel) -> dict[str, Any]:
    """This rank's step counter and residuals, by parameter name; call it between steps.

    Residuals differ between ranks: save one file per rank, or with torch.distributed.checkpoint
    under a key per rank. It holds tensors, numbers and texts only, so
    torch.load(weights_only=True) reads it.

    Raises StateError while a step is under way or after one failed: ranks may have come
    differently far in it.
    """
    from hipress.sync import checkpoint
    from hipress.sync.state import Residuals

    session = _session(as_ddp(ddp))
    _refuse_unfinished(session)
    rank, size = session.rank, session.world_size
    if session.engine is None:
        empty = Residuals(session.params, session.plan)
        return checkpoint.export(empty, session.loaded_step, rank, size)
    return checkpoint.export(session.engine.buckets.residuals, session.engine.step, rank, size)


def load_state_dict(
    ddp: DistributedDataParallel, state: Mapping[str, Any], *, strict: bool = True
) -> None:
    """Continue where `state_dict` was taken, bit for bit (scope "tensor"; same world size and
    strategy). Every rank must call this, between the same two steps, with states of one step.

    Raises StateError listing what does not fit, which with `strict=False` starts from zero instead;
    and while a step is under way or after one failed. Raises ConfigMismatch where ranks' states are
    of different steps, or another rank's state was refused; then none is loaded on any rank.
    AgreementTimeout for ranks that do not arrive; as another rank may then have loaded its state,
    the module cannot take another step.
    """
    from hipress.sync import checkpoint
    from hipress.sync.state import Residuals

    session = _session(as_ddp(ddp))
    _refuse_unfinished(session)
    engine = session.engine
    residuals = engine.buckets.residuals if engine else Residuals(session.params, session.plan)
    try:
        fitting = checkpoint.validate(residuals, state, session.rank, session.world_size, strict)
    except Exception as error:
        session.meeting.fail(error)
        raise
    try:
        if session.world_size > 1:  # by the step ranks draw alike, and begin a factor alike
            session.meeting.settle({"the step of the state to load": state["step"]})
        checkpoint.restore(residuals, state, fitting)
        session.loaded_step = state["step"]
        if engine is not None:
            engine.step = session.loaded_step
    except ConfigMismatch:  # on every rank
        raise
    except BaseException as error:  # a KeyboardInterrupt, too: another rank may have loaded it
        if engine is not None:
            engine.fail(copy_to_raise(error), "load_state_dict")
        raise


def _requested_group(
    process_group: dist.ProcessGroup | None, ddp_kwargs: Mapping[str, Any] | None
) -> dist.ProcessGroup | None:
    """The group that DDP will take: as `process_group`, or from a device_mesh in ddp_kwargs."""
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


def _ddp_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """DDP's process group; ConfigError when there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(NOT_INITIALIZED)
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):  # torch gives outsiders a number
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError("this rank is no member of the given process_group")
        raise ConfigError(f"process_group is what dist.new_group returns, not {group!r}")
    return group


def _ddp_arguments(model: nn.Module, ddp_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """What DistributedDataParallel is made with."""
    _refuse_python_reducer()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the model must be a torch.nn.Module, got {model!r}")
    inner = compat.uncompiled(model)
    if isinstance(inner, DistributedDataParallel):
        _refuse_taken(inner)
        raise ConfigError(
            "the model is a DistributedDataParallel already; pass it to hipress.attach instead"
        )
    refuse_part(inner, REGISTRY.sessions)
    if not isinstance(ddp_kwargs, Mapping | None):
        raise ConfigError(
            f"ddp_kwargs={ddp_kwargs!r}: pass a dict of DistributedDataParallel's arguments"
        )
    _check_ddp_kwargs(ddp_kwargs or {})
    return {"gradient_as_bucket_view": True, **(ddp_kwargs or {})}


def _check_ddp_kwargs(ddp_kwargs: Mapping[str, Any]) -> None:
    for taken, ours in (("process_group", "process_group"), ("module", "model")):
        if taken in ddp_kwargs:
            raise ConfigError(f"{ours} is an argument of hipress.wrap; ddp_kwargs has no {taken}")
    if ddp_kwargs.get("mixed_precision") is not None:
        raise ConfigError(
            "mixed_precision in ddp_kwargs takes DDP's communication hook for itself; "
            "use torch.autocast instead"
        )
    known = set(inspect.signature(DistributedDataParallel).parameters)
    for name in ddp_kwargs:
        if name not in known:
            raise unknown("argument of ddp_kwargs", str(name), known - {"module", "process_group"})


def _finish(ddp: DistributedDataParallel, session: Session) -> DistributedDataParallel:
    _refuse_taken(ddp)
    if session.plan.compresses:
        install(ddp, session)
    if session.rank == 0:
        _tell_plan(session)
    REGISTRY.sessions[ddp] = session
    return ddp


def _tell_plan(session: Session) -> None:
    """A line of INFO; a warning where a compressor was asked for and most stays uncompressed."""
    from hipress.reporting import compressed_share, describe_plan

    asked = session.world_size > 1 and not (session.options.automatic or session.options.exclude)
    unexpected = asked and compressed_share(session.plan, session.params) < 0.5
    level = logging.WARNING if unexpected else logging.INFO
    log.log(level, "hipress: %s", describe_plan(session.plan, session.params))


def _session(ddp: DistributedDataParallel) -> Session:
    session = REGISTRY.sessions.get(ddp)
    if session is None:
        raise ConfigError("hipress is not attached to this module; use hipress.wrap or attach")
    return session


def _refuse_unfinished(session: Session) -> None:
    """Within a step ranks have come differently far, so their states would not fit together."""
    reason = session.engine.unfinished if session.engine is not None else None
    if reason is not None:
        raise StateError(
            f"rank {session.rank}: {reason.rstrip('.')}: this is the state of no step. "
            "After a failure: make the process group anew (destroy_process_group, "
            "init_process_group), wrap the model again, and load the model and the state that "
            "were saved last"
        )


def _refuse_taken(ddp: DistributedDataParallel) -> None:
    if ddp in REGISTRY.sessions:
        raise ConfigError(
            "hipress is attached to this module already: train it as it is. For other options, "
            "hipress.detach it, then hipress.attach it with these"
        )
    for hook, state in compat.comm_hooks(ddp):
        if not _ours(state):
            message = f"this module has a communication hook already ({hook.__qualname__})"
            raise ConfigError(f"{message}; DDP takes one")


def _ours(state: object) -> bool:
    """Whether a hook of this state is ours: of this module, or of that from which it was copied."""
    from hipress.adapters.ddp import HookState

    return isinstance(state, HookState)


def _refuse_python_reducer() -> None:
    if compat.uses_python_reducer():
        from hipress.adapters.ddp import PYTHON_REDUCER

        raise ConfigError(PYTHON_REDUCER)
