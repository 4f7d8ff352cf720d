"""What the ranks of the tests do. Every function runs on each rank of `launch.launch`."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import logging
import os
import tempfile
import threading
import time
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compll
import hipress
from compll.library import specs_dir
from hipress.session import BOOKS
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
    """Losses; the optimizer starts anew, so a resumed run must use momentum 0."""
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
    """Of all parameters, bit by bit."""
    hashed = hashlib.sha256()
    for parameter in module.parameters():
        hashed.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def codec(name: str):
    """A fake codec, or the name of a real one."""
    return FAKES[name]() if name in FAKES else name


def difference(left: nn.Module, right: nn.Module) -> float:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max((a - b).detach().abs().max().item() for a, b in pairs)


def error_of(function, *args, **kwargs):
    """Type, message and seconds of what a call raises."""
    start = time.monotonic()
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "none", "", time.monotonic() - start


def parity(rank, world_size, name, cases):
    """Largest difference of parameters from plain DDP after ten steps, for each case."""
    found = {}
    for title, (options, ddp_kwargs, extra) in cases.items():
        unused = ddp_kwargs.get("find_unused_parameters", False)
        plain = DistributedDataParallel(make(unused), **ddp_kwargs)
        losses = train(plain, rank, range(10), **extra)
        ours = hipress.wrap(
            make(unused), codec(name), ddp_kwargs=ddp_kwargs, verify=True, **options
        )
        mine = train(ours, rank, range(10), **extra)
        found[title] = {
            "difference": difference(plain, ours),
            "losses": (losses, mine),
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


def resume(rank, world_size, name, scope, path, ddp_kwargs):
    """Six steps at once, and three, a checkpoint, three."""
    whole = hipress.wrap(make(), codec(name), scope=scope, ddp_kwargs=ddp_kwargs)
    train(whole, rank, range(6), momentum=0)
    half = hipress.wrap(make(), codec(name), scope=scope, ddp_kwargs=ddp_kwargs)
    train(half, rank, range(3), momentum=0)
    file = f"{path}/{rank}.pt"
    torch.save([half.module.state_dict(), hipress.state_dict(half)], file)
    weights, state = torch.load(file, weights_only=True)
    assert state["step"] == 3
    fresh = make()
    fresh.load_state_dict(weights)
    again = hipress.wrap(fresh, codec(name), scope=scope, ddp_kwargs=ddp_kwargs)
    template = keys_of(hipress.state_dict(again)) == keys_of(state)
    older = {key: value for key, value in state.items() if key != "strategies"}
    hipress.load_state_dict(again, older | {"format": 1})
    hipress.load_state_dict(again, state)
    reloaded = hipress.state_dict(again)
    assert str(reloaded["codecs"]) == str(state["codecs"])
    train(again, rank, range(3, 6), momentum=0)
    final, expected = hipress.state_dict(again), hipress.state_dict(whole)
    same = all(
        torch.equal(values, expected["state"][p][side][key])
        for p, sides in final["state"].items()
        for side, arrays in sides.items()
        for key, values in arrays.items()
    )
    return {
        "whole": digest(whole), "again": digest(again), "state": same, "step": final["step"],
        "sides": sorted({side for sides in final["state"].values() for side in sides}),
        "errors": state_errors(again, state), "template": template,
    }  # fmt: skip


def load_apart(rank, world_size):
    """Errors of states of two steps, and of one that fits rank 0 alone; and training after them."""
    ddp = hipress.wrap(make(), "randomk", ratio=0.1)
    states = []
    for step in range(3):
        train(ddp, rank, range(step, step + 1))
        states.append(hipress.state_dict(ddp))
    before = str(states[-1])
    apart = error_of(hipress.load_state_dict, ddp, states[2 - rank])[:2]
    refused = error_of(hipress.load_state_dict, ddp, states[0] | {"rank": 0})[:2]
    kept = str(hipress.state_dict(ddp)) == before
    hipress.load_state_dict(ddp, states[0])
    train(ddp, rank, range(1, 4))
    return apart, refused, kept, digest(ddp)


def load_late(rank, world_size):
    """Rank 1 loads a state when rank 0 has waited for that in vain; and what is possible then."""
    ddp = hipress.wrap(make(), "randomk", ratio=0.1, timeout=HANG)
    saved = hipress.state_dict(ddp)
    train(ddp, rank, range(2))
    session = BOOKS.sessions[ddp]
    store, session.meeting = session.meeting.store, replace(session.meeting, timeout=0.1)
    logging.disable(logging.CRITICAL)
    if rank == 1:
        store.wait(["waited"])
    load = error_of(hipress.load_state_dict, ddp, saved)[:2]
    store.set("waited", "")
    kept = session.engine.step == 2
    step = error_of(train, ddp, rank, range(2, 3))[:2]
    return load, kept, step, error_of(hipress.state_dict, ddp)[:2]


def keys_of(state):
    """Keys at all levels."""
    if not isinstance(state, dict):
        return None
    return {key: keys_of(value) for key, value in state.items()}


def state_errors(ddp, state):
    """Messages for states that do not fit, and that strict=False takes them."""
    found = {}
    broken = {
        "format": {"nonsense": 1},
        "codec": state | {"codecs": dict.fromkeys(state["codecs"], "other")},
        "rank": state | {"rank": 7},
        "strategy": state | {"strategies": dict.fromkeys(state["codecs"], "ring")},
        "missing": state | {"codecs": {}, "state": {}},
        "unexpected": state | {"codecs": state["codecs"] | {"ghost.weight": "x"}},
    }
    values = state["state"]["second.weight"]
    for title, damage in {
        "step": {"step": 1.5},
        "negative": {"step": -1},
        "codecs": {"codecs": None},
        "list": {"state": []},
        "strategies": {"strategies": 1},
        "values": {"state": state["state"] | {"second.weight": {"worker": {"residual": [1]}}}},
        "side": {"state": state["state"] | {"second.weight": {"owner": values["worker"]}}},
    }.items():
        found[title] = error_of(hipress.load_state_dict, ddp, state | damage, strict=False)[:2]
    broken["absent"] = state | {"state": {"second.weight": values}}
    for side in ("worker", "aggregator"):
        half = {"second.weight": {key: value for key, value in values.items() if key != side}}
        broken[f"no {side}"] = state | {"state": state["state"] | half}
    shape = copy.deepcopy(state)
    shape["state"]["second.weight"]["worker"]["residual"] = torch.zeros(2)
    broken["shape"] = shape
    for title, bad in broken.items():
        found[title] = error_of(hipress.load_state_dict, ddp, bad)[:2]
        if title != "format":
            logging.getLogger("hipress").setLevel(logging.ERROR)
            hipress.load_state_dict(ddp, bad, strict=False)
    return found


def infinity(rank, world_size, name):
    """Rank 1 has an inf; what gradients every rank then holds, and the state after it."""
    ddp = hipress.wrap(make(), codec(name))
    train(ddp, rank, range(2))
    ddp.zero_grad()
    x, y = data(rank, 0)
    loss = nn.functional.mse_loss(ddp(x), y)
    if rank == 1:
        loss = loss * float("inf")
    loss.backward()
    infected = [not p.grad.isfinite().all().item() for p in ddp.parameters()]
    state = hipress.state_dict(ddp)["state"]
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
    """Whether GradScaler skips a step for which one rank's loss overflowed, and not the next."""
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


def automatic(rank, world_size, least):
    """compressor="auto" on a model worth compressing, if it gains `least` seconds a step."""
    import hipress.automatic

    hipress.automatic.LEAST = least
    hipress.automatic.MARGIN = min(least, hipress.automatic.MARGIN)
    torch.manual_seed(0)
    ddp = hipress.wrap(
        nn.Sequential(nn.Linear(7, 2000), Scaled(empty=True), nn.Tanh(), nn.Linear(2000, 3)),
        verify=True,
    )
    losses = train(ddp, rank, range(5))
    report = hipress.report(ddp)
    return report.to_dict(), str(report), losses, digest(ddp), len(ddp._comm_hooks)


def real(rank, world_size, names):
    """Ten steps with real codecs: difference from plain DDP, losses, digest."""
    plain = DistributedDataParallel(make())
    train(plain, rank, range(10))
    found = {}
    for name, params in names.items():
        ddp = hipress.wrap(make(), name, verify=True, ddp_kwargs=SMALL_BUCKETS, **params)
        losses = train(ddp, rank, range(10))
        found[name] = (difference(plain, ddp), losses, digest(ddp))
        hipress.detach(ddp)
    return found


def reported(rank, world_size):
    """Options in the reports of a codec by name and of a compiled one, through JSON, and texts."""
    found = []
    for compressor, params in (("topk", {"ratio": 0.1}), (compll.compile("topk", ratio=0.1), {})):
        ddp = hipress.wrap(make(), compressor, exclude="*.bias", **params)
        report = hipress.report(ddp)
        assert report.installed
        found.append((json.loads(json.dumps(report.to_dict()))["options"], str(report)))
        hipress.detach(ddp)
    return found


def ineligible(rank, world_size):
    """What is logged where a compressor that was asked for suits no parameter."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("hipress").addHandler(handler)
    hipress.wrap(make().double(), "topk")
    return told


def unknown(rank, world_size):
    """Names and parameters that do not exist."""
    return [
        error_of(hipress.wrap, make(), "onebit_grup")[:2],
        error_of(hipress.wrap, make(), "topk", ratioo=0.1)[:2],
        error_of(hipress.wrap, make(), "topk", ratio=7.0)[:2],
        error_of(hipress.wrap, make(), "nowhere.yaml")[:2],
        error_of(hipress.wrap, make(), "int4_group", strategy="ringg")[:2],
    ]


def variants(rank, world_size, name):
    """Models and modes that DDP supports: each must keep the ranks together and learn."""
    found = {}

    def run(title, ddp, module=None, steps=6):
        losses = train(ddp, rank, range(steps))
        found[title] = (digest(module or ddp), losses[0], losses[-1])

    run("static", hipress.wrap(make(), codec(name), ddp_kwargs={"static_graph": True}))
    run("copies", hipress.wrap(make(), codec(name), ddp_kwargs={"gradient_as_bucket_view": False}))
    mixed = make()
    mixed.second.double()
    original = mixed.second.forward
    mixed.second.forward = lambda x: original(x.double()).float()
    ddp = hipress.wrap(mixed, codec(name))
    run("float64", ddp)
    whys = {d.name: d.why for d in hipress.report(ddp).decisions}
    assert whys["second.weight"] == "type float64", whys
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


class Scaled(nn.Module):
    """A parameter of one element, and with `empty` some of none beside it; all are used."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        none = [torch.zeros(0), torch.zeros(3, 0), torch.zeros(0, dtype=torch.float64)]
        self.before = nn.ParameterList(none if empty else [])
        self.scale = nn.Parameter(torch.ones(()))
        self.after = nn.ParameterList(none if empty else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + sum(p.sum() for p in (*self.before, *self.after))


def empties(rank, world_size, compressor, cases):
    """Training a model with parameters without elements, and the same model without these."""
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
    """A gradient where each rank trains a model of its own, and what errors say."""
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
    assert hipress.state_dict(ddp)["step"] == 6
    return digest(ddp), losses[0], losses[-1]


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


def frozen(rank, world_size):
    """Parameters that are frozen, or freed, between DDP and attach, and before another attach."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 3)]
    layers[1].requires_grad_(False)
    ddp = DistributedDataParallel(nn.Sequential(*layers), find_unused_parameters=True)
    planned = []
    for change, flag in (0, False), (1, True), (0, True):
        layers[change].requires_grad_(flag)
        hipress.attach(ddp, codec("int8"), exclude="2.*", verify=True)
        planned.append([d.name for d in hipress.report(ddp).decisions])
        for _ in range(2):
            ddp(torch.randn(4, 8) + rank).sum().backward()
        hipress.detach(ddp)
    return planned, [layer.weight.grad for layer in layers if layer is not layers[1]]


class Skipping(nn.Module):
    """Layers of which one is never used."""

    def __init__(self, unused: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(3))
        self.unused = unused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == self.unused else torch.tanh(layer(x))
        return x


def now_and_then(rank, world_size, name, options):
    """How far from the sum of a layer's mean gradients is what DDP gave and what residuals hold.

    The layer is used by all ranks, by none, and by one.
    """
    torch.manual_seed(0)
    model = Skipping(0)
    weight = model.layers[1].weight
    ddp = hipress.wrap(model, name, ddp_kwargs=UNREBUILT, **options)
    wanted, got = torch.zeros(20, 20), torch.zeros(20, 20)
    for step in range(9):
        model.unused = (0, 1, 1 + rank)[step % 3]
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(step)) + rank
        model.zero_grad()
        loss = ddp(x).sum()
        (mine,) = torch.autograd.grad(loss, weight, retain_graph=True, allow_unused=True)
        loss.backward()
        wanted += 0 if mine is None else mine / world_size
        got += 0 if weight.grad is None else weight.grad
    for side, arrays in hipress.state_dict(ddp)["state"]["layers.1.weight"].items():
        wanted -= arrays["residual"].float() / (world_size if side == "worker" else 1)
    dist.all_reduce(wanted)
    return (got - wanted).norm().item() / got.norm().item()


class Turned(nn.Module):
    """A layer beside complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 64)
        self.turn = nn.Parameter(torch.randn(64, dtype=torch.complex64))
        self.more = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * self.turn).abs() + self.more.abs().sum()


def complex_numbers(rank, world_size):
    """Gradients of a model with complex parameters, verified, beside those of plain DDP.

    None where gloo has no complex numbers, as torch 2.8's.
    """
    try:
        dist.broadcast(torch.zeros(1, dtype=torch.complex64), 0)
    except RuntimeError:
        return None
    gradients = []
    for wrapped in (True, False):
        torch.manual_seed(0)
        model = Turned()
        ddp = (
            hipress.wrap(model, "none", verify=True) if wrapped else DistributedDataParallel(model)
        )
        ddp(data(rank, 0)[0]).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    return gradients


def skipped_buckets(rank, world_size):
    """Steps that the state and the report count where DDP leaves out the last, or first, bucket."""
    counted = []
    for unused in (0, 2):
        torch.manual_seed(0)
        kwargs = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
        ddp = hipress.wrap(
            Skipping(unused), codec("int8"), ddp_kwargs=kwargs | {"bucket_cap_mb": 0.001}
        )
        for _ in range(3):
            ddp(torch.randn(4, 20) + rank).sum().backward()
        counted.append((hipress.state_dict(ddp)["step"], hipress.report(ddp).measured.steps))
    return counted


def copied(rank, world_size):
    """Whether a copy, and what pickle makes of a module, train on, and may be attached to."""
    ddp = hipress.wrap(make(), codec("int8"))
    train(ddp, rank, range(2))
    packed = io.BytesIO()
    torch.save(ddp, packed)
    packed.seek(0)
    copies = [copy.deepcopy(ddp), torch.load(packed, weights_only=False)]
    for one in (ddp, *copies):
        assert ("not attached" in error_of(hipress.report, one)[1]) == (one is not ddp)
        train(one, rank, range(2, 4))
    for one in copies:
        hipress.attach(one, codec("int8"))
        train(one, rank, range(4, 6))
    return [digest(one) for one in (ddp, *copies)], hipress.report(copies[0]).measured.steps


def shut_down(rank, world_size):
    """What can still be asked when torch.distributed is gone."""
    ddp = hipress.wrap(make(), codec("int8"))
    train(ddp, rank, range(2))
    dist.barrier()
    dist.destroy_process_group()
    report, state = hipress.report(ddp), hipress.state_dict(ddp)
    hipress.load_state_dict(ddp, state)
    hipress.detach(ddp)
    return (report.rank, report.world_size, report.measured.steps), state["rank"]


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


def mismatches(rank, world_size):
    """What each rank raises when one of them is configured differently."""
    found = {}
    odd = rank == world_size - 1

    def attempt(title, name, model=None, **options):
        found[title] = error_of(hipress.wrap, model or make(), codec(name), timeout=HANG, **options)

    attempt("codec", "half" if odd else "int8")
    attempt("strategy", "int8", strategy="ring" if odd else "ps")
    attempt("seed", "int8", seed=int(odd))
    attempt("exclude", "int8", exclude=["last.*"] if odd else [])
    attempt("order", "int8", exclude=["last.*", "scale"][:: -1 if odd else 1])
    shape = make()
    if odd:
        shape.second = nn.Linear(131, 302)
    attempt("shape", "int8", shape)
    layout = nn.Conv2d(3, 8, 3)
    attempt("layout", "int8", layout.to(memory_format=torch.channels_last) if odd else layout)
    buffered = nn.Sequential(nn.Linear(3, 3 + odd).requires_grad_(False), make(), nn.BatchNorm1d(3))
    attempt("frozen", "int8", buffered)
    attempt("buffer", "int8", nn.Sequential(make(), nn.BatchNorm1d(3 + odd, affine=False)))
    attempt("broken", "int8", exclude=["typo*"] if odd else [])
    attempt("scope", "int8", scope="tensr" if odd else "tensor")
    attempt("exclude_type", "int8", exclude=3 if odd else [])
    attempt("model", "int8", "x" if odd else None)
    attempt("ddp_kwargs", "int8", ddp_kwargs={"bucket_cap": 1} if odd else None)
    attempt("mixed", "int8", ddp_kwargs={"mixed_precision": object()} if odd else None)
    attempt("ddp_kwargs_type", "int8", ddp_kwargs=3 if odd else None)
    attempt("ddp_value", "int8", ddp_kwargs={"bucket_cap_mb": 1 + odd})
    attempt("residual_by_name", "topk", **({"residual": "bfloat16"} if odd else {}))
    for title, params in {"residual": {"residual": "bfloat16"}, "ratio": {"ratio": 0.25}}.items():
        compiled = compll.compile("topk", "reference", **(params if odd else {}))
        found[title] = error_of(hipress.wrap, make(), compiled, timeout=HANG)
    alike = "topk" if odd else compll.compile("topk", ratio=0.01)
    found["alike"] = error_of(hipress.wrap, make(), alike, timeout=HANG)
    as_text = str(specs_dir() / "topk.yaml")
    by_path = "topk" if odd else as_text
    found["path"] = error_of(hipress.wrap, make(), by_path, timeout=HANG)
    found["path_object"] = error_of(
        hipress.wrap, make(), specs_dir() / "topk.yaml" if odd else as_text, timeout=HANG
    )
    found["numpy"] = error_of(
        hipress.wrap, make(), codec("int8"), timeout=HANG,
        **({"seed": np.int64(3), "min_size": np.int32(5)} if odd else {"seed": 3, "min_size": 5}),
    )  # fmt: skip
    found["written"] = error_of(
        hipress.wrap, make(), "topk", timeout=HANG, **({} if odd else {"ratio": 0.01})
    )
    attempt("target", "topk" if odd else "int8", **({"target": "cuda"} if odd else {}))
    with tempfile.TemporaryDirectory() as folder:
        found["spec"] = _other_text(folder, odd)
    if not odd:  # the odd one never arrives
        found["absent"] = error_of(hipress.wrap, make(), codec("int8"), timeout=1.0)
    return found


def _other_text(folder, odd):
    """A spec whose file has the same name everywhere and another text on one rank."""
    text = (specs_dir() / "topk.yaml").read_text()
    with contextlib.chdir(folder):
        with open("d.yaml", "w") as file:
            file.write(text.replace("about:", "about: Other.", 1) if odd else text)
        return error_of(hipress.wrap, make(), "d.yaml", timeout=HANG)


def killed(rank, world_size, name, ddp_kwargs):
    """The last rank ends without a word in the middle of training."""
    ddp = hipress.wrap(make(), codec(name), timeout=HANG, ddp_kwargs=ddp_kwargs)
    train(ddp, rank, range(2))
    if rank == world_size - 1:
        os._exit(1)
    logging.disable(logging.CRITICAL)
    first = error_of(train, ddp, rank, range(2, 6))
    assert threading.active_count() < 20
    return first


def silent(rank, world_size, dtype, options):
    """The last rank takes no part in a step; errors of the others, and when they came."""
    store = dist.distributed_c10d._get_default_store()
    ddp = hipress.wrap(nn.Linear(40, 40, dtype=dtype), codec("int8"), timeout=1.0, **options)
    if rank == world_size - 1:
        store.wait([f"done/{other}" for other in range(rank)])
        return None
    logging.disable(logging.CRITICAL)
    loss = ddp(torch.ones(4, 40, dtype=dtype)).sum()
    found = error_of(loss.backward)
    store.set(f"done/{rank}", "")
    return found


def let_go(rank, world_size):
    """The last rank takes no part in a step; what is left of the others' module after that."""
    import gc
    import weakref

    def threads():
        return len(os.listdir("/proc/self/task"))

    store = dist.distributed_c10d._get_default_store()
    train(DistributedDataParallel(make()), rank, range(1))  # starts autograd's and DDP's threads
    before = threads()
    ddp = hipress.wrap(make(), codec("int8"), timeout=1.0)
    alive = weakref.ref(ddp)
    if rank == world_size - 1:
        store.wait([f"done/{other}" for other in range(rank)])
        return None
    logging.disable(logging.CRITICAL)
    failed = error_of(train, ddp, rank, range(1))[0], error_of(train, ddp, rank, range(1))[0]
    store.set(f"done/{rank}", "")
    del ddp
    gc.collect()
    return failed, alive() is None, threads() - before


def torn(rank, world_size):
    """Rank 1's backward pass raises when its first buckets are on their way; what its state is."""
    ddp = hipress.wrap(make(), codec("int8"), timeout=1.0, ddp_kwargs=SMALL_BUCKETS)
    train(ddp, rank, range(2))
    saved = hipress.state_dict(ddp)
    if rank == 1:
        ddp.module.norm.register_full_backward_hook(lambda *_: 1 / 0)
    logging.disable(logging.CRITICAL)
    return [
        error_of(train, ddp, rank, range(2, 3))[:2],
        error_of(hipress.state_dict, ddp)[:2],
        error_of(hipress.load_state_dict, ddp, saved)[:2],
    ]


def forgotten(rank, world_size, scope):
    """How many values are left after a state of which nothing, or one parameter, fits is loaded."""
    ddp = hipress.wrap(make(), codec("int8"), scope=scope, ddp_kwargs=UNREBUILT)
    train(ddp, rank, range(2))
    saved = hipress.state_dict(ddp)
    train(ddp, rank, range(2))
    logging.disable(logging.CRITICAL)
    found = []
    values = {"second.weight": saved["state"]["second.weight"]}
    for unfit in ({"state": values}, {"world_size": 7}):
        hipress.load_state_dict(ddp, saved | unfit, strict=False)
        found.append([name for name, any_ in left(ddp).items() if any_])
    return sorted(name for name, sides in saved["state"].items() if sides), found


def left(ddp):
    """By parameter: whether any of its saved values is not zero."""
    return {
        name: any(bool(value.any()) for values in sides.values() for value in values.values())
        for name, sides in hipress.state_dict(ddp)["state"].items()
    }


def diverging(rank, world_size):
    """One rank decodes differently; verify=True tells."""
    ddp = hipress.wrap(make(), Int8(skew=1.0 * (rank == 1)), verify=True)
    logging.disable(logging.CRITICAL)
    return error_of(train, ddp, rank, range(2))[:2]


def alone(rank, world_size):
    """One rank: nothing is installed, everything can be called."""
    ddp = hipress.wrap(make(), codec("int8"))
    losses = train(ddp, rank, range(6))
    report = hipress.report(ddp)
    assert not report.installed
    assert "one rank" in str(report)
    state = hipress.state_dict(ddp)
    hipress.load_state_dict(ddp, state)
    ddp._comm_hooks.clear()
    plain = DistributedDataParallel(make())
    train(plain, rank, range(6))
    assert digest(ddp) == digest(plain)
    hipress.detach(ddp)
    return losses, python_reducer(), taken()


def python_reducer():
    """The refusal of the python reducer."""
    import torch._dynamo

    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        return error_of(hipress.wrap, make(), codec("int8"))[:2]
    finally:
        torch._dynamo.config.optimize_ddp = True


def taken():
    """The refusal of a module that has a hook, and of things that are no DDP module."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ddp = DistributedDataParallel(make())
    ddp.register_comm_hook(None, allreduce_hook)
    return [
        error_of(hipress.attach, ddp, codec("int8"))[:2],
        error_of(hipress.attach, make(), codec("int8"))[:2],
        error_of(hipress.wrap, ddp, codec("int8"))[:2],
        error_of(hipress.wrap, torch.compile(ddp, backend="eager"), codec("int8"))[:2],
        *nested(),
    ]


def nested():
    """What is said of a DDP module in a model: trained by both, by the inner one, by the outer."""
    found = []
    for frozen, ignored in (False, False), (True, False), (False, True):
        inner = DistributedDataParallel(make())
        inner.requires_grad_(not frozen)
        model = nn.Sequential(inner, nn.Linear(3, 3))
        if ignored:
            names = [name for name, _ in model.named_parameters() if name.startswith("0.")]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        found.append(error_of(hipress.wrap, model, codec("int8"))[:2])
    return found


def lifetime(rank, world_size):
    """Threads end when the DDP module dies, and when it is detached."""
    import gc

    def ours():
        return [t.name for t in threading.enumerate() if t.name.startswith(("casync", "hipress"))]

    ddp = hipress.wrap(make(), codec("int8"), verify=True)
    train(ddp, rank, range(2))
    alive = ours()
    del ddp
    gc.collect()
    after_death = ours()
    ddp = hipress.wrap(make(), codec("int8"))
    train(ddp, rank, range(2))
    hipress.detach(ddp)
    return alive, after_death, ours()


def forked(rank, world_size):
    """What a forked child meets that collects one wrapped module and uses another."""
    import gc
    import signal

    gc.disable()
    dead, ddp = (hipress.wrap(make(), codec("int8"), verify=True) for _ in range(2))
    for each in (dead, ddp):
        train(each, rank, range(2))
    cycle = [dead]
    cycle.append(cycle)
    del dead, each, cycle
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        logging.disable(logging.CRITICAL)
        signal.alarm(60)  # a child that hangs ends
        gc.collect()
        found = error_of(train, ddp, rank, range(1))[:2]
        del ddp
        gc.collect()
        os.write(there, json.dumps(found).encode())
        os._exit(0)
    os.close(there)
    with open(here) as pipe:
        told = pipe.read()
    status = os.waitpid(child, 0)[1]
    gc.enable()
    gc.collect()
    train(ddp, rank, range(2, 4))
    return status, json.loads(told or "null"), digest(ddp)


def subgroup(rank, world_size, name):
    """Ranks 1.. of the world form a group of their own; rank 0 takes no part."""
    group = dist.new_group(list(range(1, world_size)), timeout=timedelta(seconds=HANG - 1))
    if rank == 0:
        return None
    ddp = hipress.wrap(make(), codec(name), process_group=group)
    assert hipress.report(ddp).options["timeout"] == HANG - 1
    train(ddp, rank, range(3))
    return digest(ddp)


LOW_RANK = {
    "rank 2": ({"rank": 2}, {}),
    "rank 4, rebuilt buckets": ({"rank": 4}, SMALL_BUCKETS),
    "everything": ({"rank": 1, "min_size": 0}, SMALL_BUCKETS),
    "bucket scope": ({"rank": 2, "scope": "bucket"}, SMALL_BUCKETS),
}


def low_rank(rank, world_size):
    """PowerSGD, as in_rounds."""
    return in_rounds(rank, world_size, "powersgd", LOW_RANK)


def in_rounds(rank, world_size, name, cases):
    """A codec with rounds for thirty steps, checked by verify=True in each, beside plain DDP.

    Without momentum: with 0.9 error feedback that reaches the biases diverges on this network,
    with topk as with low rank.
    """
    plain = DistributedDataParallel(make())
    train(plain, rank, range(30), momentum=0.0)
    found = {}
    for title, (options, ddp_kwargs) in cases.items():
        ddp = hipress.wrap(make(), name, verify=True, ddp_kwargs=ddp_kwargs, **options)
        losses = train(ddp, rank, range(30), momentum=0.0)
        report = hipress.report(ddp).to_dict()
        found[title] = {
            "losses": losses,
            "digest": digest(ddp),
            "difference": difference(plain, ddp),
            "decisions": report["decisions"],
            "measured": report["measured"],
        }
        hipress.detach(ddp)
    return found


def resumed(rank, world_size, name, folder):
    """Whether a run that is saved, loaded and continued ends with the bits of one that is not."""
    whole = hipress.wrap(make(), name)
    train(whole, rank, range(6), momentum=0.0)
    first = hipress.wrap(make(), name)
    train(first, rank, range(3), momentum=0.0)
    path = os.path.join(folder, str(rank))
    torch.save((first.module.state_dict(), hipress.state_dict(first)), path)
    model, state = torch.load(path, weights_only=True)
    second = hipress.wrap(make(), name)
    second.module.load_state_dict(model)
    hipress.load_state_dict(second, state)
    train(second, rank, range(3, 6), momentum=0.0)
    return digest(whole) == digest(second)
