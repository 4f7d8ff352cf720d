"""Ranks of test_codecs.py."""

from __future__ import annotations

import json
import logging
import os
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compll
import hipress
import hipress.choose.search
from compll.runtime import cache, library
from tests.hipress.common import (
    SMALL_BUCKETS,
    Scaled,
    Trained,
    delivered,
    difference,
    digest,
    make,
    raised_by,
    train,
)
from tests.hipress.fakes import Int8


class Automatic(NamedTuple):
    """A model after `wrap` with "auto"."""

    report: dict
    text: str  # of the report
    losses: list[float]
    digest: str
    hooks: int  # of DDP


def automatic(rank, world_size, least):
    """compressor="auto" on a model worth compressing where DDP takes `least` seconds a step."""
    hipress.choose.search.MIN_GAIN_SECONDS = least
    hipress.choose.search.FAR = 1e9
    torch.manual_seed(0)
    ddp = hipress.wrap(
        nn.Sequential(nn.Linear(7, 2000), Scaled(empty=True), nn.Tanh(), nn.Linear(2000, 3)),
        verify=True,
    )
    losses = train(ddp, rank, range(5))
    while least < 0 and not hipress.report(ddp).tried:  # codecs are still being compiled
        losses += train(ddp, rank, range(len(losses), len(losses) + 1))
    report = hipress.report(ddp)
    hooks = len(ddp._comm_hooks)
    return Automatic(report.to_dict(), str(report), losses, digest(ddp), hooks)


def real(rank, world_size, names):
    """Ten steps with real codecs; returns the trained models by name."""
    plain = DistributedDataParallel(make())
    train(plain, rank, range(10))
    found = {}
    for name, params in names.items():
        ddp = hipress.wrap(make(), name, verify=True, ddp_kwargs=SMALL_BUCKETS, **params)
        losses = train(ddp, rank, range(10))
        apart, held = difference(plain, ddp), digest(ddp)
        found[name] = Trained(apart, losses, held, delivered(ddp, rank))
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


def compiled(rank, world_size, path):
    """Reports of compll on kernels compiled for two ranks, with an empty cache, and once more.
    Each has its own: in a common one the first might find what the second has compiled."""
    os.environ["COMPLL_CACHE"] = f"{path}/{rank}"
    cache.usual.cache_clear()
    cache.folder.cache_clear()
    library._compiled.clear()
    found = []
    for _ in range(2):
        found.append(logged(make(), "none", logger="compll"))
        library._compiled.clear()
    return found


def logged(model, *args, logger="hipress", **options):
    """Levels and texts of messages that are logged while a model is wrapped."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append((record.levelname, record.getMessage()))
    logger = logging.getLogger(logger)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    hipress.wrap(model, *args, **options)
    logger.removeHandler(handler)
    return found


def ineligible(rank, world_size):
    """Log of a requested compressor that suits no parameter."""
    return logged(make().double(), "topk")


def losing(rank, world_size):
    """Logs of compressors that lose under an optimizer, and of others."""
    model = make()
    return [
        logged(
            model, "onebit_group", exclude="*.bias", optimizer=torch.optim.AdamW(model.parameters())
        ),
        logged(make(), "onebit_group"),
        logged(make(), "int8_group", optimizer="adam"),
        logged(make(), optimizer="adam"),
    ]


def told(rank, world_size):
    """Logs of wrapped models: all compressed, none, some by rules, little, and sparse ones."""
    little = nn.Sequential(nn.Linear(2000, 1, bias=False), nn.Linear(1, 3000).double())
    sparse = nn.Sequential(nn.Embedding(1000, 50, sparse=True), nn.Linear(50, 50))
    hipress.choose.search.MIN_GAIN_SECONDS = 10.0
    return [
        logged(make(), Int8()),
        logged(make()),
        logged(make(), Int8(), exclude="second.weight"),
        logged(little, "topk"),
        logged(sparse, "topk"),
    ]


class Rows(nn.Module):
    """A sparse embedding, a layer, and a parameter that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 50, sparse=True)
        self.layer = nn.Linear(50, 200)
        self.last = nn.Linear(200, 30).double()

    def forward(self, words):
        return self.last(torch.tanh(self.layer(self.embedding(words))).double())


def counted(rank, world_size):
    """Three steps with sparse gradients of 7 rows each: the report's bytes sent."""
    torch.manual_seed(0)
    ddp = hipress.wrap(Rows(), Int8())
    for step in range(3):
        ddp.zero_grad()
        ddp(torch.arange(7) + 10 * step + rank).sum().backward()
    report = hipress.report(ddp)
    return report.to_dict(), str(report)


def unknown(rank, world_size):
    """Names and parameters that do not exist."""
    return [
        raised_by(hipress.wrap, make(), "onebit_grup"),
        raised_by(hipress.wrap, make(), "topk", ratioo=0.1),
        raised_by(hipress.wrap, make(), "topk", ratio=7.0),
        raised_by(hipress.wrap, make(), "nowhere.yaml"),
        raised_by(hipress.wrap, make(), "int4_group", strategy="ringg"),
    ]
