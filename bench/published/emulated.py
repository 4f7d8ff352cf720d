"""This repository's own emulated hosts, predicted from a description.

The description has a link's rate, the time of a step alone, and codecs as bench.codecs measured
them on another day. Two numbers are fitted, to DDP in float32 under SGD: the rate that TCP reaches
on a link, and the seconds of a core that a byte takes on its way. Hosts share two cores, so each of
four ranks has half a core.
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
from bench.emulated_models import TRAINED, on_meta
from bench.published.data import Cell, Data
from bench.published.hipress_paper import plain
from casync.cost import CodecCost, Line
from hipress.demo.netns import parse_rate
from hipress.model import Param, describe
from hipress.models import roofline
from hipress.models.devices import DEVICES
from hipress.models.model import Model
from hipress.plan.objective import Objective
from hipress.plan.workload import Workload, timed
from hipress.simulate import codecs as speeds
from hipress.simulate import methods
from hipress.simulate.cluster import Cluster, Link
from hipress.simulate.costs import costs
from hipress.simulate.methods import Method

__all__ = ["Emulated", "Measured", "measured", "quality"]

CORES = 2  # that all hosts share
LOOPBACK = 6e9  # bytes a second
GROUPS = ("hosts2", "hosts4", "slow", "hosts2-10gbit")
#: names of methods here, by their names in results
NAMES = {"ddp-fp32": "fp32", "ddp-fp16": "fp16"}


@dataclass(frozen=True)
class Measured:
    """A place, and the seconds of a step by method."""

    where: str
    hosts: int
    rate: str
    optimizer: str
    alone: float  # with DDP, without communication
    steps: Mapping[str, float]
    kind: str = "lstm"  # one of bench.emulated_models.KINDS
    late: float = 0.0  # seconds by which a rank's gradients are late, except the last layer's


def measured(data: Data) -> Iterator[Measured]:
    """Places from bench/results: the cells of auto.jsonl, groups with a measured floor, and those
    of bench.predicted."""
    alone = plain(data["alone"])
    for line in (RESULTS / "auto.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        hosts, kind = row["hosts"], row["optimizer"]
        steps = {name: each["median"] for name, each in row["methods"].items()}
        where = f"{hosts} hosts, {row['rate']}, {kind}"
        yield Measured(where, hosts, row["rate"], kind, alone[f"{kind} {hosts}"], steps)
    for group in GROUPS:
        yield _group(group)
    path = RESULTS / "predicted.json"
    for row in json.loads(path.read_text("utf-8"))["rows"] if path.is_file() else ():
        yield Measured(**row)


def _group(name: str) -> Measured:
    row = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    times: dict[str, list[float]] = {}
    for result in row["results"]:
        times.setdefault(result["method"], []).extend(result["seconds"][result["warmup"] :])
    medians = {method: statistics.median(each) for method, each in times.items() if each}
    return Measured(name, row["hosts"], row["rate"], "sgd", medians["ddp-noop"], medians)


@cache
def _model(kind: str) -> Model:
    return roofline.measure(kind, lambda: on_meta(kind))


@cache
def _params(kind: str) -> tuple[Param, ...]:
    with torch.device("meta"):
        return describe(on_meta(kind)[0])


@dataclass(frozen=True)
class Emulated:
    """Predictions for them. reach, core: the fitted share, and seconds of a core per byte."""

    data: Data
    reach: float
    core: float

    @classmethod
    def of(cls, data: Data) -> Emulated:
        """From the numbers of published.yaml."""
        return cls(data, data["reach"].value, data["core"].value)

    def cells(self, places: Sequence[Measured]) -> Iterator[Cell]:
        """All predicted methods, without the fitted one, DDP in float32 under SGD."""
        for place in places:
            for name, seconds in place.steps.items():
                text = NAMES.get(name, name.removeprefix("hipress:"))
                if text.startswith(("auto", "none", "ddp", "powersgd", "sync")):
                    continue
                got = self.step(place, text)
                kind = "fitted" if text == "fp32" and _fits(place) else "predicted"
                yield Cell("emulated hosts", place.where, text, 1e3 * seconds, 1e3 * got, kind)

    def step(self, place: Measured, text: str) -> float:
        """Seconds, by the fastest strategy."""
        method = methods.parse(text)
        cluster = self.cluster(place)
        codecs = {} if method.codec is None else {text: method.codec}
        params = _params(place.kind)
        suited = {p.index for p in params if method.suits(p)}
        kinds = [tuple(p for p in params if (p.index in suited) == x) for x in (True, False)]
        made = costs(cluster, {text: self.cost(method, place)} if codecs else {})
        work = self.workload(place, method)
        objective = Objective(kinds, codecs, cluster.topology, made, work)
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
        found, slower = speeds.cost(method.codec, DEVICES["cpu"]), self.shared(place)
        lines = (found.encode, found.decode, found.hop)
        return CodecCost(*(Line(each.latency, slower * each.per_byte) for each in lines))

    def workload(self, place: Measured, method: Method) -> Workload:
        """The workload; the embedding sends its words' rows, since repeats do not travel."""
        model, params = _model(place.kind), _params(place.kind)
        alone = model.timed(DEVICES["cpu"].speed).scaled(place.alone)
        named = {p.name: p for p in params}
        names = [each.name for each in model.gradients]
        ready = [
            at + place.late * (not name.startswith("output"))
            for name, at in zip(names, alone.ready, strict=True)
        ]
        rates = method.rates(params)
        words = named.get("embedding.weight")
        codec = method.codec
        if words is not None and codec is not None and codec.fixed and codec.additive is None:
            rows = min(1.0, TRAINED.batch * TRAINED.length / TRAINED.vocabulary)
            rates[method.text, words.index] *= rows
        made = timed([named[name] for name in names], ready, alone.forward)
        return replace(made, payloads=rates)

    def fitted(self, places: Sequence[Measured]) -> tuple[float, float]:
        """The two numbers with the best prediction of DDP's float32 under SGD."""
        from scipy.optimize import least_squares

        known = [each for each in places if _fits(each) and "ddp-fp32" in each.steps]

        def off(x: Any) -> list[float]:
            made = replace(self, reach=1 / (1 + math.exp(-x[0])), core=math.exp(x[1]))
            return [math.log(made.step(p, "fp32") / p.steps["ddp-fp32"]) for p in known]

        residuals: Callable[..., list[float]] = off
        start = np.array([2.0, math.log(5e-10)])
        found: Any = least_squares(residuals, start, diff_step=np.array(1e-3))
        return 1 / (1 + math.exp(-found.x[0])), math.exp(found.x[1])


def _fits(place: Measured) -> bool:
    """True if the two numbers are fitted to DDP's steps in this place."""
    return place.optimizer == "sgd" and place.kind == "lstm"


def quality(cells: Sequence[Cell]) -> tuple[int, float, float]:
    """Number of predicted cells, their median error and their largest."""
    errors = [abs(each.error) for each in cells if each.kind == "predicted"]
    return len(errors), statistics.median(errors), max(errors)
