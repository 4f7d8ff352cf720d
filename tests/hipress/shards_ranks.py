"""Ranks of test_shards.py: two replicas of two shards each."""

from __future__ import annotations

import copy
import logging
import os
import pathlib
import signal
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import hipress
from hipress.engine import order
from hipress.model.shards import local
from hipress.ranks import job
from tests.hipress.common import Net, data, error_of, make, raised_by

GRID = (2, 2)


def grid():
    return init_device_mesh("cpu", GRID, mesh_dim_names=("replicate", "shard"))


def sharded(mesh, model=None, **options) -> Net:
    """A model whose large layers are sharded one by one, as is usual, and the rest as one."""
    model = make() if model is None else model
    for layer in (model.second, model.last):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def synchronizer(model, mesh, codec, **options):
    return hipress.Synchronizer(
        model, codec, process_group=mesh["replicate"].get_group(), **options
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def fit(model, rank, steps, sync=None, optimizer=None, accumulate=1):
    """Losses. The optimizer steps by itself unless the Synchronizer steps it."""
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            x, y = data(rank, accumulate * step + micro)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        losses.append(loss.item())
        if sync is not None:
            sync.step()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
    return losses


def shards(model) -> list[list[float]]:
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return [local(p).detach().flatten().tolist() for p in model.parameters()]


def beside_hsdp(rank, world_size, large):
    """Losses and shards, by case, of PyTorch's HSDP and of hipress without compression."""
    order.LARGE_BYTES = large
    mesh, found = grid(), {}
    cases = {
        "steps": ({}, 1),
        "accumulated": ({}, 3),
        "kept gathered": ({"reshard_after_forward": False}, 1),
    }
    for title, (options, accumulate) in cases.items():
        native, ours = sharded(mesh, **options), sharded(mesh["shard"], **options)
        theirs = fit(native, rank, 5, optimizer=sgd(native), accumulate=accumulate)
        sync = synchronizer(ours, mesh, "none", verify=True)
        losses = fit(ours, rank, 5, sync, sgd(ours), accumulate)
        found[title] = (theirs, shards(native)), (losses, shards(ours))
        hipress.detach(sync)
    return found


def averaged(rank, world_size):
    """Losses, shards, and refusals of an optimizer whose momentum is averaged."""
    mesh, refused = grid(), []
    for options in ({"max_norm": 1.0}, {"freeze": "auto"}):
        model = sharded(mesh["shard"])
        optimizer = hipress.optim.AdamW(model.parameters(), **{"freeze": 3, **options})
        refused.append(error_of(synchronizer, model, mesh, "onebit_fine", optimizer=optimizer)[1])
    model = sharded(mesh["shard"])
    optimizer = hipress.optim.AdamW(model.parameters(), lr=0.01, freeze=3)
    sync = synchronizer(model, mesh, "onebit_fine", optimizer=optimizer, verify=True)
    return fit(model, rank, 20, sync), shards(model), optimizer.averaging, refused


def compressed(rank, world_size, codec):
    """Losses, shards, and bits sent per element."""
    mesh = grid()
    model = sharded(mesh["shard"])
    sync = synchronizer(model, mesh, codec, min_size=0, verify=True)
    plain = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = fit(model, rank, 20, sync, plain)
    measured = hipress.report(sync).measured
    elements = sum(local(p).numel() for p in model.parameters())
    bits = 8 * measured.wire_bytes / elements
    return losses, shards(model), bits


def stepped(rank, world_size):
    """Losses and shards with an optimizer that steps by itself, and one that the Synchronizer
    steps as averages arrive."""
    mesh, found = grid(), []
    for inside in (False, True):
        model = sharded(mesh["shard"])
        optimizer = sgd(model)
        sync = synchronizer(model, mesh, "int4_group", optimizer=optimizer if inside else "sgd")
        losses = fit(model, rank, 5, sync, None if inside else optimizer)
        found.append((losses, shards(model)))
        hipress.detach(sync)
    return found


def gathered(rank, world_size):
    """Shards that replicas began with different values, after the Synchronizer was made and after a
    step. Before each, a forward pass left parameters gathered that only a backward pass frees."""
    mesh = grid()
    torch.manual_seed(rank // GRID[1])
    model = sharded(mesh["shard"], Net())
    optimizer = sgd(model)
    x, y = data(rank, 0)
    model(x)
    sync = synchronizer(model, mesh, "none")
    begun = shards(model)
    nn.functional.mse_loss(model(x), y).backward()
    model(x)
    sync.step()
    optimizer.step()
    return begun, shards(model)


def unused(rank, world_size):
    """Values of a gradient, of weights and biases, if the first replica uses one layer and no
    replica uses another one; in one backward pass, and in two of which the first is not averaged.
    """
    mesh = grid()
    model = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("all", "first", "none")})
    for layer in model.values():
        fully_shard(layer, mesh=mesh["shard"])
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).fill_(1.0)
    sync = synchronizer(model, mesh, "none")
    found = []

    def backward():
        x = torch.ones(4, 6)
        y = model["all"](x) + (model["first"](x) if rank < GRID[1] else 0.0)
        y.sum().backward()

    for twice in (True, False):
        model.zero_grad()
        with sync.no_sync():
            if twice:
                backward()
        backward()
        sync.step()
        gradients = [p.grad for p in model.parameters()]
        found.append([None if g is None else local(g).unique().tolist() for g in gradients])
    return found


def in_parts(rank, world_size):
    """Difference of tensor-parallel gradients, averaged over replicas, from those of one process
    with both batches, inside no_sync and outside. Each rank of a replica norms part of a batch."""
    mesh = grid()
    torch.manual_seed(0)
    layers = nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)
    model = nn.Sequential(*layers)
    whole = copy.deepcopy(model)
    parts = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(),
    }
    parallelize_module(model, mesh["shard"], parts)
    sync = synchronizer(model, mesh, "none")
    batches = [torch.randn(6, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    whole(torch.cat(batches)).square().mean().backward()
    replica, part = divmod(rank, GRID[1])
    found = []
    for once in (False, True, False):
        model.zero_grad()
        with sync.no_sync() if once else nullcontext():
            model(batches[replica].chunk(2)[part]).square().mean().backward()
        sync.step()
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        found += [(p.grad.full_tensor() - q.grad).abs().max().item() for p, q in pairs]
    return max(found)


def clipped(mesh):
    """Clips before the averages have arrived."""
    model = sharded(mesh["shard"])
    sync = synchronizer(model, mesh, "none")
    model(torch.ones(2, 7)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    sync.step()


def told(mesh):
    """Log for a parameter that fully_shard leaves whole."""
    log, found = logging.getLogger("hipress"), []
    log.addFilter(lambda record: found.append(record.getMessage()) or True)
    model = make()
    fully_shard(model.second, mesh=mesh["shard"])
    sync = synchronizer(model, mesh, "none")
    dist.barrier()  # before it, another rank may still be connecting
    hipress.detach(sync)
    return found


def refused(rank, world_size):
    """Errors for groups that are no replicas, options without shards, and changed gradients."""
    mesh = grid()
    group = mesh["replicate"].get_group()
    crossed = dist.new_group([0, 3] if rank in (0, 3) else [1, 2], use_local_synchronization=True)
    flat = FullyShardedDataParallel(
        nn.Linear(8, 8), process_group=mesh["shard"].get_group(), device_id=torch.device("cpu")
    )
    model, even = sharded(mesh["shard"]), fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])
    assert hipress.consensus_distance(model, group) == 0
    return [
        raised_by(hipress.Synchronizer, model, "none"),
        raised_by(hipress.Synchronizer, sharded(mesh), "none", process_group=group),
        raised_by(hipress.Synchronizer, even, "none", process_group=crossed),
        raised_by(hipress.wrap, model, "none", process_group=group),
        raised_by(hipress.Synchronizer, flat, "none", process_group=group),
        raised_by(hipress.Gossip, model, "int4_group", process_group=group),
        raised_by(clipped, mesh),
        raised_by(hipress.all_reduce, model.scale, "none"),
        told(mesh),
    ]


def ended(rank, world_size, path):
    """Rank 3 ends in the third step; writes the errors by which the other ranks end into a file."""
    mesh = grid()
    model = sharded(mesh["shard"])
    sync = synchronizer(model, mesh, "int8_group", timeout=60)
    try:
        for step in range(4):
            if rank == 3 and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            fit(model, rank, 1, sync)
    except Exception as error:
        pathlib.Path(path, str(rank)).write_text(f"{error}\n{job.cause()}")
    os._exit(1)
