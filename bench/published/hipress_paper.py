"""HiPress's evaluation: the table of 128 GPUs, its scaling curves, and the null model.

Seven numbers are fitted to the twelve cells without compression; all others follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from bench.published import data as data_
from bench.published.data import Cell, Data, Number
from bench.published.systems import Kernels, Stack, Training, byteps, hipress, inline, ring
from hipress.codecs import compile_codec
from hipress.tools.models.device_speeds import DEVICES
from hipress.tools.models.known import Model, load
from hipress.tools.simulate.cluster import Cluster, Link
from hipress.tools.simulate.codec_speeds import memory_traffic

__all__ = ["PLACE", "Paper", "kernels", "model_of", "plain"]

_STEP = np.array(1e-3)  # relative, for derivatives
PLACE = "EC2, 16 nodes x 8 V100, 100 Gbit/s"


@cache
def kernels(name: str, memory: float) -> Kernels:
    """Kernels of a spec, by the bytes that they touch; memory: bytes a second."""
    codec = compile_codec(name, {}, "reference")
    traffic, n = memory_traffic(codec), 1 << 22
    rate = codec.payload_bytes(n) / (4 * n)
    return Kernels(rate, traffic.encode / memory, traffic.decode / memory)


@cache
def model_of(name: str) -> Model:
    """A model of the package."""
    return load(name)


def plain(data: Data) -> dict[str, Any]:
    """Values without their kinds."""
    return {k: v.value if isinstance(v, Number) else v for k, v in data.items()}


@cache
def _training(model: str, step: float) -> Training:
    return Training.of(model_of(model), step)


@dataclass(frozen=True)
class Paper:
    """Predictions of one experiment from published.yaml."""

    data: Data

    @property
    def models(self) -> Data:
        """Models by name."""
        by_name: Data = self.data["models"]
        return by_name

    @property
    def ranks(self) -> int:
        """Number of ranks of the table."""
        c = plain(self.data["cluster"])
        return int(c["nodes"] * c["gpus_a_node"])

    def training(self, model: str) -> Training:
        """The training with the step time on one GPU that the paper's linear throughput gives."""
        return _training(model, self.single(model))

    def single(self, model: str) -> float:
        """Seconds of a step on one GPU."""
        return float(model_of(model).batch * self.ranks / self.models[model]["linear"].value)

    def cluster(self, nodes: int, share: float, besides: float, slows: float) -> Cluster:
        """The cluster. besides: fixed seconds of a hop, or of a message."""
        c = plain(self.data["cluster"])
        between = Link(c["nic"], c["latency"], share, besides)
        device = replace(DEVICES["v100"], slows=slows)
        inside = Link(c["inside"], 1e-5)
        return Cluster(
            nodes, int(c["gpus_a_node"]), device, between, inside, c["pcie"], jitter=c["jitter"]
        )

    def step(self, model: str, system: str, nodes: int) -> float:
        """Seconds of a step."""
        fit, work = plain(self.data["fit"]), self.training(model)
        rings = self.cluster(nodes, fit["ring_share"], fit["ring_hop"], fit["ring_slows"])
        crosses = "crosses" in self.models[model]
        stack = Stack(server=fit["byteps_server"], crosses=crosses)
        if system.startswith("BytePS"):
            served = [fit[f"byteps_{name}"] for name in ("share", "message", "slows")]
            cpu = self.on_cpu() if "OSS" in system else None
            return byteps(work, self.cluster(nodes, *served), stack, cpu)
        if system.startswith("HiPress"):
            # NCCL's rate, as Horovod's, and the cost of a message as of BytePS
            ours = self.cluster(nodes, fit["ring_share"], fit["byteps_message"], fit["ring_slows"])
            strategy = "ring" if "Ring" in system else "ps"
            return hipress(work, ours, Stack(), self.kernels(model), strategy)
        if "OSS" in system:
            return self._inline(work, rings, model)
        return ring(work, rings, Stack())

    def _inline(self, work: Training, cluster: Cluster, model: str) -> float:
        c, own = plain(self.data["codecs"]), self.kernels(model)
        slower = replace(own, encode=c["oss_dgc_slower"] * own.encode)
        calls, launch = c["oss_dgc_kernels"], c["oss_dgc_launch"]
        return inline(work, cluster, Stack(), slower, calls, launch)

    def on_cpu(self) -> Kernels:
        """BytePS's one-bit codec."""
        speed = self.data["codecs"]["cpu_onebit"].value
        return Kernels(1 / 32, 1 / speed, 1 / speed)

    def kernels(self, model: str) -> Kernels:
        """HiPress's kernels for a model: our number of passes over memory, or its text's."""
        codec, memory = self.models[model]["codec"], self.data["cluster"]["memory"].value
        own, touches = kernels(codec, memory), self.data["codecs"].get(f"{codec}_touched")
        return own if touches is None else replace(own, encode=touches.value / memory)

    def table(self, only: str = "") -> Iterator[Cell]:
        """Cells for 128 GPUs. only: of this system."""
        for model, row in self.models.items():
            for system, number in row.items():
                if isinstance(number, Number) and system != "linear" and only in ("", system):
                    yield self._cell("table", model, system, self.ranks, number)

    def curves(self) -> Iterator[Cell]:
        """Curves of 8 to 128 GPUs; at 128 they agree with the table."""
        points = data_.curves({"hipress": self.data})[PLACE]
        for model, name in self.data["curves"]["names"].items():
            for system, values in points[name].items():
                if system == "linear":
                    continue
                for gpus, value in zip(points["gpus"], values, strict=True):
                    known = self.models[model].get(system) if gpus == self.ranks else None
                    number = known or Number(value, "predicted")
                    yield self._cell("curves", model, f"{system}, {gpus}", gpus, number)

    def _cell(self, part: str, model: str, system: str, gpus: int, number: Number) -> Cell:
        nodes = int(gpus / self.data["cluster"]["gpus_a_node"].value)
        step, alone = self.step(model, system.split(",")[0], nodes), self.single(model)
        seconds = gpus * model_of(model).batch / number.value
        exposed = (1e3 * (seconds - alone), 1e3 * (step - alone))
        got = gpus * model_of(model).batch / step
        return Cell(f"hipress {part}", model, system, number.value, got, number.kind, exposed)

    def fitted(self) -> dict[str, float]:
        """The seven numbers with the best prediction of the fitted cells: least squares of
        logarithms, for each system by itself."""
        ring = self._fit("Ring", ("ring_share", "ring_hop", "ring_slows"))
        names = ("byteps_share", "byteps_message", "byteps_slows", "byteps_server")
        return ring | self._fit("BytePS", names)

    def _fit(self, system: str, names: Sequence[str]) -> dict[str, float]:
        from scipy.optimize import least_squares

        start = np.array([_inner(name, self.data["fit"][name].value) for name in names])
        fit = least_squares(self._residuals(system, names), start, diff_step=_STEP)
        return {name: _outer(name, x) for name, x in zip(names, fit.x, strict=True)}

    def _residuals(self, system: str, names: Sequence[str]) -> Callable[..., list[float]]:
        def off(values: Sequence[float], *_: object) -> list[float]:
            changed = {
                n: Number(_outer(n, x), "fitted") for n, x in zip(names, values, strict=True)
            }
            paper = replace(self, data={**self.data, "fit": {**self.data["fit"], **changed}})
            return [math.log(c.predicted / c.published) for c in paper.table(system)]

        return off

    def null(self, efficiency: float = 0.9) -> Iterator[Cell]:
        """HiPress's columns by one scaling efficiency for all models, without a simulation."""
        for model, row in self.models.items():
            for system in ("HiPress PS", "HiPress Ring"):
                if system in row:
                    linear, number = row["linear"].value, row[system]
                    guess = efficiency * linear
                    yield Cell("null model", model, system, number.value, guess, "predicted")


def _share(name: str) -> bool:
    return name.endswith(("_share", "_slows"))


def _inner(name: str, value: float) -> float:
    """The unbounded variable that the search uses for a value."""
    return math.log(value / (1 - value)) if _share(name) else math.log(value)


def _outer(name: str, value: float) -> float:
    return 1 / (1 + math.exp(-value)) if _share(name) else math.exp(value)
