"""The arguments of wrap, attach and Synchronizer: declared, explained and parsed once."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, SupportsIndex, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from casync.codec import Codec
from hipress import options as options_
from hipress.errors import ConfigError
from hipress.optim import Averaging
from hipress.optim.optimizer_kinds import group_facts, refuse_foreign, unwrapped
from hipress.options import AUTO, SCRATCH, Options
from hipress.ranks.groups import group_timeout

if TYPE_CHECKING:
    from hipress.policies import Policy

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
NOT_INITIALIZED = (
    "torch.distributed is not initialized. Start the script with `torchrun` and call "
    'torch.distributed.init_process_group("gloo") first; for a single process: '
    'init_process_group("gloo", init_method="tcp://127.0.0.1:29500", rank=0, world_size=1).'
)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a caller, unchecked: checks wait until other ranks can be told."""

    model: nn.Module
    process_group: dist.ProcessGroup | None
    ddp_kwargs: Mapping[str, Any] | None
    optimizer: Optimizer | str | None
    options: Callable[..., Options]  # from the default time-out; raises ConfigError

    @property
    def averaging(self) -> Averaging | None:
        """The optimizer, if ranks average its momentum."""
        optimizer = self.optimizer
        return optimizer if isinstance(optimizer, Averaging) and optimizer.averages else None

    def optimizer_facts(self) -> dict[str, Any]:
        """Facts about an optimizer in which ranks must be equal; {} without, or for a name. Raises
        ConfigError for one of another model."""
        if not isinstance(self.optimizer, Optimizer):
            return {}
        if self.averaging is None:  # else Momentum looks
            refuse_foreign(self.optimizer, self.model.parameters())
        return {"options of the optimizer": group_facts(self.optimizer)}

    def checked_options(self, way: str, group: dist.ProcessGroup, **refused: str) -> Options:
        """The checked options; ConfigError for wrong options or a given argument of `refused`."""
        for name, why in refused.items():
            if getattr(self, name) is not None:
                raise ConfigError(f"hipress.{way} takes no {name}: {why}")
        return self.options(group_timeout(group))


def arguments(
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
    down: str | os.PathLike[str] | Codec | None = AUTO,
    topology: SupportsIndex | Iterable[Iterable[SupportsIndex]] | None = None,
    optimizer: Optimizer | str | None = None,
    accept_loss: float | None = None,
    rules: Mapping[str, Any] | str | os.PathLike[str] = MappingProxyType({}),
    policy: Policy | None = None,
    transport: str = AUTO,
    capture: bool | str = AUTO,
    scratch: SupportsIndex = SCRATCH,
    process_group: dist.ProcessGroup | None = None,
    ddp_kwargs: Mapping[str, Any] | None = None,
    **params: Any,
) -> Arguments:
    """Arguments of wrap, attach or Synchronizer, as explained by `hipress.options.Options`."""

    def options(default: timedelta) -> Options:
        return options_.make(
            compressor, strategy=strategy, scope=scope, exclude=exclude, min_size=min_size,
            seed=seed, timeout=default if timeout is None else timeout, verify=verify,
            checksum=checksum, down=down, topology=topology, optimizer=optimizer,
            accept_loss=accept_loss, rules=rules, policy=policy, transport=transport,
            capture=capture, scratch=scratch, params=params,
        )  # fmt: skip

    return Arguments(model, process_group, ddp_kwargs, unwrapped(optimizer), options)


class _Reader(Generic[P]):
    """Decorators of functions on Arguments: the decorated function takes the parameters that `read`
    takes, and its signature says so, to people and to type checkers."""

    def __init__(self, read: Callable[P, Arguments]) -> None:
        self._read = read

    def function(self, way: Callable[[Arguments], R]) -> Callable[P, R]:
        """Decorate a function."""

        @functools.wraps(way)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return way(self._parse(way, *args, **kwargs))

        self._sign(call, way)
        return call

    def method(self, way: Callable[[S, Arguments], R]) -> Callable[Concatenate[S, P], R]:
        """Decorate a method."""

        @functools.wraps(way)
        def call(self_: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return way(self_, self._parse(way, *args, **kwargs))

        self._sign(call, way, inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY))
        return call

    def _parse(self, way: Callable[..., Any], *args: P.args, **kwargs: P.kwargs) -> Arguments:
        """The arguments of a call of `way`. Raises TypeError, by its name, for too many or few."""
        try:
            inspect.signature(self._read).bind(*args, **kwargs)
        except TypeError as error:
            name = way.__qualname__.removesuffix(".__init__")
            raise TypeError(
                f"hipress.{name}: {error}; it takes a model, a compressor, and options by name, "
                'such as strategy="ring"'
            ) from None
        return self._read(*args, **kwargs)

    def _sign(self, call: Any, way: Callable[..., Any], *first: inspect.Parameter) -> None:
        read, returns = inspect.signature(self._read), inspect.signature(way).return_annotation
        every = [*first, *read.parameters.values()]
        call.__signature__ = read.replace(parameters=every, return_annotation=returns)


with_arguments = _Reader(arguments)


def group_of(
    process_group: dist.ProcessGroup | None, name: str = "process_group"
) -> dist.ProcessGroup:
    """The given group, or that of all ranks; ConfigError if there is none. name: the argument."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(NOT_INITIALIZED)
    group = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):  # torch gives outsiders a number
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ConfigError(f"this rank is no member of the given {name}")
        raise ConfigError(f"{name} must be a group of dist.new_group, not {group!r}")
    return group
