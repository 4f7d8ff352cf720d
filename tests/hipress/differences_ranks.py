"""Ranks of test_differences.py."""

from __future__ import annotations

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


def parted(rank, world_size, way):
    """The error if ranks load different means."""
    model = make()
    sync = start(way, model, "ef21")
    step_of(sync, model, rank, 0)
    state = hipress.state_dict(sync)
    state["states"]["second.weight"]["worker"]["mean"] += rank
    return raised_by(hipress.load_state_dict, sync, state)


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
