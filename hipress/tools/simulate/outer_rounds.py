"""Predicted rounds of `hipress.Outer` between the nodes of a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hipress.errors import ConfigError
from hipress.outer.schedule import Schedule
from hipress.tools.models.own import Description
from hipress.tools.simulate.cluster import Cluster
from hipress.tools.simulate.compared import BASELINE, FP32, Method, parse
from hipress.tools.simulate.simulation import HIGHEST, LOWEST, PAYS, Simulation, search

__all__ = ["Rounds", "predict", "schedule_of"]

_COMPRESSOR = "int4_group"  # default of hipress.Outer
_INSTANT = 1e-9  # seconds of a step, to see its synchronization alone
ENOUGH = 0.95  # share of the time in training


@dataclass(frozen=True)
class Rounds:
    """The rounds of an outer loop between sites. Seconds, bytes, and bytes a second."""

    sites: int
    compressor: str
    schedule: str
    local: float  # a step of a site, its own averages included
    seconds: float  # from the begin of a round to its end
    exposed: float  # of these, the time in which sites wait
    site_bytes: float  # sent by a site in a round
    step: float  # mean, rounds included
    rival: str  # the method that takes least with a synchronization in each step
    pays_up_to: float  # bandwidth at which a step takes 2% less than the rival's: 0, or infinite
    enough: int  # least `every` with ENOUGH of the time in training, for this delay

    @property
    def training(self) -> float:
        """Share of the time in training."""
        return self.local / self.step


def schedule_of(
    every: int | None, delay: int | None, fragments: int | None, sharding: str | None
) -> Schedule | None:
    """The rounds that these options of a command ask for, if any. Raises ConfigError."""
    if every is None:
        if delay is not None or fragments is not None:
            raise ConfigError("--delay and --fragments are of an outer loop: add --every STEPS")
        return None
    if sharding is not None:
        raise ConfigError(
            "--every predicts sites whose ranks DDP averages: leave --sharding out, or describe a "
            "site's own cluster"
        )
    return Schedule(every, 1 if fragments is None else fragments, delay or 0)


def predict(
    simulation: Simulation, description: Description, schedule: Schedule, step: float | None = None
) -> Rounds:
    """The rounds of sites that are the cluster's nodes, whose ranks DDP averages, by the first
    compressor among the methods.

    Raises ConfigError for a cluster of one node.
    """
    cluster = simulation.cluster
    if cluster.nodes < 2:
        raise ConfigError(
            "--every averages between nodes, and the cluster has one: describe each site as a node"
        )
    method = _compressor(simulation.methods.values())
    loop = _Loop(cluster, description, method, schedule, step)
    bandwidth = cluster.bandwidth
    local, seconds, exposed, mean = loop.local, *loop.at(bandwidth)
    rival = min(simulation.outcomes(), key=lambda each: each.step)

    def pays(bandwidth: float) -> bool:
        least = min(simulation.outcome(each, bandwidth).step for each in simulation.methods)
        return least >= PAYS * loop.at(bandwidth)[-1]

    return Rounds(
        cluster.nodes, method.text, str(schedule), local, seconds, exposed, loop.site_bytes, mean,
        rival.method, _up_to(pays), _enough(exposed / local, schedule),
    )  # fmt: skip


def _enough(exposed: float, schedule: Schedule) -> int:
    """Rounds.enough, by the steps that a round is exposed."""
    least = max(schedule.delay + 1, math.ceil(exposed * ENOUGH / (1 - ENOUGH)))
    return least * schedule.fragments


def _compressor(methods: Iterable[Method]) -> Method:
    ours = [each for each in methods if each.text not in (FP32, BASELINE) and each.codec]
    return ours[0] if ours else parse(_COMPRESSOR)


def _up_to(pays: Callable[[float], bool]) -> float:
    """The highest bandwidth at which an outer loop pays; 0 if there is none, or infinite.

    The search begins at the top: on links on which even a round takes too long, it may not pay."""
    if pays(HIGHEST):
        return math.inf
    high = HIGHEST
    while high > LOWEST:
        low = high / 4
        if pays(low):
            return search(pays, low, high)
        high = low
    return 0.0


class _Loop:
    """An outer loop by the bandwidth between the nodes."""

    def __init__(
        self,
        cluster: Cluster,
        description: Description,
        method: Method,
        schedule: Schedule,
        step: float | None,
    ) -> None:
        self._schedule, self._ranks, self._method = schedule, cluster.ranks_per_node, method.text
        inside = Simulation(replace(cluster, nodes=1), description, [parse(FP32)], step)
        self.local = inside.outcome(FP32).step
        one = replace(cluster, ranks_per_node=1).with_bandwidth(self._share(cluster.bandwidth))
        self._across = Simulation(one, description, [method], _INSTANT)

    @property
    def site_bytes(self) -> float:
        """Bytes that a site sends in a round: each of its ranks sends the fragment."""
        (outcome,) = self._across.outcomes()
        return self._ranks * outcome.node_bytes / self._schedule.fragments

    def at(self, bandwidth: float) -> tuple[float, float, float]:
        """Seconds of a round, those that training does not hide, and those of a mean step."""
        outcome = self._across.outcome(self._method, self._share(bandwidth))
        seconds = outcome.step / self._schedule.fragments
        exposed = max(0.0, seconds - self._schedule.delay * self.local)
        return seconds, exposed, self.local + exposed / self._schedule.spacing

    def _share(self, bandwidth: float) -> float:
        """A rank's share of its node's link: it averages with one rank of each other node."""
        return bandwidth / self._ranks
