"""Setting up one DDP module: agreement of the ranks, plan, engine; and taking it down again."""

from __future__ import annotations

import platform
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from casync import strategies
from hipress import agree, planner
from hipress.agree import Meeting
from hipress.codecs import parameters, resolve, strategy_for
from hipress.errors import HipressError
from hipress.link import absent, connect
from hipress.model import Param, describe, untrained
from hipress.options import AUTO, Options

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from casync.codec import Codec
    from hipress.engine import Engine
    from hipress.hook import HookState
    from hipress.planner import Plan
    from hipress.probe import Probe


@dataclass(eq=False)
class Session:
    """What belongs to one DDP module. `engine` is None where DDP's own all-reduce remains."""

    params: tuple[Param, ...]
    options: Options
    plan: Plan
    home: dist.ProcessGroup  # DDP's group
    meeting: Meeting
    probe: Probe | None = None
    engine: Engine | None = None
    finalizer: Any = None
    idle_step: int = 0  # of a loaded state, where no engine counts

    @property
    def rank(self) -> int:
        """Of this process within the group, also when torch.distributed has been shut down."""
        return self.meeting.rank

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return len(self.meeting.ranks)

    def close(self) -> None:
        """End threads and groups; the module then averages without us."""
        if self.finalizer is not None:
            self.finalizer()


@dataclass
class _Books:
    """All sessions of the process. Weak keys: a module that dies takes its session with it."""

    sessions: weakref.WeakKeyDictionary[DistributedDataParallel, Session] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    hooks: weakref.WeakKeyDictionary[DistributedDataParallel, HookState] = field(
        default_factory=weakref.WeakKeyDictionary
    )


BOOKS = _Books()


def prepare(
    module: nn.Module,
    options: Options,
    home: dist.ProcessGroup,
    ddp_kwargs: Mapping[str, Any] | None = None,
) -> Session:
    """Agree with the other ranks and plan. See [Note: agreement].

    `module`: the model, as no DDP module is needed yet, or the DDP module.
    `ddp_kwargs`: what DDP will be made with, on which the ranks must agree, too.
    Raises ConfigError, ConfigMismatch or AgreementTimeout; on every rank, if on one.
    """
    meeting = agree.meeting(home, options.timeout)
    try:
        params = describe(module)
        planner.check_patterns(params, options)
        codecs = _codecs(options)
    except Exception as error:
        meeting.fail(error)
        raise
    facts = _facts(params, options, codecs) | {"ddp_kwargs": _plain(ddp_kwargs or {})}
    if ddp_kwargs is not None and ddp_kwargs.get("init_sync", True):
        facts["frozen parameters and buffers"] = untrained(module)
    meeting.settle(facts)
    try:
        session = _plan(params, codecs, options, home, meeting)
        _compile(session.plan)
    except Exception as error:
        meeting.fail(error)
        raise
    meeting.settle({"plan": session.plan.facts()})
    return session


def install(ddp: DistributedDataParallel, session: Session) -> None:
    """Start the engine and hand its hook to DDP (once: DDP cannot forget a hook)."""
    from hipress.engine import Engine
    from hipress.hook import HookState, gradient_hook

    session.engine = Engine(
        session.params,
        session.plan,
        session.options,
        session.home,
        session.meeting,
        skips=getattr(ddp, "skip_all_reduce_unused_params", False),  # not in every torch
        unused=ddp.find_unused_parameters,
    )
    session.finalizer = weakref.finalize(ddp, session.engine.close)
    if ddp not in BOOKS.hooks:
        BOOKS.hooks[ddp] = HookState(session.home, delayed=ddp.static_graph)
        ddp.register_comm_hook(BOOKS.hooks[ddp], gradient_hook)
    named = dict(ddp.module.named_parameters())
    BOOKS.hooks[ddp].serve(session.engine, [named[param.name] for param in session.params])


def _codecs(options: Options) -> dict[str, Codec]:
    if options.automatic:
        from hipress.automatic import candidates

        return candidates(options)
    codec = resolve(options)
    strategy_for(codec, options.strategy)
    return {codec.name: codec}


def _facts(
    params: tuple[Param, ...], options: Options, codecs: Mapping[str, Codec]
) -> dict[str, Any]:
    """Everything that must be equal on all ranks."""
    return {
        "compressor": AUTO if options.automatic else _described(*codecs.values()),
        "strategy": options.strategy,
        "scope": options.scope,
        "exclude": sorted(set(options.exclude)),  # given as a set, every rank has its order
        "min_size": str(options.min_size),
        "seed": options.seed,
        "verify": options.verify,
        "parameters": [str(p) for p in params],
        "digests": {_called(codec, options): codec.digest for codec in codecs.values()},
        "versions": _versions(),
    }


def _called(codec: Codec, options: Options) -> str:
    """Such as `spec 'mine.yaml'`: what differs when digests do."""
    named = isinstance(options.compressor, str) and not options.automatic
    kind = "spec" if hasattr(codec, "params") else "codec"
    return f"{kind} {(options.compressor if named else codec.name)!r}"


def _plain(ddp_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Arguments as text; of an object its type, since its text may hold an address."""
    simple = bool | int | float | str | None
    return {
        key: repr(value) if isinstance(value, simple) else type(value).__name__
        for key, value in ddp_kwargs.items()
    }


def label(options: Options) -> str:
    """What was asked for, such as `topk(ratio=0.01)`; a compiled codec with all parameters."""
    if not isinstance(options.compressor, str):
        return _described(options.compressor)
    return AUTO if options.automatic else _call(options.compressor, options.params)


def plain_options(options: Options) -> dict[str, Any]:
    """Options as JSON takes them."""
    # not asdict, which copies what it finds: a compiled codec holds locks, and has a label
    own = {each.name: getattr(options, each.name) for each in fields(options)}
    return own | {"compressor": label(options), "params": dict(options.params)}


def _described(codec: Codec) -> str:
    """With all parameters: `topk` is the same as `topk(ratio=0.01)` where that is the default."""
    return _call(codec.name, parameters(codec))


def _call(name: str, params: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in sorted(params.items()))})"


def _versions() -> dict[str, str]:
    try:
        ours = version("hipress")
    except PackageNotFoundError:  # a checkout that is not installed
        ours = "unknown"
    return {"hipress": ours, "torch": torch.__version__, "machine": platform.machine()}


def _plan(
    params: tuple[Param, ...],
    codecs: Mapping[str, Codec],
    options: Options,
    home: dist.ProcessGroup,
    meeting: Meeting,
) -> Session:
    ranks = dist.get_world_size(home)
    if ranks == 1:
        why = "one rank: there is nothing to synchronize"
        plan = planner.Plan(tuple(planner.raw(p, why) for p in params), {}, why)
        return Session(params, options, plan, home, meeting)
    if not options.automatic:
        (codec,) = codecs.values()
        plan = planner.fixed_plan(params, codec, options, ranks)
        return Session(params, options, plan, home, meeting)
    return _auto(params, codecs, options, home, meeting)


def _compile(plan: Plan) -> None:
    """What aggregators need is compiled now, not in the first step, where other ranks wait."""
    for key, strategy in {(d.codec, d.strategy) for d in plan.decisions}:
        if key is not None and strategies.load(strategy).SPREADS:
            compile_ = getattr(plan.codecs[key], "prepare", None)  # codecs of others have none
            if compile_ is not None:
                compile_()


def _auto(
    params: tuple[Param, ...],
    codecs: Mapping[str, Codec],
    options: Options,
    home: dist.ProcessGroup,
    meeting: Meeting,
) -> Session:
    from hipress.automatic import auto_plan
    from hipress.probe import measure

    try:
        probe = measure(connect(meeting, "probe"), codecs)
    except RuntimeError as error:
        told = f"rank {meeting.ranks[meeting.rank]}: the link between ranks {meeting.ranks}"
        told += f" could not be measured{absent(meeting, 'measurement')}"
        raise HipressError(f"{told}: {error}") from error
    plan = auto_plan(params, codecs, probe.costs, options, dist.get_world_size(home))
    return Session(params, options, plan, home, meeting, probe)
