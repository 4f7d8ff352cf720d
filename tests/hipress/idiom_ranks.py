"""Ranks of test_idioms.py: uses of gradients and models that plain DDP allows."""

from __future__ import annotations

import copy
import threading

import torch
import torch.distributed as dist
from torch import nn

import hipress
from hipress.ranks import coordinator as coordinators
from tests.hipress.common import error_of, raised_by


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
    """Largest difference of gradients from the mean of the ranks' in six steps, by idiom."""
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
    """Gradients of two wrapped models' common trunk after one backward pass, and expected ones."""
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


def flat_gradients(model: nn.Module) -> None:
    sizes = [parameter.numel() for parameter in model.parameters()]
    pieces = torch.zeros(sum(sizes)).split(sizes)
    for parameter, piece in zip(model.parameters(), pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


def left_by_ddp(model: nn.Module) -> None:
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    ddp(torch.ones(1, 20)).sum().backward()


def expanded(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros(1).expand(parameter.shape)


def in_inference(model: nn.Module) -> None:
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)


GRADIENTS = {"flat": flat_gradients, "of DDP": left_by_ddp, "expanded": expanded}
GRADIENTS |= {"inference": in_inference}


def given(rank, world_size, name):
    """Distance of averages from the mean, by kind of gradient that exists before a Synchronizer's
    backward pass, or is this rank's only one."""
    found = {}
    for title, give in GRADIENTS.items():
        model = mlp()
        alone, most = copy.deepcopy(model), 0.0
        give(model)
        sync = hipress.Synchronizer(model, name, min_size=0)
        for step in range(3):
            trains = title in ("flat", "of DDP")  # others: autograd itself cannot add to them
            if trains:
                model.zero_grad(set_to_none=False)
                model(inputs(rank, step)).square().mean().backward()
            else:
                give(model)
            sync.step()
            alone.zero_grad(set_to_none=False)
            for each in range(world_size):
                loss = alone(inputs(each, step)).square().mean() * trains
                (loss / world_size).backward()
            pairs = zip(model.parameters(), alone.parameters(), strict=True)
            most = max([most, *((a.grad - b.grad).abs().max().item() for a, b in pairs)])
        found[title] = most
        hipress.detach(sync)
    return found


class Mirrored(nn.Module):
    """A layer with gradients that are views of conjugates and of their imaginary part."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.z = nn.Parameter(torch.randn(size, dtype=torch.complex64))
        self.w = nn.Parameter(torch.randn(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.z.conj() * torch.complex(x, self.w * x)).real.sum()


def mirrored(rank, world_size, size):
    """Distance of averages from the mean of conjugates, and of negative views."""
    model = Mirrored(size)
    alone = copy.deepcopy(model)
    sync = hipress.Synchronizer(model, "none")
    xs = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    with sync.no_sync():
        model(xs[rank]).backward()
    model.w.grad = torch.complex(torch.zeros(size), -model.w.grad).conj().imag
    kinds = model.z.grad.is_conj(), model.w.grad.is_neg()
    sync.step()
    sum(alone(x) for x in xs).div(world_size).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return kinds, max((a.grad - b.grad).abs().max().item() for a, b in pairs)


def clamp(parameter: torch.Tensor) -> None:
    parameter.grad.clamp_(-1e-6, 1e-6)


def clamped_late(rank, world_size, large):
    """The error of the third step, before which a hook that changes gradients was registered."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 15000 if large else 33), nn.Linear(15000 if large else 33, 3)
    )
    sync = hipress.Synchronizer(model, "none", timeout=60)
    for step in range(2):
        model.zero_grad()
        model(inputs(rank, step)).square().mean().backward()
        sync.step()
    model[0].weight.register_post_accumulate_grad_hook(clamp)
    model.zero_grad()
    return raised_by(model(inputs(rank, 2)).square().mean().backward)


def refused(rank, world_size):
    """The error for a gradient that rank 1 moves to other memory, if the user asked for views."""
    model = mlp()
    ddp = hipress.wrap(model, "none", ddp_kwargs={"gradient_as_bucket_view": True}, timeout=60)

    def train():
        for step in range(4):
            model.zero_grad()
            ddp(inputs(rank, step)).square().mean().backward()
            if rank == 1:
                halve(model)

    return error_of(train)


def in_inference_mode(rank, world_size):
    """Gradients by step if inference mode ended the first two of four steps, and if not."""
    found = []
    for modes in ((True, True, False, False), (False, False, False, False)):
        model = mlp()
        with torch.inference_mode(modes[0]):
            sync = hipress.Synchronizer(model, "onebit_group", min_size=0)
        gradients = []
        for step, mode in enumerate(modes):
            model.zero_grad()
            model(inputs(rank, step)).square().mean().backward()
            with torch.inference_mode(mode):
                sync.step()
            gradients += [parameter.grad for parameter in model.parameters()]
        found.append(gradients)
        hipress.detach(sync)
    return found


BUFFERS = {
    "sparse": lambda: torch.eye(5).to_sparse(),
    "expanded": lambda: torch.arange(9.0).expand(4, -1),
    "int16": lambda: torch.zeros(3, dtype=torch.int16),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
}


def buffers(rank, world_size):
    """Errors of wrap and Synchronizer for a model with odd buffers; the last buffer's values."""
    found = {}
    for title, make in BUFFERS.items():
        for way in (hipress.wrap, hipress.Synchronizer):
            model = mlp()
            model.register_buffer("mask", make() if title != "conjugate" else make() * (rank + 1))
            found[title, way.__name__] = raised_by(way, model, "none")
    return found, model.mask.resolve_conj()


def in_threads(rank, world_size):
    """Distances from the mean over the ranks, by way in and thread. Each of two threads has a model
    and a group of its own, and they come in another order on each rank."""
    groups = [dist.new_group(range(world_size)) for _ in range(2)]
    count = coordinators.coordinator
    counted = threading.Event()

    def count_and_tell(group, timeout):
        made = count(group, timeout)
        counted.set()
        return made

    coordinators.coordinator = count_and_tell
    found = {}
    for way in ("all_reduce", "wrap", "Synchronizer"):
        counted.clear()
        threads = [
            threading.Thread(target=_average, args=(way, which, groups[which], rank, found))
            for which in (rank, 1 - rank)
        ]
        for thread in threads:
            thread.start()
            counted.wait()
        for thread in threads:
            thread.join()
    return found


def _average(way, which, group, rank, found):
    """Take three averages that belong to thread `which`."""
    if way == "all_reduce":
        mine = torch.full((8,), 10.0 * which + rank)
        mean = hipress.all_reduce(mine, "none", process_group=group)
        found[way, which] = (mean - (10.0 * which + 0.5)).abs().max().item()
        return
    model, most = mlp(), 0.0
    alone = copy.deepcopy(model)
    synchronized = getattr(hipress, way)(model, "none", min_size=0, process_group=group)
    for step in range(3):
        model.zero_grad()
        model_or_ddp = synchronized if way == "wrap" else model
        model_or_ddp(inputs(rank, 10 * which + step)).square().mean().backward()
        if way == "Synchronizer":
            synchronized.step()
        alone.zero_grad()
        losses = [alone(inputs(each, 10 * which + step)).square().mean() for each in range(2)]
        (sum(losses) / 2).backward()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        most = max([most, *((a.grad - b.grad).abs().max().item() for a, b in pairs)])
    found[way, which] = most
