"""The model, its training and its comparison, for ranks of all tests."""

from __future__ import annotations

import hashlib
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import hipress
from hipress.channel.failures import Failures
from hipress.engine.channels import Channels
from hipress.engine.engine import Engine
from tests.hipress.fakes import Halves, Int8, Sparse
from tests.patience import HANG

FAKES = {"int8": Int8, "half": Halves, "sparse": Sparse}
SMALL_BUCKETS = {"bucket_cap_mb": 0.02}
UNREBUILT = {"find_unused_parameters": True}


class Net(nn.Module):
    """Odd sizes, from one element up; the second layer is big enough to be cut."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first = nn.Linear(7, 131)
        self.norm = nn.LayerNorm(131)
        self.second = nn.Linear(131, 301)
        self.last = nn.Linear(301, 3)
        self.unused = nn.Linear(11, 5) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(x * self.scale)))
        return self.last(torch.tanh(self.second(hidden)))


def make(unused: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(unused)


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 7, generator=generator)
    return x, x[:, :3] * 2


def train(ddp, rank: int, steps: range, accumulate: int = 1, momentum: float = 0.9):
    """Returns losses. Each call makes a new optimizer, so a resumed run must use momentum 0."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=momentum)
    losses = []
    for step in steps:
        for micro in range(accumulate):
            x, y = data(rank, accumulate * step + micro)
            if micro < accumulate - 1:
                with ddp.no_sync():
                    (nn.functional.mse_loss(ddp(x), y) / accumulate).backward()
            else:
                loss = nn.functional.mse_loss(ddp(x), y)
                (loss / accumulate).backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def digest(module: nn.Module) -> str:
    """Hash of all parameters, bit by bit; whole ones where FSDP2 shards them, on all ranks."""
    hashed = hashlib.sha256()
    for parameter in module.parameters():
        values = getattr(parameter, "full_tensor", lambda one=parameter: one)().detach()
        hashed.update(values.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return hashed.hexdigest()


def delivered(ddp, rank: int, steps: int = 10) -> float:
    """The sum of averages of one gradient by the sum of exact means: 1, but for what states still
    hold back and for noise; 2 or a half if averages have another factor."""
    inputs, outputs = data(rank, 0)
    alone = make()
    alone.load_state_dict(ddp.module.state_dict())
    nn.functional.mse_loss(alone(inputs), outputs).backward()
    exact = nn.utils.parameters_to_vector([p.grad for p in alone.parameters()])
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    total = torch.zeros_like(exact)
    for _ in range(steps):
        ddp.zero_grad()
        nn.functional.mse_loss(ddp(inputs), outputs).backward()
        total += nn.utils.parameters_to_vector([p.grad for p in ddp.parameters()])
    return float(total @ exact / (steps * exact @ exact))


def codec(name: str):
    """A fake codec, or the name of a real one."""
    return FAKES[name]() if name in FAKES else name


def difference(left: nn.Module, right: nn.Module) -> float:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max((a - b).detach().abs().max().item() for a, b in pairs)


class Trained(NamedTuple):
    """A model after a training."""

    difference: float  # from plain DDP's, of an element at most
    losses: list[float]
    digest: str  # of its parameters
    delivered: float  # of the gradient, 1 if averages add up to it


class Raised(NamedTuple):
    """An error of a rank; kind "none" if there was no error."""

    kind: str
    message: str


class RaisedAfter(NamedTuple):
    """The exception of a call, and the seconds that the call took."""

    kind: str
    message: str
    seconds: float


def raised_by(function, *args, **kwargs):
    """The exception that a call raises."""
    return Raised(*error_of(function, *args, **kwargs)[:2])


def refuses(text, function, *args, kind="Config", **options):
    """Assert that a call soon raises an error of this kind that has this text."""
    found = error_of(function, *args, **options)
    assert found.kind.startswith(kind), (text, found)
    assert text in found.message, (text, found)
    assert found.seconds < HANG / 4, (text, found)


def error_of(function, *args, **kwargs):
    """The exception that a call raises, and its seconds."""
    start = time.monotonic()
    try:
        function(*args, **kwargs)
    except Exception as error:
        return RaisedAfter(type(error).__name__, str(error), time.monotonic() - start)
    return RaisedAfter("none", "", time.monotonic() - start)


class Scaled(nn.Module):
    """A parameter of one element, and with `empty` also some of no elements; all are used."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        none = [torch.zeros(0), torch.zeros(3, 0), torch.zeros(0, dtype=torch.float64)]
        self.before = nn.ParameterList(none if empty else [])
        self.scale = nn.Parameter(torch.ones(()))
        self.after = nn.ParameterList(none if empty else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + sum(p.sum() for p in (*self.before, *self.after))


def left(ddp):
    """True, by parameter, if any of its saved values is not zero."""
    return {
        name: any(bool(value.any()) for values in sides.values() for value in values.values())
        for name, sides in hipress.state_dict(ddp)["states"].items()
    }


def engine_of_world(
    params, plan, options, group, coordinator, *, chooser=None, skips=False, **where
):
    """An engine with channels of its own. where: placement, memory and unused, as of Channels."""
    codecs = plan.codecs if chooser is None else chooser.codecs
    failures = Failures(coordinator, options.timeout)
    channels = Channels(codecs, plan.topology, options, group, failures, **where)
    return Engine(params, plan, options, channels, chooser=chooser, skips=skips)


def averaged(engine, buckets):
    """A step of these buckets, by parameters."""
    step = engine.begin()
    for indices, bucket in buckets.items():
        step.reduce(indices, bucket)
    step.finish()
