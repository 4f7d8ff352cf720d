"""Ranks of test_changed.py: models that change after hipress took them."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, prune

import hipress
from tests.hipress.common import error_of, raised_by
from tests.hipress.idiom_ranks import inputs, mlp
from tests.patience import SILENCE

WAYS = {
    "wrap": hipress.wrap,
    "unused": lambda model, name, **options: hipress.wrap(
        model, name, ddp_kwargs={"find_unused_parameters": True}, **options
    ),
    "sync": hipress.Synchronizer,
    "gossip": hipress.Gossip,
}


def images(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, 9, 9, generator=torch.Generator().manual_seed(rank + 100 * step))


def channels_last(rank, world_size, name, way, at=0, only=None):
    """The share of the gradients' sum over eight steps that is neither averaged nor in the saved
    residuals; rank `only`, or each, changes its model's memory format before a step."""
    torch.manual_seed(0)
    model = nn.Conv2d(6, 40, 3, bias=False)
    alone = copy.deepcopy(model)
    made = WAYS[way](model, name, min_size=0, timeout=60)
    forward = made if way == "wrap" else model
    whole, got, left = (torch.zeros(40, 6, 3, 3) for _ in range(3))
    for step in range(8):
        model.zero_grad()
        alone.zero_grad()
        if step == at and only in (None, rank):
            model.to(memory_format=torch.channels_last)
        forward(images(rank, step)).square().mean().backward()
        if way == "sync":
            made.step()
        got += model.weight.grad
        losses = [alone(images(each, step)).square().mean() for each in range(world_size)]
        (sum(losses) / world_size).backward()
        whole += alone.weight.grad
    for side, arrays in hipress.state_dict(made)["states"]["weight"].items():
        left += arrays["residual"] / (world_size if side == "worker" else 1)
    dist.all_reduce(left)
    return ((whole - got - left).norm() / whole.norm()).item()


def differently(rank, world_size):
    return error_of(channels_last, rank, world_size, "topk", "wrap", only=1)


def there_and_back(model: nn.Sequential) -> None:
    model.double().float()


def last_there_and_back(model: nn.Sequential) -> None:
    model[2].double().float()


def halve(model: nn.Sequential) -> None:
    model[2].half()


def assign(model: nn.Sequential) -> None:
    model.load_state_dict(mlp().state_dict(), assign=True)


def normalize(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[0])


def resize(model: nn.Sequential) -> None:
    model[2].weight.data = torch.zeros(9, 33)
    model[2].bias.data = torch.zeros(9)


def empty(model: nn.Sequential) -> None:
    model.to_empty(device="meta")


CHANGES = (there_and_back, last_there_and_back, halve, assign, normalize, resize, empty)
HARMLESS = {"sync": (there_and_back, last_there_and_back), "wrap": ()}
HARMLESS |= {"gossip": HARMLESS["sync"], "unused": ()}


def changed(rank, world_size, way, changes, only=None):
    """Errors of a step after rank `only`, or each rank, made a change; by the change's name."""
    found = {}
    for change in changes:
        model = mlp()
        made = WAYS[way](model, "int8_group", min_size=0, timeout=60)
        forward = made if way in ("wrap", "unused") else model

        def step(model=model, made=made, forward=forward):
            model.zero_grad()
            x = inputs(rank, 0).to(model[0].weight.device)
            try:
                forward(x).square().mean().backward()
            except RuntimeError:  # of the model itself
                if way not in ("sync", "gossip"):
                    raise
            if way in ("sync", "gossip"):
                made.step()

        step()
        step()  # before it DDP makes new buckets, with its own collective
        if only in (None, rank):
            change(model)
        found[change.__name__] = raised_by(step)
        hipress.detach(made)
    return found


def partly(rank, world_size):
    """Text and note of DDP's error after some parameters were converted, and back again."""
    model = mlp()
    ddp = hipress.wrap(model, "int8_group", min_size=0, timeout=60)
    for step in range(4):
        if step == 2:
            last_there_and_back(model)
        try:
            ddp(inputs(rank, step)).square().mean().backward()
        except RuntimeError as error:
            return step, str(error), error.__notes__
    return None


class Box(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def box(model: nn.Sequential) -> None:
    model[0] = Box(model[0])


def cut(model: nn.Sequential) -> None:
    prune.l1_unstructured(model[0], "weight", amount=0.3)


def move(model: nn.Sequential) -> None:
    model._apply(lambda tensor: tensor.clone())


def taken(rank, world_size, way):
    """A model trains on after its parameters were renamed or moved; names of its saved state."""
    names = []
    for change in (box, cut, move):
        model = mlp()
        made = WAYS[way](model, "onebit_group", min_size=0, timeout=SILENCE)
        forward = made if way in ("wrap", "unused") else model
        for step in range(4):
            if step == 2:
                change(model)
            model.zero_grad()
            forward(inputs(rank, step)).square().mean().backward()
            if way in ("sync", "gossip"):
                made.step()
        names.append([*hipress.state_dict(made)["codecs"]])
        hipress.detach(made)
    return names
