"""Ranks of test_torch_features.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hipress
from tests.hipress.common import data, difference, digest, make, raised_by
from tests.hipress.ways_ranks import Training


def loss_of(model, rank, step):
    x, y = data(rank, step)
    return torch.nn.functional.mse_loss(model(x), y)


def default_device(rank, world_size, way):
    """Trains with another default device than the parameters', and goes on from its state; the
    parameters, and those of a training without that."""
    batches = [data(rank, step) for step in range(4)]
    plain = Training(way)
    plain.run(rank, range(4))
    model = make()
    torch.set_default_device("meta")
    try:
        training = Training(way, model=model)
        for number in range(3):
            training.step(rank, number, batches[number])
        if training.sync is not None and way not in ("group", "Gossip"):
            hipress.load_state_dict(training.sync, hipress.state_dict(training.sync))
            hipress.state_dict(training.sync, portable=True)
        training.step(rank, 3, batches[3])
    finally:
        torch.set_default_device(None)
    return digest(model), digest(plain.model)


def compiled(rank, world_size, within):
    """Distance from DDP's parameters after steps whose backward pass is compiled. within: whether
    `sync.step()` is compiled, too."""
    model, plain = make(), DistributedDataParallel(make())
    sync = hipress.Synchronizer(model, "none")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.02) for each in (model, plain)]

    def backward(step):
        loss_of(model, rank, step).backward()
        if within:
            sync.step()

    fast = torch.compile(backward, backend="aot_eager")
    for step in range(3):
        fast(step)
        if not within:
            sync.step()
        loss_of(plain, rank, step).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    return difference(model, plain)


def compiled_optimizer(rank, world_size):
    """Parameters after steps of an optimizer that is compiled, and of one that is not, with a
    freeze between them."""
    found = []
    for wrapped in (lambda step: torch.compile(step, backend="aot_eager"), lambda step: step):
        model = make()
        optimizer = hipress.optim.AdamW(model.parameters(), 0.01, freeze=2)
        ddp = hipress.wrap(model, "onebit_fine", min_size=0, optimizer=optimizer)
        step = wrapped(optimizer.step)
        for number in range(4):
            optimizer.zero_grad()
            loss_of(ddp, rank, number).backward()
            step()
        found.append(digest(model))
        hipress.detach(ddp)
    return found


def functional(rank, world_size):
    """Distance of gradients, through weights computed from the parameters, from DDP's."""
    ours, plain = hipress.wrap(make(), "none"), DistributedDataParallel(make())
    for each in (ours, plain):
        weights = {name: value * 1.5 for name, value in each.named_parameters()}
        x, y = data(rank, 0)
        functional_call(each, weights, (x,)).sub(y).square().mean().backward()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


def reentrant(rank, world_size):
    """The error of a layer used twice in reentrant checkpoints; then a distance, within no_sync."""
    model = torch.nn.Linear(5, 5)
    sync = hipress.Synchronizer(model, "none")

    def backward():
        x = torch.ones(2, 5, requires_grad=True)
        for _ in range(2):
            x = checkpoint(model, x, use_reentrant=True)
        x.sum().backward()

    with sync.no_sync():
        backward()
    sync.step()
    averaged = model.weight.grad.clone()
    dist.broadcast(averaged, 0)
    same = torch.equal(averaged, model.weight.grad)
    return same, raised_by(backward)
