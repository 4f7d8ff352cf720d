"""Ranks of test_training.py."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hipress
from tests.hipress.common import (
    SMALL_BUCKETS,
    Scaled,
    codec,
    data,
    difference,
    digest,
    error_of,
    make,
    train,
)
from tests.patience import HANG


def parity(rank, world_size, names, cases):
    """Largest difference of parameters from plain DDP after ten steps, by codec and case."""
    found = {}
    for title, (options, ddp_kwargs, extra) in cases.items():
        unused = ddp_kwargs.get("find_unused_parameters", False)
        plain = DistributedDataParallel(make(unused), **ddp_kwargs)
        train(plain, rank, range(10), **extra)
        for name in names:
            ours = hipress.wrap(
                make(unused), codec(name), ddp_kwargs=ddp_kwargs, verify=True, **options
            )
            train(ours, rank, range(10), **extra)
            found[name, title] = {
                "difference": difference(plain, ours),
                "digest": digest(ours),
                "report": hipress.report(ours).to_dict(),
            }
            hipress.detach(ours)
    return found


def buckets(rank, world_size, name, scope):
    """Digests after six steps with one bucket and with several, which DDP rebuilds."""
    digests = []
    for ddp_kwargs in ({}, SMALL_BUCKETS):
        ddp = hipress.wrap(make(), codec(name), scope=scope, ddp_kwargs=ddp_kwargs, verify=True)
        losses = train(ddp, rank, range(6))
        digests.append(digest(ddp))
        hipress.detach(ddp)
    return digests, losses


def variants(rank, world_size, name):
    """Models and modes that DDP supports: each must keep the ranks together and learn."""
    found = {}

    def run(title, ddp, module=None, steps=6):
        losses = train(ddp, rank, range(steps))
        found[title] = (digest(module or ddp), losses[0], losses[-1])

    run("static", hipress.wrap(make(), codec(name), ddp_kwargs={"static_graph": True}))
    run("views", hipress.wrap(make(), codec(name), ddp_kwargs={"gradient_as_bucket_view": True}))
    mixed = make()
    mixed.second.double()
    original = mixed.second.forward
    mixed.second.forward = lambda x: original(x.double()).float()
    ddp = hipress.wrap(mixed, codec(name))
    run("float64", ddp)
    whys = {d.name: d.why for d in hipress.report(ddp).decisions}
    assert whys["second.weight"] == "type float64 is not compressed", whys
    low = make().to(torch.bfloat16)
    forward = low.forward
    low.forward = lambda x: forward(x.to(torch.bfloat16)).float()
    run("bfloat16", hipress.wrap(low, codec(name), verify=True))
    ddp = hipress.wrap(make(), codec(name))
    compiled = torch.compile(ddp, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.05)
    losses = []
    for step in range(4):
        x, y = data(rank, step)
        loss = nn.functional.mse_loss(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    found["compile"] = (digest(ddp), losses[0], losses[-1])
    assert hipress.report(compiled).measured.steps == 4
    found["join"] = joined(rank, name)
    found["attach"] = attached(rank, name)
    found["embedding"] = embedding(rank, name)
    return found


def doubles(rank, world_size):
    """Gradients of a float64 layer and a float32 one, by plain DDP and by ours."""
    found = []
    for wrap in (DistributedDataParallel, lambda model: hipress.wrap(model, codec("int8"))):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(30, 40).double(), nn.Linear(30, 40)])
        model.forward = lambda x, layers=model: layers[0](x).sum() + layers[1](x.float()).sum()
        ddp = wrap(model)
        x = torch.randn(5, 30, generator=torch.Generator().manual_seed(rank)).double() / 3
        ddp(x).backward()
        found.append([layer.weight.grad for layer in model])
    return found, hipress.report(ddp).decisions[0].why


def empties(rank, world_size, compressor, cases):
    """Training a model that has parameters without elements, and the same model without them."""
    found = {}
    for title, (options, ddp_kwargs) in cases.items():
        for empty in (False, True):
            torch.manual_seed(0)
            layers = nn.Linear(7, 64), Scaled(empty), nn.Linear(64, 64), nn.Linear(64, 3)
            model = nn.Sequential(Scaled(empty), *layers, Scaled(empty))
            ddp = hipress.wrap(model, codec(compressor), ddp_kwargs=ddp_kwargs, **options)
            train(ddp, rank, range(3))
            hipress.load_state_dict(ddp, hipress.state_dict(ddp))
            train(ddp, rank, range(3, 5))
            report = hipress.report(ddp)
            whys = {d.why for d in report.decisions if d.numel == 0}
            found[title, empty] = digest(ddp), report.installed, whys
            hipress.detach(ddp)
    return found


def meshed(rank, world_size):
    """A gradient if each rank trains its own model, and error messages."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp", "tp"))
    kwargs = {"device_mesh": mesh["dp"]}
    ddp = hipress.wrap(nn.Linear(1, 1, bias=False), "none", ddp_kwargs=kwargs)
    ddp(torch.full((1, 1), 1.0 + rank)).sum().backward()
    errors = [
        error_of(hipress.wrap, make(), ddp_kwargs={"device_mesh": mesh})[1],
        error_of(hipress.wrap, make(), ddp_kwargs=kwargs, process_group=dist.group.WORLD)[1],
    ]
    return ddp.module.weight.grad.item(), errors


def joined(rank, name):
    """Uneven numbers of steps, in DDP's join: the idle rank contributes zeros."""
    ddp = hipress.wrap(make(), codec(name))
    with ddp.join():
        losses = train(ddp, rank, range(4 + 2 * rank))
    assert hipress.state_dict(ddp)["counter"] == 6
    return digest(ddp), losses[0], losses[-1]


def divided(rank, world_size, name, ddp_kwargs):
    """Uneven steps in a join that divides by the ranks still active: plain DDP, ours, detached."""
    found = []
    for title in "plain", "ours", "detached":
        model = make()
        if title == "plain":
            ddp = DistributedDataParallel(model, **ddp_kwargs)
        else:
            ddp = hipress.wrap(model, codec(name), ddp_kwargs=ddp_kwargs, verify=title == "ours")
        if title == "detached":
            hipress.detach(ddp)
        with ddp.join(divide_by_initial_world_size=False):
            train(ddp, rank, range(2 + 2 * rank))
        train(ddp, rank, range(10, 12))
        found.append(ddp)
    plain, ours, detached = found
    return difference(plain, ours), difference(plain, detached), digest(ours)


def attached(rank, name):
    """Attach, detach, attach again to one DDP module."""
    ddp = DistributedDataParallel(make(), gradient_as_bucket_view=True)
    assert hipress.attach(ddp, codec(name), exclude="last.*") is ddp
    assert "already" in error_of(hipress.attach, ddp, codec(name))[1]
    first = train(ddp, rank, range(3))
    assert hipress.report(ddp).measured.steps == 3
    hipress.detach(ddp)
    assert "not attached" in error_of(hipress.report, ddp)[1]
    train(ddp, rank, range(3, 5))
    hipress.attach(ddp, codec(name), exclude=["last.*", "scale"])
    whys = {d.name: d.why for d in hipress.report(ddp).decisions}
    assert whys["last.bias"] == "excluded by 'last.*'", whys
    last = train(ddp, rank, range(5, 8))
    assert hipress.report(ddp).measured.steps == 3
    return digest(ddp), first[0], last[-1]


class Skipping(nn.Module):
    """Layers, one of which is never used."""

    def __init__(self, unused: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))
        self.unused = unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == self.unused else torch.tanh(layer(x))
        return x


class Turned(nn.Module):
    """A real layer and complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 64)
        self.round_ = nn.Parameter(torch.randn(64, dtype=torch.complex64))
        self.more = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * self.round_).abs() + self.more.abs().sum()


def complex_numbers(rank, world_size, options):
    """Gradients of a model with complex parameters, verified, and those of plain DDP.

    None if gloo does not support complex numbers, as in torch 2.8.
    """
    try:
        dist.broadcast(torch.zeros(1, dtype=torch.complex64), 0)
    except RuntimeError:
        return None
    gradients = []
    for wrapped in (True, False):
        torch.manual_seed(0)
        model = Turned()
        ddp = hipress.wrap(model, **options) if wrapped else DistributedDataParallel(model)
        ddp(data(rank, 0)[0]).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    return gradients


def skipped_buckets(rank, world_size):
    """Steps that the state and the report count if DDP leaves out the last, or first, bucket."""
    counted = []
    for unused in (0, 2):
        torch.manual_seed(0)
        kwargs = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
        ddp = hipress.wrap(
            Skipping(unused), codec("int8"), ddp_kwargs=kwargs | {"bucket_cap_mb": 0.001}
        )
        for _ in range(3):
            ddp(torch.randn(4, 20) + rank).sum().backward()
        counted.append((hipress.state_dict(ddp)["counter"], hipress.report(ddp).measured.steps))
    return counted


def embedding(rank, name):
    """A sparse gradient goes to the native all-reduce."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(50, 16, sparse=True), nn.Linear(16, 40), nn.Linear(40, 3))
    ddp = hipress.wrap(model, codec(name))
    assert hipress.report(ddp).decisions[0].why == "sparse gradient"
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    losses = []
    for _ in range(6):
        words = torch.arange(8).reshape(2, 4) + rank
        loss = nn.functional.mse_loss(ddp(words), torch.ones(2, 3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return digest(ddp), losses[0], losses[-1]


def subgroup(rank, world_size, name):
    """Ranks 1.. of the world form a group of their own; rank 0 takes no part."""
    group = dist.new_group(list(range(1, world_size)), timeout=timedelta(seconds=HANG - 1))
    if rank == 0:
        return None
    ddp = hipress.wrap(make(), codec(name), process_group=group)
    assert hipress.report(ddp).options["timeout"] == HANG - 1
    train(ddp, rank, range(3))
    return digest(ddp)


def infinity(rank, world_size, names):
    """`_infinity` by compressor."""
    return {name: _infinity(rank, name) for name in names}


def _infinity(rank, name):
    """Rank 1 has an inf; returns the gradients that every rank then holds, and the states."""
    ddp = hipress.wrap(make(), codec(name))
    train(ddp, rank, range(2))
    ddp.zero_grad()
    x, y = data(rank, 0)
    loss = nn.functional.mse_loss(ddp(x), y)
    if rank == 1:
        loss = loss * float("inf")
    loss.backward()
    infected = [not p.grad.isfinite().all().item() for p in ddp.parameters()]
    state = hipress.state_dict(ddp)["states"]
    clean = all(
        values.isfinite().all().item()
        for sides in state.values()
        for arrays in sides.values()
        for values in arrays.values()
    )
    ddp.zero_grad()
    skipped = scaled(ddp, rank)
    losses = train(ddp, rank, range(3, 5))
    return infected, clean, skipped, losses, digest(ddp)


def scaled(ddp, rank):
    """Steps that GradScaler skipped: the first, as one rank's loss overflows; not the next."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    skipped = []
    for step, factor in enumerate((float("inf") if rank == 1 else 1.0, 1.0)):
        x, y = data(rank, step)
        before = digest(ddp)
        scaler.scale(nn.functional.mse_loss(ddp(x), y) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(digest(ddp) == before)
    return skipped
