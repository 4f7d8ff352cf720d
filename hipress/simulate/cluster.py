"""A cluster as a file describes it: nodes, links, device. Bytes and seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist

from casync.topology import Topology
from hipress import reading
from hipress.models import devices
from hipress.models.devices import Device
from hipress.plan import profile as profiles
from hipress.plan.profile import Profile
from hipress.reading import BANDWIDTH, SHARE, TIME, Fields

__all__ = ["Cluster", "Link", "read"]

_KEYS = ("nodes", "ranks_per_node", "ranks", "device", "between", "inside", "pcie", "rack",
         "jitter", "slow_rank", "profile")  # fmt: skip
_HINT = "begin with `nodes:`, `ranks_per_node:`, `device:`, `between: {bandwidth: 100 Gbit/s}`"


@dataclass(frozen=True)
class Link:
    """Each direction."""

    bandwidth: float  # bytes a second, as it is sold
    latency: float  # seconds of a message
    reach: float = 1.0  # share of the bandwidth that transfers reach
    collective: float = 0.0  # seconds that an all-reduce takes besides its bytes and latencies

    @property
    def speed(self) -> float:
        """Bytes a second that are reached."""
        return self.bandwidth * self.reach


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. A node's ranks share its link to others; each has one to those of its node."""

    nodes: int
    ranks_per_node: int
    device: Device
    between: Link
    inside: Link
    pcie: float | None = None  # bytes a second of a rank, each way, where the host compresses
    rack: int | None = None  # nodes below one switch
    oversubscription: float = 1.0  # times less than all its links leaves a rack
    jitter: float = 0.0  # standard deviation of a rank's step over its mean
    slow_rank: float = 0.0  # by how much one rank computes longer than the others
    profile: Profile | None = None  # of `hipress probe`: what codecs cost there
    assumed: tuple[str, ...] = ()  # what the file leaves open

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.ranks_per_node

    @cached_property
    def topology(self) -> Topology:
        """For stages."""
        return Topology.even(self.ranks, self.ranks_per_node)

    def with_bandwidth(self, bandwidth: float) -> Cluster:
        """The same with other links between nodes, or, of one node, within."""
        if self.nodes == 1:
            return replace(self, inside=replace(self.inside, bandwidth=bandwidth))
        return replace(self, between=replace(self.between, bandwidth=bandwidth))

    @property
    def bandwidth(self) -> float:
        """Of what `with_bandwidth` sets."""
        return (self.inside if self.nodes == 1 else self.between).bandwidth

    def crossing(self, peers: int) -> float:
        """How many times less than a node's link a transfer gets, as others of its rack want to
        leave it, too. `peers`: to how many nodes each sends; 1: in a ring, by neighbours."""
        if self.rack is None or self.nodes <= self.rack:
            return 1.0
        leaving = 1 / self.rack  # of a ring's links one leaves the rack
        if peers > 1:
            leaving = (self.nodes - self.rack) / (self.nodes - 1)
        return max(1.0, self.oversubscription * leaving)

    @property
    def straggling(self) -> float:
        """How much longer than the mean the slowest rank computes: the expected largest of so many
        normal deviates (Blom 1958), and what one rank is slower than all."""
        expected = 0.0
        if self.ranks > 1:
            expected = NormalDist().inv_cdf((self.ranks - 0.375) / (self.ranks + 0.25))
        return (1 + self.jitter * expected) * (1 + self.slow_rank) - 1

    def __str__(self) -> str:
        """Such as `16 nodes x 8 h100, 100 Gbit/s a node at 85%`."""
        link, what = (self.inside, "a rank") if self.nodes == 1 else (self.between, "a node")
        return (
            f"{self.nodes} nodes x {self.ranks_per_node} {self.device.name}, "
            f"{link.bandwidth * 8e-9:g} Gbit/s {what} at {link.reach:.0%}"
        )


def read(path: Path) -> Cluster:
    """A cluster file. ConfigError with the places of everything that is wrong."""
    fields = reading.read(path, "a cluster file", _HINT)
    fields.only(_KEYS)
    reader = _Reader(fields, path.parent)
    nodes, per_node = reader.sizes()
    device = _probed(devices.read(fields), reader.probed, fields.is_mapping("device"))
    found = Cluster(
        nodes, per_node, device, *reader.links(nodes, per_node), reader.pcie(),
        *reader.rack(), fields.quantity("jitter", SHARE, 0.0, most=1.0),
        fields.quantity("slow_rank", SHARE, 0.0), reader.probed,
    )  # fmt: skip
    reading.refuse(fields.problems)
    return replace(found, assumed=tuple(reader.assumed))


def _probed(device: Device, profile: Profile | None, told: bool) -> Device:
    """With what a profile has of how codecs and transfers slow a backward pass. `told`: whether the
    file describes the device itself."""
    if profile is None or told:
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
        """Nodes, and ranks of each; two of these and all ranks are given, or all three."""
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
        """ConfigError for a file that is there and no profile."""
        if "profile" not in self.fields:
            return None
        path = folder / self.fields.text("profile")
        if not path.is_file():
            self.fields.problems.add(self.fields.at("profile"), f"there is no profile {path}")
            return None
        return profiles.read(path)
