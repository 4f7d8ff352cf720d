"""Sharded parameters: DTensors of FSDP2's fully_shard and of tensor parallelism.

[Note: replicas of shards] The ranks of a Synchronizer's group hold the same shards: replicas.
Within a replica FSDP2 reduce-scatters the gradients, and then runs the hooks of a sharded
parameter, as autograd runs those of others. So hipress averages a rank's shard of the gradients.
That is HSDP with compression between replicas, usually over the slower links.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hipress.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: object) -> bool:
    """True for a DTensor; without importing DTensor, which takes longer than all other imports."""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; for a DTensor its shard, in the same memory."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def as_gradient(shard: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The gradient in the form that the parameter takes as `.grad`."""
    whole: Any = parameter
    if not is_sharded(whole):
        return shard
    gradient: torch.Tensor = type(whole).from_local(
        shard, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
    )
    return gradient


def whole(shard: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """All ranks' shards of a gradient of this parameter, on the host; all of them call this."""
    gradient: Any = as_gradient(shard, parameter)
    return gradient.full_tensor().cpu() if is_sharded(parameter) else shard


def on_some_rank(flags: Mapping[str, bool], parameters: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of parameters with a flag on some rank of their mesh; all ranks call this."""
    meshes: dict[Any, list[str]] = {}
    for name, parameter in parameters.items():
        meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(name)
    found = {name for name in meshes.pop(None, ()) if flags[name]}
    for mesh, names in meshes.items():
        some = torch.tensor([flags[name] for name in names], device=mesh.device_type).int()
        for group in mesh.get_all_groups():
            dist.all_reduce(some, dist.ReduceOp.MAX, group=group)
        found |= {name for name, flag in zip(names, some.tolist(), strict=True) if flag}
    return found


def own_shard(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard, on the host, of a whole gradient of this parameter."""
    from torch.distributed.tensor import DTensor, Replicate

    like: Any = parameter
    everywhere = [Replicate()] * like.device_mesh.ndim
    copies = DTensor.from_local(gradient, like.device_mesh, everywhere, run_check=False)
    return local(copies.redistribute(placements=like.placements)).cpu()


def place_gradient(parameter: torch.Tensor) -> None:
    """Distribute a gradient like its parameter, as FSDP2 does: SequenceParallel leaves each rank of
    a replica a part of the sum. All ranks of the replica must call this, in the same order."""
    gradient: Any = parameter.grad
    placements = getattr(parameter, "placements", None)
    if gradient is not None and is_sharded(gradient) and gradient.placements != placements:
        parameter.grad = gradient.detach().redistribute(placements=placements)


def reshard(model: nn.Module) -> None:
    """Have FSDP2 free its gathered parameters, so that the model's parameters are shards again."""
    for part in fsdp_parts(model):
        part.reshard()


def fsdp_parts(model: nn.Module) -> Iterator[Any]:
    """The modules to which fully_shard was applied."""
    return _parts(model, "FSDPModule")


def apart(model: nn.Module) -> bool:
    """True if FSDP2 spreads parameters over several ranks."""
    spread = any(parameter.device_mesh.size() > 1 for _, parameter in _shards(model))
    return spread and any(fsdp_parts(model))


def mesh_size(model: nn.Module) -> int:
    """Number of ranks that hold a sharded model: those of tensor parallelism and, if FSDP2 got
    their mesh, of replicas included."""
    return max(parameter.device_mesh.size() for _, parameter in _shards(model))


def refuse_older(model: nn.Module) -> None:
    """Raise ConfigError for FSDP's first version, which runs no hook with a shard's gradient."""
    if any(_parts(model, "FullyShardedDataParallel")):
        raise ConfigError(
            "the model has FullyShardedDataParallel in it, which hipress cannot synchronize: shard "
            "it with torch.distributed.fsdp.fully_shard and use hipress.Synchronizer"
        )


def _parts(model: nn.Module, kind: str) -> Iterator[nn.Module]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it there are no FSDP modules
    if fsdp is not None:
        yield from (part for part in model.modules() if isinstance(part, getattr(fsdp, kind)))


def refuse_others(model: nn.Module, ranks: Collection[int], rank: int) -> None:
    """Raise ConfigError if ranks of the group hold other shards than this rank.

    ranks: those of the group; rank: this one; both numbered in the job.
    """
    for name, parameter in _shards(model):
        theirs = {*parameter.device_mesh.mesh.flatten().tolist()} & {*ranks} - {rank}
        if theirs:
            raise ConfigError(
                f"parameter {name!r} is a DTensor on a mesh that has rank {min(theirs)} of the "
                "process group, but ranks of the group must all hold the same shards. "
                'Shard over one dimension of a mesh, fully_shard(model, mesh=mesh["shard"]), and '
                'pass the ranks of the other, process_group=mesh["replicate"].get_group()'
            )


def places(model: nn.Module) -> list[str]:
    """Shards of this rank as text, one for each sharded parameter."""
    return [
        f"{name} {parameter.placements} at {parameter.device_mesh.get_coordinate()} of "
        f"{tuple(parameter.device_mesh.shape)}"
        for name, parameter in _shards(model)
    ]


def _shards(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """Names and sharded parameters, frozen ones included, since these are broadcast."""
    for name, parameter in model.named_parameters():
        whole: Any = parameter
        if is_sharded(whole):
            yield name, whole
