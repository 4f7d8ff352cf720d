"""HiPress's ablation: milliseconds to synchronize as its parts are switched on one by one.

The constants are those of its SeCoPa.py for that cluster. One number per model is fitted to
`default`: the rate at which a server's cores add, or the share of the NIC that a ring reaches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from bench.published.data import Cell, Data, Number
from bench.published.hipress_paper import model_of, plain
from bench.published.systems import Features, Kernels, Stack, Training, byteps, hipress, ring
from hipress.tools.models.device_speeds import DEVICES
from hipress.tools.simulate.cluster import Cluster, Link

__all__ = ["MODELS", "ablation", "in_order"]

MODELS = ("vgg19", "bert-base")
_ALL_OFF = Features(pipeline=False, bulk=False, planned=False)
_SWITCHED = {
    "on-GPU": _ALL_OFF,
    "+pipeline": replace(_ALL_OFF, pipeline=True),
    "+bulk": replace(_ALL_OFF, pipeline=True, bulk=True),
    "+SeCoPa": Features(),
}


def ablation(data: Data) -> Iterator[Cell]:
    """Cells of both models."""
    c = plain(data["cluster"])
    for model in MODELS:
        row = data[model]
        predicted = _Row(c, _training(model, data["passes"][model].value), row["strategy"])
        server, share = predicted.fitted(1e-3 * row["default"].value)
        for name, number in row.items():
            if isinstance(number, Number):
                got = 1e3 * predicted.seconds(name, server, share)
                where = f"{model} / {row['strategy']}"
                yield Cell("hipress ablation", where, name, number.value, got, number.kind)


def in_order(cells: list[Cell]) -> bool:
    """True if each part gains or loses as published."""
    pairs = [(a, b) for a, b in pairwise(cells) if a.row == b.row]
    return all((a.predicted > b.predicted) == (a.published > b.published) for a, b in pairs)


def _training(model: str, backward: float) -> Training:
    """The backward pass alone, since the paper's milliseconds begin with it."""
    whole = Training.of(model_of(model), 1.0)
    scale = backward / whole.backward
    return Training(whole.sizes, tuple(scale * each for each in whole.ready), 0.0, backward)


class _Row:
    def __init__(self, constants: dict[str, Any], work: Training, strategy: str) -> None:
        self.c, self.work, self.strategy = constants, work, strategy

    def cluster(self, share: float, besides: float) -> Cluster:
        """The cluster. besides: fixed seconds of a message, or of a hop."""
        c = self.c
        inside = Link(c["inside"], c["inside_latency"])
        device = replace(DEVICES["v100"], slows=0.0)
        between = Link(c["nic"], 0.0, share, besides)
        return Cluster(int(c["nodes"]), int(c["gpus_a_node"]), device, between, inside, c["inside"])

    def seconds(self, name: str, server: float, share: float) -> float:
        """Seconds of a step with the parts up to `name` switched on."""
        c, served = self.c, self.cluster(self.c["share"], self.c["message"])
        if name == "default" and self.strategy == "ring":
            return ring(self.work, self.cluster(share, c["message"] / 4), Stack())
        if name == "default":
            return byteps(self.work, served, Stack(server=server))
        if name == "on-CPU":
            cpu = Kernels(1 / 32, 1 / c["cpu_codec"], 1 / c["cpu_codec"])
            return byteps(self.work, served, Stack(server=server), cpu)
        gpu = Kernels(1 / 32, 1 / c["encode"], 1 / c["decode"], c["launch"])
        return hipress(self.work, served, Stack(), gpu, self.strategy, _SWITCHED[name])

    def fitted(self, wanted: float) -> tuple[float, float]:
        """A server's bytes a second, or a ring's share, that give `default` its published time."""
        if self.strategy == "ring":
            return 1.0, _solved(lambda x: self.seconds("default", 1.0, x), wanted, 0.05, 1.0)
        return _solved(lambda x: self.seconds("default", x, 1.0), wanted, 1e8, 1e11), 1.0


def _solved(falling: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    for _ in range(24):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if falling(middle) > wanted else (low, middle)
    return math.sqrt(low * high)
