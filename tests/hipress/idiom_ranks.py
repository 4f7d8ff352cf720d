"""What the ranks of test_idioms.py do: what plain DDP allows with gradients and models."""

from __future__ import annotations

import copy

import torch
from torch import nn

import hipress
from tests.hipress.common import error_of


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 7))


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(rank + 100 * step))


def halve(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.data = parameter.grad.data * 0.5


def set_half(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.set_(parameter.grad * 0.5)


def move(module: nn.Module) -> None:
    module._apply(lambda tensor: tensor.clone())


def detach_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad.detach_()
        parameter.grad.zero_()


IDIOMS = {"data": halve, "set_": set_half, "_apply": move, "detach_": detach_gradients}


def far(rank, world_size, name, **options):
    """By idiom, the largest difference of gradients from the mean of the ranks' in six steps."""
    return {title: _far(rank, world_size, name, use, options) for title, use in IDIOMS.items()}


def _far(rank, world_size, name, use, options):
    model, most = mlp(), 0.0
    ddp, alone = hipress.wrap(model, name, min_size=0, **options), copy.deepcopy(model)
    for step in range(6):
        ddp(inputs(rank, step)).square().mean().backward()
        alone.zero_grad()
        losses = [alone(inputs(each, step)).square().mean() for each in range(world_size)]
        (sum(losses) / world_size).backward()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        most = max([most, *((a.grad - b.grad).abs().max().item() for a, b in pairs)])
        use(model)
        if use is not detach_gradients:
            model.zero_grad()
    return most


class Headed(nn.Module):
    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x).tanh())


def trunk(rank, world_size, name):
    """Two wrapped models of one trunk, and one backward pass: the trunk's gradients, and those
    that there should be."""
    torch.manual_seed(0)
    shared = nn.Linear(20, 30)
    models = [Headed(shared, nn.Linear(30, outputs)) for outputs in (5, 1)]
    alone = copy.deepcopy(models)
    wrapped = [hipress.wrap(model, name, min_size=0) for model in models]
    for step in range(3):
        for model in (*models, *alone):
            model.zero_grad()
        sum(ddp(inputs(rank, step)).square().mean() for ddp in wrapped).backward()
        for each in range(world_size):
            loss = sum(model(inputs(each, step)).square().mean() for model in alone)
            (loss / world_size).backward()
    return shared.weight.grad, alone[0].trunk.weight.grad


def refused(rank, world_size):
    """What a gradient that rank 1 puts elsewhere raises, where the user asked for views."""
    model = mlp()
    ddp = hipress.wrap(model, "none", ddp_kwargs={"gradient_as_bucket_view": True}, timeout=60)

    def train():
        for step in range(4):
            model.zero_grad()
            ddp(inputs(rank, step)).square().mean().backward()
            if rank == 1:
                halve(model)

    return error_of(train)
