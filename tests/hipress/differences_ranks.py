"""Ranks of test_differences.py."""

from __future__ import annotations

import io

import torch
from torch import nn

import hipress
from tests.hipress.common import SMALL_BUCKETS, data, digest, make, raised_by

LR = 0.05


def loss_of(model, rank, step):
    x, y = data(rank, step)
    return nn.functional.mse_loss(model(x), y)


def start(way, model, codec, **options):
    options = {"min_size": 100} | options
    if way == "wrap":
        return hipress.wrap(model, codec, ddp_kwargs=SMALL_BUCKETS, **options)
    return hipress.Synchronizer(model, codec, **options)


def step_of(sync, model, rank, step, factor=1.0):
    """A step of SGD by averaged gradients."""
    model.zero_grad()
    called = model if isinstance(sync, hipress.Synchronizer) else sync
    (loss_of(called, rank, step) * factor).backward()
    if called is model:
        sync.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=LR)


def averages(rank, world_size, way, codec):
    """All averages of ten steps, the gradients of all ranks that they are of, and a digest."""
    model, twin = make(), make()
    sync = start(way, model, codec)
    given, found = [], []
    for step in range(10):
        twin.load_state_dict(model.state_dict())
        every = []
        for each in range(world_size):
            twin.zero_grad()
            loss_of(twin, each, step).backward()
            every.append([p.grad.clone() for p in twin.parameters()])
        given.append(every)
        step_of(sync, model, rank, step)
        found.append([p.grad.clone() for p in model.parameters()])
    return given, found, digest(model)


def states(rank, world_size, way, codec):
    """This rank's states after some steps."""
    model = make()
    sync = start(way, model, codec)
    for step in range(8):
        step_of(sync, model, rank, step)
    return {
        name: {key: values.clone() for key, values in sides["worker"].items()}
        for name, sides in hipress.state_dict(sync)["states"].items()
        if sides
    }


def resumed(rank, world_size, way):
    """Digests of eight steps in a row, and with a restart after four; the error if ranks restart
    with different means."""
    model = make()
    sync = start(way, model, "ef21")
    for step in range(8):
        if step == 4:
            file = io.BytesIO()
            torch.save((model.state_dict(), hipress.state_dict(sync)), file)
        step_of(sync, model, rank, step)
    hipress.detach(sync)
    saved, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    again = make()
    again.load_state_dict(saved)
    sync = start(way, again, "ef21")
    means = state["states"]["second.weight"]["worker"]["mean"]
    kept = means.clone()
    means += rank
    parted = raised_by(hipress.load_state_dict, sync, state)
    means.copy_(kept)
    hipress.load_state_dict(sync, state)
    for step in range(4, 8):
        step_of(sync, again, rank, step)
    return digest(model), digest(again), parted


def infinite(rank, world_size, way):
    """The gradient of a model after a step that is not finite on rank 1, and without that step."""
    found = []
    for first in (0, 3):
        model = make()
        sync = start(way, model, "ef21")
        saved = {name: values.clone() for name, values in model.state_dict().items()}
        for step in range(first, 5):
            factor = float("inf") if rank == 1 and step == 2 else 1.0
            step_of(sync, model, rank, step, factor)
            if step == 2:
                model.load_state_dict(saved)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        hipress.detach(sync)
    return found


def refused(rank, world_size):
    """Errors by strategy; the report's words on parameters of 16 bits."""
    found = {
        name: raised_by(start, "wrap", make(), "ef21", strategy=name)
        for name in ("ps", "ring", "gtopk")
    }
    found["down"] = raised_by(start, "wrap", make(), "ef21", strategy="ps", down="none")
    sync = start("synchronizer", make().bfloat16(), "ef21")
    return found, hipress.report(sync).why
