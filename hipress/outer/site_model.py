"""A site's model, as an outer loop averages it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from casync.topology import Topology
from hipress import registry
from hipress.choose import rules as rules_
from hipress.choose.plan import Plan, check_patterns, fixed_plan
from hipress.codecs import resolve, resolve_down
from hipress.errors import ConfigError
from hipress.model import shards
from hipress.model.devices import ON_HOST
from hipress.model.params import COMPRESSIBLE, Param, describe, frozen_tensors, trainable
from hipress.model.snapshot import Snapshot
from hipress.optim.optimizer_kinds import holds, unwrapped
from hipress.options import Options
from hipress.outer.fragments import Fragment, cut
from hipress.outer.schedule import Schedule
from hipress.session import Session, facts_of


@dataclass(frozen=True)
class SiteModel:
    """A site's model and its plan."""

    module: nn.Module  # without torch.compile's wrapper
    plan: Plan
    fragments: list[Fragment]
    snapshot: Snapshot  # of the parameters, to notice later changes
    facts: Mapping[str, Any]  # equal at all sites
    group: dist.ProcessGroup | None  # of the outer loop; None if members choose the ranks

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: Optimizer,
        options: Options,
        schedule: Schedule,
        group: dist.ProcessGroup | None,
    ) -> SiteModel:
        """Describe and cut the model. Raises ConfigError."""
        _notice_wrappers()
        shards.reshard(model)
        params = _parameters(model)
        check_patterns(params, options)
        named = dict(trainable(model))
        parameters = [named[param.name] for param in params]
        inner = unwrapped(optimizer)
        if not isinstance(inner, Optimizer) or not holds(inner, set(map(id, parameters))):
            raise ConfigError(
                "optimizer is the one that steps this model's parameters between rounds, not "
                f"{type(inner).__name__}; make it of model.parameters()"
            )
        if options.automatic:
            raise ConfigError('Outer needs a compressor by name: "auto" plans for gradients')
        codec = resolve(options)
        down = resolve_down(options, codec)
        ruled = rules_.compiled(options)
        others = [codec] if down is None else [codec, down]
        decided = rules_.decide(ruled, params, others, options, world_size=2)
        topology = Topology.flat(2)  # numbers of sites change; shares depend on them later
        plan = decided.apply(fixed_plan(params, codec, options, topology, down))
        again = "To go on, hipress.detach the Outer and make another one"
        rank = dist.get_rank() if dist.is_initialized() else 0
        facts = {
            **facts_of(params, options, {each.name: each for each in others}, ruled, ON_HOST),
            "called": "hipress.Outer",
            "schedule": str(schedule),
            "plan": plan.facts(),
            "frozen parameters and buffers": frozen_tensors(model),
            "shards": shards.places(model),
        }
        return cls(
            model, plan, cut(params, parameters, plan, schedule),
            Snapshot(model, params, parameters, rank, again), facts, group,
        )  # fmt: skip

    @property
    def shared(self) -> list[torch.Tensor]:
        """Tensors that are the same at all sites."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        rest = [shards.local(each) for _, each in named if not each.requires_grad]
        agreed = [f.agreed for f in self.fragments]
        momentum = [f.momentum for f in self.fragments if f.momentum is not None]
        return [*agreed, *momentum, *(each for each in rest if each.numel())]


def refuse_averaged(site: SiteModel) -> None:
    """Raise ConfigError if ranks of the outer loop average this model's gradients, too."""
    model, group = site.module, site.group
    if group is None:
        return
    ours, me = {*dist.get_process_group_ranks(group)}, dist.get_rank()
    mine = {parameter for _, parameter in trainable(model)}
    around = [ddp for ddp in _WRAPPERS if mine & {*ddp.parameters()}]
    groups = {
        type(part).__name__: part.process_group
        for part in (*model.modules(), *around)
        if isinstance(part, DistributedDataParallel)
    }
    for key, session in registry.every(Session):
        module: nn.Module = key if isinstance(key, nn.Module) else key.module
        if mine & {*module.parameters()}:
            groups[type(key).__name__] = session.group
    for name, other in groups.items():
        both = ours & {*dist.get_process_group_ranks(other)} - {me}
        if both:
            raise ConfigError(
                f"a {name} averages this model's gradients with rank {min(both)} in every "
                "step, which is in the outer loop, too, so rounds would change nothing: give "
                "the former the ranks of a site, and as process_group= of Outer those, one of "
                "each site, that hold the same shard"
            )


@functools.cache
def _notice_wrappers() -> None:
    """From now on, know of each DDP that is put around a model: nothing in the model tells."""
    register_module_module_registration_hook(_notice)


def _notice(module: nn.Module, name: str, part: nn.Module) -> None:
    if isinstance(module, DistributedDataParallel):
        _WRAPPERS.add(module)


_WRAPPERS: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def _parameters(model: nn.Module) -> tuple[Param, ...]:
    """The parameters to average. Raises ConfigError for a type that is not averaged."""
    params = describe(model)
    for param in params:
        if param.device.type == "meta":
            raise ConfigError(
                f"parameter {param.name!r} is on the meta device and has no values: "
                'model.to_empty(device="cpu") and initialize it first'
            )
        if param.dtype not in COMPRESSIBLE:
            kind = str(param.dtype).removeprefix("torch.")
            raise ConfigError(
                f"parameter {param.name!r} is of {kind}; Outer averages float32, float16 and "
                "bfloat16"
            )
    return tuple(replace(param, sparse=False, strides=()) for param in params)
