"""Ranks of test_device_training.py: DDP's own hooks, and an engine on an emulated device. Buckets
are copied to it, and averages back."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from unittest import mock

import torch
from torch import nn
from torch.futures import Future

import compll
import hipress
from hipress import session
from hipress.channel.futures import map_future
from hipress.engine import engine
from hipress.engine.reduction import Reduction
from hipress.model.devices import NCCL, Placement
from hipress.sharding import comms
from hipress.ways import shard
from tests.casync import emulated
from tests.casync.streams import Schedule
from tests.hipress import sharding_ranks
from tests.hipress.common import SMALL_BUCKETS, data, digest, make, train
from tests.hipress.device_ranks import slots_by


class Moved(Reduction):
    """Buckets are copied to the device by the caller's stream, and averages back."""

    def reduce(self, indices, buffer):
        memory = Placement.memory(None)
        there = memory.filled(buffer.detach())
        averaged = super().reduce(indices, there)
        return map_future(averaged, lambda _: buffer.copy_(memory.download(there)), Future())


def moved(exchange):
    """A shard's exchange whose tensors are copied to the device likewise."""

    def there(comm, tensor, *args, **how):
        memory = comm.connection.channel.memory
        copied = memory.filled(tensor.detach())
        exchanged = exchange(comm, copied, *args, **how)
        return map_future(exchanged, lambda _: tensor.copy_(memory.download(copied)), Future())

    return there


@contextmanager
def on_device(rank, *, transport="staged", connected=True):
    """A context in which wrapped models are on a device; compiled codecs come from this.
    connected: transports without tags go over gloo to the other ranks, which are there."""
    schedule = Schedule(rank)
    memory = emulated.DeviceMemory(schedule)
    with schedule.driving(), ExitStack() as stack:
        placed = mock.Mock(return_value=Placement(memory.device, transport))
        for where, name, value in (
            (session, "place", placed),
            (shard, "place", placed),
            (Placement, "memory", mock.Mock(return_value=memory)),
            (engine, "Reduction", Moved),
            (comms._Comm, "exchange", moved(comms._Comm.exchange)),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        if connected and transport in NCCL:
            stack.enter_context(slots_by(schedule))
        yield lambda name, **params: emulated.Launched(emulated.compiled(name, **params), memory)


def trained(rank, codec, way):
    """A digest of the model after some steps."""
    kwargs = way.get("ddp_kwargs", SMALL_BUCKETS)
    module, options = make("find_unused_parameters" in kwargs), {"min_size": 100, "timeout": 60}
    if way.get("sync"):
        sync = hipress.Synchronizer(module, codec, **options)
        train_without_ddp(module, sync, rank)
        hipress.detach(sync)
        return digest(module)
    if "dtype" in way:
        of(module, way["dtype"])
    ddp = hipress.wrap(module, codec, ddp_kwargs=kwargs, **options)
    if way.get("scaler"):
        train_scaled(ddp, rank)
    else:
        model = torch.compile(ddp, backend="eager") if way.get("compile") else ddp
        train(model, rank, range(4), accumulate=way.get("accumulate", 1))
    hipress.detach(ddp)
    return digest(module)


def of(module, dtype):
    """Convert the model to 16 bits."""
    forward = module.to(dtype).forward
    module.forward = lambda x: forward(x.to(dtype)).float()


def train_scaled(ddp, rank):
    """Train with GradScaler: all ranks skip a step in which one rank's loss overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    for step in range(4):
        before, (x, y) = digest(ddp.module), data(rank, step)
        overflows = float("inf") if (step, rank) == (2, 1) else 1.0
        scaler.scale(nn.functional.mse_loss(ddp(x), y) * overflows).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert (digest(ddp.module) == before) == (step == 2)


def train_without_ddp(module, sync, rank):
    """Train without DDP: two backward passes a step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(2):
            x, y = data(rank, 2 * step + micro)
            with nullcontext() if micro else sync.no_sync():
                nn.functional.mse_loss(module(x), y).backward()
        sync.step()
        optimizer.step()


def by_way(rank, size, ways):
    """Digests of models on a device and on the CPU, by way."""
    found = {}
    for title, way in ways.items():
        with on_device(rank) as compiled:
            there = trained(rank, compiled("onebit_group"), way)
        found[title] = there, trained(rank, compll.compile("onebit_group"), way)
    return found


def shards(rank, size):
    """Losses and a digest of the weights of a model of FSDP2 whose sums and gathers are compressed
    on the CPU, and those on a device, by transport."""
    names, found = {"reduce_scatter": "int4_group", "all_gather": "int8_group"}, {}
    for transport in (None, "staged", "nccl"):
        with ExitStack() as stack:
            compiled = compll.compile
            if transport is not None:
                compiled = stack.enter_context(on_device(rank, transport=transport))
            codecs = {argument: compiled(name) for argument, name in names.items()}
            model = sharding_ranks.sharded(sharding_ranks.Net())
            hipress.shard(model, min_size=0, **codecs)
            losses = sharding_ranks.fit(model, rank, 2, skips=True)
            found[transport] = losses, sharding_ranks.gathered(model)
            hipress.detach(model)
    return found
