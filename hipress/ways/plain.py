"""Checks of a module that is trained without DDP, by a Synchronizer or by gossip."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hipress import compat, registry
from hipress.errors import ConfigError
from hipress.model.params import as_module, refuse_broadcast, refuse_shared, trainable
from hipress.model.shards import apart, is_sharded, local
from hipress.model.snapshot import Snapshot
from hipress.session import Session, wrapped_modules

log = logging.getLogger("hipress")


class Frontend(Protocol):
    """A Synchronizer or a Gossip."""

    module: nn.Module


def plain_module(model: object, frontend: Frontend) -> nn.Module:
    """The module to synchronize, without torch.compile's wrapper, or ConfigError."""
    name = type(frontend).__name__
    inner = as_module(model)
    if isinstance(inner, DistributedDataParallel):
        raise ConfigError(
            f"a {name} takes a module without DDP, but this is a DistributedDataParallel: "
            "pass its .module here, or it to hipress.attach"
        )
    refuse_shared(inner, [each.module for each in wrapped_modules()])
    refuse_broadcast(inner)
    return inner


def snapshot(
    frontend: Frontend, session: Session, model: nn.Module, parameters: Sequence[nn.Parameter]
) -> Snapshot:
    """A record of these synchronized parameters as they are now, to detect later changes."""
    again = f"To go on, hipress.detach the {type(frontend).__name__} and make another one"
    rank = session.coordinator.ranks[session.rank]
    return Snapshot(model, session.params, parameters, rank, again)


def refuse_detached(frontend: Frontend, session: Session) -> None:
    """Raise ConfigError after hipress.detach."""
    if registry.get(frontend, Session) is not session:
        name = type(frontend).__name__
        raise ConfigError(f"hipress is detached from this {name}; make another one")


def warn_of_whole(model: nn.Module) -> None:
    """Warn of parameters beside those of FSDP2: the ranks of a replica have different gradients of
    these, which are not averaged within the replica."""
    whole = [name for name, parameter in trainable(model) if not is_sharded(parameter)]
    if whole and apart(model):
        log.warning(
            "hipress: fully_shard left %d parameters whole, such as %r: their gradients are "
            "averaged over the ranks of process_group, but not within a replica, whose ranks so "
            "drift apart. Apply fully_shard to the whole model, too, or all-reduce these gradients "
            "within each replica after sync.step()",
            len(whole), whole[0],
        )  # fmt: skip


def broadcast_values(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers to broadcast, frozen ones included, except those that DDP ignores."""
    ignored = compat.names_ignored_by_ddp(model)
    named = (*model.named_parameters(), *model.named_buffers())
    tensors = (local(tensor) for name, tensor in named if name not in ignored)
    return [tensor for tensor in tensors if tensor.numel()]
