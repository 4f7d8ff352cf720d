"""Models that FSDP2 shards, with PyTorch's own collectives or with those of `hipress.shard`."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hipress.tools.run.methods import BF16, HSDP, SHARDS, Method, wrapped

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
#: PyTorch's own, by name: dtypes of weights and gradients that travel
PLAIN = {
    "fsdp2": MixedPrecisionPolicy(),
    "fsdp2-bf16": BFLOAT16,
    "hsdp": MixedPrecisionPolicy(),
    "hsdp-bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
}


def shard(
    model: nn.Module, method: Method, per_host: int
) -> tuple[nn.Module, Callable[[int], int]]:
    """The model, sharded over all ranks, or over those of a host and averaged between hosts; and
    the bytes that this rank has sent after some steps, in the second case between hosts."""
    device, ranks = next(model.parameters()).device.type, dist.get_world_size()
    replicated = method.way == HSDP or method.text.startswith(HSDP)
    within = per_host if replicated else ranks
    if ranks % within:
        raise ValueError(f"{method.text}: {ranks} ranks are no hosts of {within}")
    names = ("replicate", "shard")
    mesh = init_device_mesh(device, (ranks // within, within), mesh_dim_names=names)
    if method.codec is None:
        policy = PLAIN[method.text]
        whole = mesh if replicated else mesh["shard"]
        each = _averaged if replicated else _gathered
        size = each(model, mesh, policy)
        return _sharded(model, whole, policy), lambda steps: steps * size
    weights = torch.bfloat16 if method.options.get(BF16) else None
    mixed = MixedPrecisionPolicy(weights, reduce_dtype=torch.float32)
    return _compressed(_sharded(model, mesh["shard"], mixed), method, mesh, replicated)


def _compressed(
    model: nn.Module, method: Method, mesh: DeviceMesh, replicated: bool
) -> tuple[nn.Module, Callable[[int], int]]:
    """The model with compressed collectives: of shards, or between replicas of them."""
    import hipress  # not above: PyTorch's own do without

    codec = {"compressor": method.codec, **wrapped(method)}
    if replicated:
        group = mesh["replicate"].get_group()
        ways: dict[str, Any] = {"reduce_scatter": None, "all_gather": None, "replicas": codec}
        hipress.shard(model, **ways, replica_group=group)
    else:
        options = {key: method.options[key] for key in SHARDS[1:] if key in method.options}
        hipress.shard(model, reduce_scatter=codec, **options)
    return model, lambda steps: hipress.report(model).bytes_sent


def _sharded(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    """The model with its layers sharded; each layer's weights are gathered as the one before
    computes."""
    layers: list[Any] = [*_layers(model)]
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
    return model


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of the model's lists; of a model without any, its own modules."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    inner = {part for each in lists for layer in each for part in layer.modules()}
    found = [layer for each in lists if each not in inner for layer in each]
    for part in found or model.children():
        if next(part.parameters(), None) is not None:
            yield part


def _gathered(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> int:
    """Bytes of a step in FSDP2's rings: weights for both passes (the root's once), gradients."""
    every = sum(p.numel() for p in model.parameters())
    inner = sum(p.numel() for layer in _layers(model) for p in layer.parameters())
    weights = _size(policy.param_dtype) * (every + inner)
    gradients = _size(policy.reduce_dtype) * every
    return (weights + gradients) * (mesh.size(1) - 1) // mesh.size(1)


def _averaged(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> int:
    """Bytes of a step in rings between replicas: averages of a shard's gradients."""
    replicas, shards = mesh.size(0), mesh.size(1)
    every = sum(p.numel() for p in model.parameters())
    return 2 * _size(policy.reduce_dtype) * every * (replicas - 1) // (replicas * shards)


def _size(dtype: torch.dtype | None) -> int:
    """Bytes of a number."""
    return (dtype or torch.float32).itemsize
