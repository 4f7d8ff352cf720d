"""Ranks of test_scaling.py."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hipress
from tests.hipress.common import data, digest, make

SCALES = [2.0**16] * 3 + [2.0**17, 2.0**14, 2.0**10, 2.0**10]


def by_codec(rank, world_size, way, codecs):
    """Digests after training without a GradScaler and with one, by codec."""
    found = {}
    for name, params in codecs.items():
        found[name] = []
        for scales in (None, SCALES):
            model = make()
            given = DistributedDataParallel(model) if way == "attach" else model
            module = getattr(hipress, way)(given, name, min_size=0, **params)
            _train(module, model, rank, scales)
            found[name].append(digest(model))
            hipress.detach(module)
    return found


def _train(module, model, rank, scales, unscales_first=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=(scales or [1.0])[0], enabled=scales is not None
    )
    following = [*(scales or [1.0] * len(SCALES))[1:], 1.0]
    for step, scale in enumerate(following):
        optimizer.zero_grad()
        x, y = data(rank, step)
        synchronizer = isinstance(module, hipress.Synchronizer)
        if unscales_first:
            with module.no_sync():
                scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
            scaler.unscale_(optimizer)
        else:
            output = (model if synchronizer else module)(x)
            scaler.scale(nn.functional.mse_loss(output, y)).backward()
        if synchronizer:
            module.step()
        scaler.step(optimizer)
        scaler.update(scale)


def unscaled_first(rank, world_size):
    """Digests with a Synchronizer that averages gradients which a GradScaler has unscaled, and
    without a scaler."""
    found = []
    for scales in (SCALES, None):
        model = make()
        sync = hipress.Synchronizer(model, "topk", ratio=0.1, min_size=0)
        _train(sync, model, rank, scales, unscales_first=True)
        found.append(digest(model))
        hipress.detach(sync)
    return found


def beside_another(rank, world_size):
    """Digests of a model that steps without a scaler, alone and beside a model with one."""
    found = []
    for scales in (None, SCALES):
        models = make(), make()
        wrapped = [hipress.wrap(model, "onebit_group", min_size=0) for model in models]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in models]
        scaler = torch.amp.GradScaler("cpu", enabled=scales is not None)
        for step in range(6):
            x, y = data(rank, step)
            nn.functional.mse_loss(wrapped[0](x), y).backward()
            scaler.scale(nn.functional.mse_loss(wrapped[1](x), y)).backward()
            optimizers[0].step()
            scaler.step(optimizers[1])
            scaler.update(2.0 ** (16 - step))
            for optimizer in optimizers:
                optimizer.zero_grad()
        found.append([digest(model) for model in models])
        for module in wrapped:
            hipress.detach(module)
    return found


def half(rank, world_size):
    """Largest relative difference of averages from plain DDP's, of float16 parameters whose
    gradients would be zero without their scale."""
    found = []
    for way in (DistributedDataParallel, lambda m: hipress.wrap(m, "int8_group", min_size=0)):
        torch.manual_seed(0)
        model = nn.Linear(20, 300).half()
        module, scaler = way(model), torch.amp.GradScaler("cpu", init_scale=2.0**20)
        for step in range(2):
            model.zero_grad()
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(rank + 10 * step))
            scaler.scale(module(x.half()).float().square().mean() * 1e-8).backward()
        found.append(model.weight.grad.float())
    plain, ours = found
    return ((plain - ours).abs().max() / plain.abs().max()).item()
