"""This repository's own emulated hosts, predicted from a description.

The description has a link's rate, the time of a step alone, and codecs as bench.codecs measured
them on another day. Three numbers are fitted, to DDP in float32 and int4_group under SGD: the rate
that TCP reaches on a link, the seconds of a core that a byte takes on its way, and those that a
byte takes to encode beside a backward pass, which uses the cache and memory too. Hosts share two
cores, so each of four ranks has half a core.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from bench.commands import RESULTS
from bench.published.data import Cell, Data
from bench.published.hipress_paper import plain
from casync.cost import CodecCost, Line
from hipress.choose.workload import Workload, timed
from hipress.model.params import Param, describe
from hipress.tools.models import roofline
from hipress.tools.models.device_speeds import DEVICES
from hipress.tools.models.known import Model
from hipress.tools.objective import Objective
from hipress.tools.results import Results
from hipress.tools.run.jobs import Workload as Trained
from hipress.tools.run.lstm import LanguageModel
from hipress.tools.run.netns import parse_rate
from hipress.tools.simulate import codec_speeds as speeds
from hipress.tools.simulate import compared
from hipress.tools.simulate.cluster import Cluster, Link
from hipress.tools.simulate.compared import Method
from hipress.tools.simulate.costs import costs

__all__ = ["Emulated", "Measured", "quality", "read_places"]

TRAINED = Trained()
CORES = 2  # that all hosts share
LOOPBACK = 6e9  # bytes a second
GROUPS = ("hosts2", "hosts4", "slow", "hosts2-10gbit")
#: names of methods here, by their names in results
NAMES = {"ddp-fp32": "fp32", "ddp-fp16": "fp16"}
FITTED = ("fp32", "int4_group")  # methods to whose steps under SGD the numbers are fitted


@dataclass(frozen=True)
class Measured:
    """A place, and the seconds of a step by method."""

    where: str
    hosts: int
    rate: str
    optimizer: str
    alone: float  # with DDP, without communication
    steps: Mapping[str, float]


def read_places(data: Data) -> Iterator[Measured]:
    """Places from bench/results: the cells of auto.jsonl, and groups with a measured floor. Without
    `entropy`: how long its payloads get depends on gradients."""
    alone = plain(data["alone"])
    for line in (RESULTS / "auto.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        hosts, kind = row["hosts"], row["optimizer"]
        steps = {m: each["median"] for m, each in row["methods"].items() if "entropy" not in m}
        where = f"{hosts} hosts, {row['rate']}, {kind}"
        yield Measured(where, hosts, row["rate"], kind, alone[f"{kind} {hosts}"], steps)
    for group in GROUPS:
        yield _group(group)


def _group(name: str) -> Measured:
    (report,) = Results.read(RESULTS / f"{name}.json").reports
    medians = {r.method: statistics.median(r.timed) for r in report.results if r.error is None}
    return Measured(name, report.hosts, report.rate, "sgd", medians["ddp-noop"], medians)


@cache
def _model() -> tuple[Model, tuple[Param, ...]]:
    """The demo's language model and its parameters."""
    words = torch.zeros((TRAINED.batch, TRAINED.length + 1), dtype=torch.long)
    with torch.device("meta"):
        params = describe(LanguageModel(TRAINED))
    return roofline.measure("lstm", lambda: (LanguageModel(TRAINED), (words,))), params


@dataclass(frozen=True)
class Emulated:
    """Predictions for them.

    reach: share of a link's rate that TCP reaches.
    core: seconds of a core per byte sent.
    encode: further seconds of a core per byte of gradient, since an encode runs beside training.
    """

    data: Data
    reach: float
    core: float
    encode: float

    @classmethod
    def of(cls, data: Data) -> Emulated:
        """From the numbers of published.yaml."""
        return cls(data, *(data[name].value for name in ("reach", "core", "encode")))

    def cells(self, places: Sequence[Measured]) -> Iterator[Cell]:
        """Cells of all methods that can be predicted; those of FITTED under SGD are fitted."""
        for place in places:
            for name, seconds in place.steps.items():
                text = _text(name)
                if text.startswith(("auto", "none", "ddp", "powersgd", "sync")):
                    continue
                got = self.step(place, text)
                kind = "fitted" if text in FITTED and _fits(place) else "predicted"
                yield Cell("emulated hosts", place.where, text, 1e3 * seconds, 1e3 * got, kind)

    def step(self, place: Measured, text: str) -> float:
        """Seconds, by the fastest strategy."""
        method = compared.parse(text)
        cluster = self.cluster(place)
        codecs = {} if method.codec is None else {text: method.codec}
        _, params = _model()
        suited = {p.index for p in params if method.suits(p)}
        kinds = [tuple(p for p in params if (p.index in suited) == x) for x in (True, False)]
        priced = costs(cluster, {text: self.cost(method, place)} if codecs else {})
        work = self.workload(place, method)
        objective = Objective(kinds, codecs, cluster.topology, priced, work)
        ways = method.ways(cluster.topology)
        return min(objective.step([method.way(way), None]).seconds for way in ways)

    def cluster(self, place: Measured) -> Cluster:
        """A cluster with one rank per host, whose core others share."""
        bandwidth, reach = LOOPBACK, 1.0
        if place.rate not in ("loopback", "", None):
            bandwidth, reach = parse_rate(place.rate) / 8, self.reach
        device = replace(DEVICES["cpu"], core=self.core * self.shared(place))
        link = Link(bandwidth, plain(self.data)["latency"], reach)
        return Cluster(place.hosts, 1, device, link, link)

    def shared(self, place: Measured) -> float:
        """Number of ranks that share a core."""
        return max(1.0, place.hosts / CORES)

    def cost(self, method: Method, place: Measured) -> CodecCost:
        """The codec's cost on a shared core."""
        assert method.codec is not None
        fast, slower = speeds.cost(method.codec, DEVICES["cpu"]), self.shared(place)
        lines = ((fast.encode, self.encode), (fast.decode, 0.0), (fast.hop, 0.0))
        return CodecCost(*(Line(x.latency, slower * (x.per_byte + more)) for x, more in lines))

    def workload(self, place: Measured, method: Method) -> Workload:
        """The workload; the embedding sends its words' rows, since repeats do not travel."""
        model, params = _model()
        alone = model.timed(DEVICES["cpu"].speed).scaled(place.alone)
        named = {p.name: p for p in params}
        rates = method.rates(params)
        words = named.get("embedding.weight")
        codec = method.codec
        if words is not None and codec is not None and codec.fixed and codec.additive is None:
            rows = min(1.0, TRAINED.batch * TRAINED.length / TRAINED.vocabulary)
            rates[method.text, words.index] *= rows
        order = [named[each.name] for each in model.gradients]
        return replace(timed(order, alone.ready, alone.forward), payloads=rates)

    def fitted(self, places: Sequence[Measured]) -> tuple[float, float, float]:
        """The three numbers that predict the steps of FITTED under SGD best."""
        from scipy.optimize import least_squares

        known = [
            (place, text, seconds)
            for place in places if _fits(place)
            for name, seconds in place.steps.items() if (text := _text(name)) in FITTED
        ]  # fmt: skip

        def off(x: Any) -> list[float]:
            own = self._of(x)
            return [math.log(own.step(place, text) / seconds) for place, text, seconds in known]

        residuals: Callable[..., list[float]] = off
        start = np.array([2.0, math.log(5e-10), math.log(5e-10)])
        best = self._of(least_squares(residuals, start, diff_step=np.array(1e-3)).x)
        return best.reach, best.core, best.encode

    def _of(self, x: Any) -> Emulated:
        """Itself with numbers from unbounded ones."""
        reach = 1 / (1 + math.exp(-x[0]))
        return replace(self, reach=reach, core=math.exp(x[1]), encode=math.exp(x[2]))


def _text(name: str) -> str:
    """A method's name here, by its name in results."""
    return NAMES.get(name, name.removeprefix("hipress:"))


def _fits(place: Measured) -> bool:
    """True if the three numbers are fitted to steps in this place."""
    return place.optimizer == "sgd"


def quality(cells: Sequence[Cell]) -> tuple[int, float, float]:
    """Number of predicted cells, their median error and their largest."""
    errors = [abs(each.error) for each in cells if each.kind == "predicted"]
    return len(errors), statistics.median(errors), max(errors)
