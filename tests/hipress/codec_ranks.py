"""What the ranks of test_codecs.py do."""

from __future__ import annotations

import json
import logging

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import compll
import hipress
from tests.hipress.common import SMALL_BUCKETS, Scaled, difference, digest, error_of, make, train


def automatic(rank, world_size, least):
    """compressor="auto" on a model worth compressing, if it gains `least` seconds a step."""
    import hipress.plan.auto

    hipress.plan.auto.MIN_GAIN_SECONDS = least
    hipress.plan.auto.MARGIN = min(least, hipress.plan.auto.MARGIN)
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
