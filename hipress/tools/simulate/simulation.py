"""Predicted steps of a model on a cluster, by the engine and the objective of "auto".

Each method uses the strategy predicted fastest, for all tensors that the codec suits; the others
travel by the native all-reduce, as in `hipress.wrap`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from casync.codec import FLOAT_BYTES, Codec
from casync.cost import Costs
from casync.predict.timeline import PredictedStep
from casync.stages import WIRE, Stage
from hipress.choose.search import Way
from hipress.choose.workload import Workload, timed
from hipress.errors import ConfigError
from hipress.tools.models.known import Model
from hipress.tools.models.own import SHAPES, Description
from hipress.tools.objective import Objective
from hipress.tools.simulate import costs as cost_tables
from hipress.tools.simulate.cluster import Cluster
from hipress.tools.simulate.compared import BASELINE, Method

__all__ = ["HIGHEST", "LOWEST", "PAYS", "STATES", "Outcome", "Simulation", "search"]

LOADS = 40  # chains in a simulated step
LOWEST, HIGHEST = 1.25e6, 8e11  # bytes a second: 10 Mbit/s to 6400 Gbit/s, range of searches
HALVINGS = 10  # halvings of that range, on a logarithmic scale
#: values of an optimizer's states per element; others: 2
STATES = {"plain-sgd": 0, "sgd": 1, "momentum": 3}
PAYS = 1.02  # least speed-up over the baseline at which a method pays


@dataclass(frozen=True)
class Outcome:
    """A method's predicted step. Seconds and bytes."""

    method: str
    strategy: str
    step: float
    exposed: float  # seconds beyond the step of a rank alone
    efficiency: float  # speed over that of a rank alone, 0 to 1
    backward: float  # the backward pass, slowed down
    node_bytes: float = 0.0  # sent by a node to others; with one node, by a rank


def search(holds: Callable[[float], bool], low: float = LOWEST, high: float = HIGHEST) -> float:
    """The bandwidth at which a condition ends that holds at the lowest, but not at the highest."""
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return math.sqrt(low * high)


class Simulation:
    """A model's step on a cluster by several methods."""

    def __init__(
        self,
        cluster: Cluster,
        description: Description,
        methods: Sequence[Method],
        step: float | None = None,
        micro_batches: int = 1,
    ) -> None:
        """step: seconds of a step of one rank alone; by default from the device's roofline.
        micro_batches: such steps whose gradients add up before they are averaged."""
        self.cluster, self._description, self.micro_batches = cluster, description, micro_batches
        self.methods = {each.text: each for each in methods}
        self._codecs: Mapping[str, Codec] = {
            key: codec for each in methods for key, codec in each.codecs.items()
        }
        self._costs, self._guess = cost_tables.probed(cluster, self._codecs)
        self.alone = description.model.timed(cluster.device.speed)
        if step is not None:
            self.alone = self.alone.scaled(step)
        elif description.model.source == SHAPES:
            raise ConfigError(
                f"{description.model.name}: shapes do not tell how long a step takes: pass --step "
                "MILLISECONDS, of one rank without communication, or let your function return "
                "(model, inputs)"
            )
        self._step_given = step is not None
        self._known: dict[tuple[str, float, str], Outcome] = {}
        self._objectives: dict[frozenset[int], Objective] = {}  # by compressed parameters

    @cached_property
    def workload(self) -> Workload:
        """The workload of the slowest rank, for which the others wait."""
        slower = self.alone.scaled(self.alone.step * (1 + self.cluster.straggling))
        timed_alone = timed(self._description.backwards, slower.ready, slower.forward)
        params = self._description.params
        payloads = {k: v for m in self.methods.values() for k, v in m.rates(params).items()}
        return replace(timed_alone, payloads=payloads)

    def outcomes(self) -> list[Outcome]:
        """Outcomes of all methods, fastest first."""
        every = [self.outcome(text) for text in self.methods]
        with_bytes = [replace(each, node_bytes=self._node_bytes(each)) for each in every]
        return sorted(with_bytes, key=lambda each: each.step)

    def outcome(self, method: str, bandwidth: float | None = None) -> Outcome:
        """The fastest outcome of a method. bandwidth: that of other links, in bytes a second."""
        ways = self.methods[method].ways(self.cluster.topology)
        outcomes = [self._outcome(method, way, bandwidth or self.cluster.bandwidth) for way in ways]
        return min(outcomes, key=lambda each: each.step)

    def step(self, method: str) -> PredictedStep:
        """Work of the lanes in a step of the fastest strategy, from the first bucket on."""
        objective, ways = self._objective(method, self.outcome(method).strategy, self.cluster)
        return objective.simulated(ways, events=True)

    @property
    def alone_seconds(self) -> float:
        """Seconds of a step of one rank alone, with all micro-batches."""
        return self.micro_batches * self.alone.step

    @property
    def model(self) -> Model:
        """The model to train."""
        return self._description.model

    @property
    def assumed(self) -> tuple[str, ...]:
        """Texts on assumptions of the predictions that were not measured."""
        cluster = self.cluster
        device = f"{cluster.device.name}: {cluster.device.about}"
        if self._step_given:
            device += "; the step alone was given"
        jitter = () if cluster.jitter or cluster.slow_rank else ("all ranks compute equally fast",)
        guess = (f"codecs: {self._guess}",) if self._guess else ()
        if self.micro_batches > 1:
            device += (
                f"; a step has {self.micro_batches} micro-batches, and averages after the last"
            )
        return (device, *guess, *cluster.assumed, *jitter, *self._description.assumed)

    def memory(self, method: str, optimizer: str | None) -> float:
        """Bytes that a rank holds with DDP: weights, gradients, their buckets, states of the
        optimizer (of Adam by default) and of the codec on a worker; no activations."""
        copies = 3 + STATES.get(optimizer or "adam", 2)
        params = self._description.params
        own = sum(copies * p.nbytes for p in params)
        return own + FLOAT_BYTES * self.methods[method].state_elements(params)

    def pays_up_to(self, method: str) -> float | None:
        """The highest bandwidth, in bytes a second, at which a method is PAYS times as fast as the
        baseline: 0 if it never is, infinite if it always is; None for the baseline itself."""
        if method == BASELINE or BASELINE not in self.methods:
            return None

        def pays(bandwidth: float) -> bool:
            own, other = (self.outcome(each, bandwidth).step for each in (method, BASELINE))
            return other >= PAYS * own

        if not pays(LOWEST):
            return 0.0
        return math.inf if pays(HIGHEST) else search(pays)

    def bandwidth_for(self, method: str, efficiency: float) -> float | None:
        """The least bytes a second with this efficiency of a step; None if no link suffices."""

        def fails(bandwidth: float) -> bool:
            return self.outcome(method, bandwidth).efficiency < efficiency

        if fails(HIGHEST):
            return None
        return search(fails) if fails(LOWEST) else LOWEST

    def _outcome(self, method: str, strategy: str, bandwidth: float) -> Outcome:
        key = (method, bandwidth, strategy)
        if key not in self._known:
            cluster = self.cluster.with_bandwidth(bandwidth)
            seconds, backward = self._predict(method, strategy, cluster)
            alone = self.alone_seconds
            efficiency = alone / seconds if seconds > 0 else 1.0
            self._known[key] = Outcome(
                method, strategy, seconds, seconds - alone, efficiency, backward
            )
        return self._known[key]

    def _predict(self, method: str, strategy: str, cluster: Cluster) -> tuple[float, float]:
        """Seconds of a step, and of its backward pass."""
        objective, ways = self._objective(method, strategy, cluster)
        prediction = objective.simulated(ways)
        before = (self.micro_batches - 1) * self.alone.step * (1 + cluster.straggling)
        return before + prediction.seconds + self.workload.rest, prediction.backward

    def _objective(
        self, method: str, strategy: str, cluster: Cluster
    ) -> tuple[Objective, list[Way | None]]:
        costs = cost_tables.costs(cluster, self._costs)
        suited = frozenset(key for each, key in self.workload.payloads if each == method)
        if suited not in self._objectives:
            self._objectives[suited] = self._build_objective(suited, costs)
        way = self.methods[method].way(strategy)
        return self._objectives[suited].costing(costs), [way, None]

    def _build_objective(self, suited: frozenset[int], costs: Costs) -> Objective:
        """The objective with two kinds of tensors: those that the codec suits, and the others."""
        kinds = [
            tuple(p for p in self._description.backwards if (p.index in suited) == packed)
            for packed in (True, False)
        ]
        topology = self.cluster.topology
        return Objective(kinds, self._codecs, topology, costs, self.workload, LOADS)

    def _node_bytes(self, outcome: Outcome) -> float:
        """Bytes that a node sends, from the seconds of a link that only its speed limits."""
        device = replace(self.cluster.device, core=0.0)
        ideal = replace(self.cluster, device=device, rack=None)
        link = ideal.inside if ideal.nodes == 1 else ideal.between
        stages = self._stages(outcome.method, outcome.strategy, ideal)
        return link.speed * sum(stage.seconds for stage in stages if stage.lane == WIRE)

    def _stages(self, method: str, strategy: str, cluster: Cluster) -> list[Stage]:
        """Stages of all synchronizations of a step."""
        objective, ways = self._objective(method, strategy, cluster)
        return [stage for load in objective.loads(ways) for stage in load.stages]
