"""Ranks of test_group.py."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import fully_shard

import hipress
from hipress import integrations
from tests.hipress.common import raised_by
from tests.patience import SILENCE

NAMES, STEPS = ("replicate", "shard"), 12


def net():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(64, 257), nn.ReLU(), nn.Linear(257, 257), nn.ReLU(), nn.Linear(257, 8)
    )


def hsdp(override, shape=(2, 2)):
    """A model that FSDP2 shards over two ranks and averages over two replicas, and the group of
    the latter."""
    given = {} if override is None else {"backend_override": {"replicate": override}}
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=NAMES, **given)
    return by_layer(fully_shard, mesh), mesh.get_group("replicate")


def by_layer(apply, mesh):
    """A model to whose layers, and then to itself, fully_shard or replicate is applied."""
    model = net().to(mesh.device_type)
    for layer in [each for each in model if isinstance(each, nn.Linear)]:
        apply(layer, mesh=mesh)
    return apply(model, mesh=mesh)


def replicated(override):
    given = {} if override is None else {"backend_override": {"replicate": override}}
    ranks = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("replicate",), **given)
    return by_layer(replicate, mesh), mesh.get_group("replicate")


def fit(model, rank, steps, micro=1):
    """Losses of steps of Adam; replicas are averaged after the last micro-batch of each."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    device = next(model.parameters()).device
    for step in range(steps):
        for number in range(micro):
            model.set_requires_all_reduce(number == micro - 1)
            seed = 1000 * step + 10 * number + rank
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).to(device)
            loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(1)) / micro
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() * micro)
    return losses


def weights(model):
    return [parameter.to_local().clone() for parameter in model.parameters()]


def equal(one, other):
    return all(map(torch.equal, one, other))


def same_on_all(values, group):
    """True if all ranks of a group hold the same bits."""
    flat = torch.cat([value.flatten() for value in values])
    held = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(held, flat, group=group)
    return all(torch.equal(each, flat) for each in held)


WAYS = {"hsdp": hsdp, "replicate": replicated}


def trained(rank, world_size, way, names, micro=1):
    """Native training and ours, by names: without a codec, and with several."""
    native, _ = WAYS[way](None)
    losses = fit(native, rank, STEPS, micro)
    found, small = {"native": losses}, {"min_size": 1024, "timeout": SILENCE}
    for name, given in {
        "none": ("hipress", hipress.GroupOptions("none")),
        "int4_group": ("hipress", hipress.GroupOptions("int4_group", **small)),
        "int8_group": ("hipress", hipress.GroupOptions("int8_group", **small)),
        "default": "hipress",
    }.items():
        if name not in names:
            continue
        model, group = WAYS[way](given)
        ours = fit(model, rank, STEPS, micro)
        found[name] = {
            "losses": ours,
            "as native": equal(weights(model), weights(native)),
            "replicas": same_on_all(weights(model), group),
            "report": hipress.report(group),
            "figures": integrations.scalars(group),
            "text": str(hipress.report(group)),
        }
    return found


def refused(rank, world_size):
    """Errors of groups that there cannot be, and the report of collectives that are left alone."""
    errors = {
        "auto": raised_by(hipress.GroupOptions, "auto"),
        "name": raised_by(hipress.GroupOptions, "int4_grop"),
        "states": raised_by(hipress.GroupOptions, "topk"),
        "owners": raised_by(hipress.GroupOptions, "int4_group", down="onebit_group"),
        "options": raised_by(dist.new_group, backend="hipress", pg_options="int4_group"),
        "host": raised_by(hipress.GroupOptions, transport="host"),
        "native": raised_by(hipress.report, dist.group.WORLD),
    }
    group = dist.new_group(backend="hipress")
    x = torch.full((1 << 15,), rank + 1.0)
    dist.all_reduce(x, group=group)  # outside of a backward pass
    dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    dist.broadcast(x, 0, group=group)
    held = [torch.empty(2) for _ in range(world_size)]
    dist.all_gather(held, torch.full((2,), float(rank)), group=group)
    dist.barrier(group)
    objects = [None] * world_size
    dist.all_gather_object(objects, rank, group=group)
    out = torch.empty(3)
    dist.reduce_scatter(out, [*torch.arange(3.0 * world_size).chunk(world_size)], group=group)
    values = x[0].item(), [each[0].item() for each in held], objects, out.tolist()
    rows = {(row.what, row.why_not): row.calls for row in hipress.report(group).calls}
    dist.destroy_process_group(group)
    return errors, values, rows


def default(rank, world_size):
    """The error of hipress as the backend of all ranks."""
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    return raised_by(
        dist.init_process_group, "hipress", store=store, rank=rank, world_size=world_size
    )


def unequal(rank, world_size):
    """The error where ranks compress different tensors."""
    options = hipress.GroupOptions(min_size=1024 + rank, timeout=SILENCE)
    group = dist.new_group(backend="hipress", pg_options=options)
    logging.disable(logging.CRITICAL)
    weight = torch.zeros(4096, requires_grad=True)
    weight.register_hook(lambda gradient: _averaged(gradient, group))
    return raised_by((weight * 2).sum().backward)


def _averaged(gradient, group, op=dist.ReduceOp.SUM):
    gradient = gradient.clone()
    dist.all_reduce(gradient, op=op, group=group)
    return gradient


def reduced(rank, world_size):
    """Gradients after compressed all-reduces, by operation and type, as shares of rank 0's."""
    options = hipress.GroupOptions("int8_group", min_size=1, timeout=SILENCE)
    group, found = dist.new_group(backend="hipress", pg_options=options), {}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            weight = torch.zeros(64, 40, dtype=dtype, requires_grad=True)
            weight.register_hook(lambda gradient, op=op: _averaged(gradient, group, op))
            weight.t().mul(rank + 1).sum().backward()  # its gradient is not contiguous
            found[str(op), dtype] = weight.grad.float().mean().item()
    return found, [row.calls for row in hipress.report(group).calls if not row.why_not]
