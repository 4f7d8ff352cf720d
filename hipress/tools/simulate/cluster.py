"""A cluster as described by a file: nodes, links, device. Units are bytes and seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist

from casync.topology import Topology
from hipress import reading
from hipress.reading import BANDWIDTH, SHARE, TIME, Fields
from hipress.tools import profile as profiles
from hipress.tools.models import device_speeds
from hipress.tools.models.device_speeds import DEVICES, Device
from hipress.tools.profile import Profile

__all__ = ["FSDP2", "HSDP", "Cluster", "Link", "probed", "read"]

_KEYS = ("nodes", "ranks_per_node", "ranks", "device", "between", "inside", "pcie", "rack",
         "jitter", "slow_rank", "profile", "sharding")  # fmt: skip
FSDP2, HSDP = "fsdp2", "hsdp"
_HINT = "begin with `nodes:`, `ranks_per_node:`, `device:`, `between: {bandwidth: 100 Gbit/s}`"


@dataclass(frozen=True)
class Link:
    """A link; all values hold for each direction."""

    bandwidth: float  # nominal bytes a second
    latency: float  # seconds per message
    reach: float = 1.0  # share of the bandwidth that transfers reach
    collective: float = 0.0  # fixed seconds of an all-reduce, besides bytes and latencies

    @property
    def speed(self) -> float:
        """Bytes a second that transfers reach."""
        return self.bandwidth * self.reach


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. A node's ranks share its link to others; inside, each has a link of its own."""

    nodes: int
    ranks_per_node: int
    device: Device
    between: Link
    inside: Link
    pcie: float | None = None  # bytes a second per rank, each way, if the host compresses
    rack: int | None = None  # nodes below one switch
    oversubscription: float = 1.0  # bandwidth of a rack's links over that of its uplink
    jitter: float = 0.0  # standard deviation of a rank's step over its mean
    slow_rank: float = 0.0  # extra share of time that one rank computes
    profile: Profile | None = None  # result of `hipress probe`: costs of codecs
    assumed: tuple[str, ...] = ()  # texts on values that the file does not give
    sharding: str | None = None  # fsdp2 or hsdp: ranks that hold the model's shards

    @property
    def ranks(self) -> int:
        """Number of ranks over all nodes."""
        return self.nodes * self.ranks_per_node

    @cached_property
    def topology(self) -> Topology:
        """Ranks by node."""
        return Topology.even(self.ranks, self.ranks_per_node)

    @property
    def link(self) -> Link:
        """The link between nodes, or inside a single node."""
        return self.inside if self.nodes == 1 else self.between

    @property
    def hops(self) -> int:
        """Latencies of an all-reduce, one after the other: GPUs' trees have few, rings of hosts
        all."""
        if self.device.host:
            return 2 * (self.ranks - 1)
        return 2 * math.ceil(math.log2(max(2, self.nodes)))

    def with_link(self, link: Link) -> Cluster:
        """The same cluster with another `link`."""
        return replace(self, inside=link) if self.nodes == 1 else replace(self, between=link)

    def with_bandwidth(self, bandwidth: float) -> Cluster:
        """The same cluster with another bandwidth of its `link`."""
        return self.with_link(replace(self.link, bandwidth=bandwidth))

    @property
    def bandwidth(self) -> float:
        """The bandwidth that `with_bandwidth` sets, in bytes a second."""
        return self.link.bandwidth

    def crossing(self, peers: int) -> float:
        """Factor by which a transfer gets less than a node's link, since others of its rack leave
        it, too. peers: number of nodes to which each node sends; 1: a ring."""
        if self.rack is None or self.nodes <= self.rack:
            return 1.0
        leaving = 1 / self.rack  # one of a ring's links leaves the rack
        if peers > 1:
            leaving = (self.nodes - self.rack) / (self.nodes - 1)
        return max(1.0, self.oversubscription * leaving)

    @property
    def straggling(self) -> float:
        """Extra share of time of the slowest rank over the mean: the expected largest of `ranks`
        normal deviates (Blom 1958), combined with the one slow rank."""
        expected = 0.0
        if self.ranks > 1:
            expected = NormalDist().inv_cdf((self.ranks - 0.375) / (self.ranks + 0.25))
        return (1 + self.jitter * expected) * (1 + self.slow_rank) - 1

    def __str__(self) -> str:
        """Text such as `16 nodes x 8 h100, 100 Gbit/s a node at 85%`."""
        link, what = self.link, "a rank" if self.nodes == 1 else "a node"
        return (
            f"{self.nodes} nodes x {self.ranks_per_node} {self.device.name}, "
            f"{link.bandwidth * 8e-9:g} Gbit/s {what} at {link.reach:.0%}"
        )


def read(path: Path) -> Cluster:
    """Read a cluster file. Raises ConfigError with the places of all mistakes."""
    fields = reading.read(path, "a cluster file", _HINT)
    fields.only(_KEYS)
    reader = _Reader(fields, path.parent)
    nodes, per_node = reader.sizes()
    device = _probed(device_speeds.read(fields), reader.probed, fields.is_mapping("device"))
    cluster = Cluster(
        nodes, per_node, device, *reader.links(nodes, per_node), reader.pcie(),
        *reader.rack(), fields.quantity("jitter", SHARE, 0.0, most=1.0),
        fields.quantity("slow_rank", SHARE, 0.0), reader.probed,
    )  # fmt: skip
    sharding = fields.text("sharding", "") or None
    if sharding is not None and sharding not in (FSDP2, HSDP):
        fields.unknown("sharding", sharding, (FSDP2, HSDP))
    reading.refuse(fields.problems)
    return replace(cluster, assumed=tuple(reader.assumed), sharding=sharding)


def probed(profile: Profile) -> Cluster:
    """The cluster of a profile, by the link that was measured between all ranks. Its nodes count as
    equal, the last ones as those of the first."""
    topology, costs = profile.topology, next(iter(profile.places.values()))
    line, inside = costs.to(topology.world_size).line, costs.inside.line
    per_node = topology.largest
    device = DEVICES["cpu" if profile.device == "cpu" else "v100"]
    cluster = Cluster(
        len(topology.nodes), per_node, _probed(device, profile, described=False),
        Link(_over(line.per_byte, per_node), line.latency),
        Link(_over(inside.per_byte), inside.latency), profile=profile,
    )  # fmt: skip
    collective = max(0.0, profile.link.collective - cluster.hops * cluster.link.latency)
    return cluster.with_link(replace(cluster.link, collective=collective))


def _over(per_byte: float, ranks: int = 1) -> float:
    """Bytes a second of so many ranks together."""
    return ranks / per_byte if per_byte > 0 else math.inf


def _probed(device: Device, profile: Profile | None, described: bool) -> Device:
    """The device with the overlap and slow-down of a profile. described: the file describes it."""
    if profile is None or described:
        return device
    costs = next(iter(profile.places.values()))
    slows = max((each.slows for each in costs.exchange.values()), default=device.slows)
    about = f"{device.about}; overlap and slow-down as probed"
    return replace(device, overlap=costs.overlap, slows=slows, about=about)


class _Reader:
    def __init__(self, fields: Fields, folder: Path) -> None:
        self.fields, self.assumed = fields, list[str]()
        self.probed = self.profile(folder)

    def sizes(self) -> tuple[int, int]:
        """Nodes, and ranks per node; the file gives two or three of these and all ranks."""
        fields = self.fields
        per_node = fields.count("ranks_per_node", 1)
        if "ranks" not in fields:
            return fields.count("nodes"), per_node
        ranks = fields.count("ranks")
        nodes = fields.count("nodes", max(1, ranks // per_node))
        if nodes * per_node != ranks:
            message = f"{ranks} ranks do not divide into nodes of {per_node}"
            if "nodes" in fields:
                message = f"{nodes} nodes of {per_node} ranks are not {ranks} ranks"
            fields.problems.add(fields.at("ranks"), message)
        return nodes, per_node

    def links(self, nodes: int, per_node: int) -> tuple[Link, Link]:
        link = profiles.UNKNOWN if self.probed is None else self.probed.link
        reach, collective = link.reach or 0.85, link.collective or 1e-4
        between = self.link("between", nodes > 1, 3e-5, reach, collective)
        inside = self.link("inside", per_node > 1, 1e-5, 0.8, 2e-5)
        return between, inside

    def link(
        self, name: str, needed: bool, latency: float, reach: float, collective: float
    ) -> Link:
        inner = self.fields.fields(name, needed)
        if inner is None:
            return Link(math.inf, 0.0)
        inner.only(("bandwidth", "latency", "reach", "collective"))
        texts = {
            "latency": f"{latency * 1e6:g} us a message",
            "reach": f"{reach:.0%} of its bandwidth is reached",
            "collective": f"a collective takes {collective * 1e6:g} us besides",
        }
        missing = [text for key, text in texts.items() if key not in inner]
        if missing and needed:
            where = "between nodes" if name == "between" else "inside a node"
            self.assumed.append(f"links {where}: {', '.join(missing)}")
        return Link(
            inner.quantity("bandwidth", BANDWIDTH),
            inner.quantity("latency", TIME, latency),
            inner.quantity("reach", SHARE, reach, least=1e-3, most=1.0),
            inner.quantity("collective", TIME, collective),
        )

    def pcie(self) -> float | None:
        return self.fields.quantity("pcie", BANDWIDTH) if "pcie" in self.fields else None

    def rack(self) -> tuple[int | None, float]:
        inner = self.fields.fields("rack")
        if inner is None:
            return None, 1.0
        inner.only(("nodes", "oversubscription"))
        return inner.count("nodes"), inner.quantity("oversubscription", default=1.0, least=1.0)

    def profile(self, folder: Path) -> Profile | None:
        """The profile of the file, or None; ConfigError for a file that is no profile."""
        if "profile" not in self.fields:
            return None
        path = folder / self.fields.text("profile")
        if not path.is_file():
            self.fields.problems.add(self.fields.at("profile"), f"there is no profile {path}")
            return None
        return profiles.read(path)
