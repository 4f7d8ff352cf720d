"""Costs of transfers and codecs by a cluster's description, as a probe would measure them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from casync.codec import Codec
from casync.cost import FREE, CodecCost, Copies, Costs, Line, Transfer
from casync.stages import TASK
from hipress.tools.simulate import codec_speeds as speeds
from hipress.tools.simulate.cluster import Cluster
from hipress.tools.simulate.compared import BASELINE

__all__ = ["codec_costs", "costs", "probed"]

_TYPES = ("float32", "float16", "bfloat16")


def costs(cluster: Cluster, codecs: Mapping[str, CodecCost]) -> Costs:
    """Costs on a cluster. All ranks of a node share its link to others, in transfers between them;
    in an all-reduce they form a ring, one link of which leaves the node each way."""
    far = max(1, cluster.ranks - cluster.ranks_per_node)
    peers = sorted({1, max(1, cluster.nodes - 1), far})
    return Costs(
        {each: _exchange(cluster, each) for each in peers},
        dict.fromkeys(_TYPES, _reduce(cluster)),
        codecs,
        _inside(cluster),
        cluster.device.overlap,
        _copies(cluster),
    )


def codec_costs(cluster: Cluster, codecs: Mapping[str, Codec]) -> dict[str, CodecCost]:
    """Costs of codecs by key: of the cluster's profile, else by the bytes that they touch."""
    known = _measured_costs(cluster)
    return {
        key: known.get(key) or speeds.cost(codec, cluster.device) for key, codec in codecs.items()
    }


def _measured_costs(cluster: Cluster) -> Mapping[str, CodecCost]:
    if cluster.profile is None:
        return {}
    return next(iter(cluster.profile.places.values())).codecs


def probed(cluster: Cluster, codecs: Mapping[str, Codec]) -> tuple[dict[str, CodecCost], str]:
    """Costs of codecs by key, and a text on their source: a profile, or the device's memory."""
    known, costs = _measured_costs(cluster), codec_costs(cluster, codecs)
    if BASELINE in costs:
        costs[BASELINE] = _cost_of_hook(costs[BASELINE])
    guessed = [key for key in costs if key not in known]
    if not guessed:
        return costs, ""
    listed = ", ".join(sorted(guessed))
    if cluster.device.host:
        return costs, f"{listed}: as measured on a core of the machine of bench.codecs"
    return (
        costs,
        f"{listed}: by the bytes that kernels touch, not measured ({cluster.device.name})",
    )


def _cost_of_hook(cost: CodecCost) -> CodecCost:
    """Cost of PyTorch's own hook: it casts a bucket at once, without the time of a task."""
    cast = Line(-TASK, cost.encode.per_byte)
    return CodecCost(cast, cast)


def _transfer(cluster: Cluster, per_byte: float, latency: float) -> Transfer:
    """A transfer whose bytes take the link or the copying core, whichever takes longer."""
    device = cluster.device
    slowest = max(per_byte, device.core)
    cores = device.core / slowest if slowest > 0 else 0.0
    return Transfer(Line(latency, slowest), cores, device.slows)


def _exchange(cluster: Cluster, peers: int) -> Transfer:
    """Transfer between nodes, by bytes that each rank sends to `peers` others."""
    if cluster.nodes == 1:
        return _inside(cluster)
    share = cluster.ranks_per_node * cluster.crossing(peers) / cluster.between.speed
    return _transfer(cluster, share, cluster.between.latency)


def _inside(cluster: Cluster) -> Transfer:
    link = cluster.inside
    if cluster.ranks_per_node == 1:
        return Transfer(FREE)
    return _transfer(cluster, 1 / link.speed, link.latency)


def _reduce(cluster: Cluster) -> Transfer:
    """All-reduce, by bytes that each rank has. A byte travels twice around."""
    n, link = cluster.ranks, cluster.link
    around = 2 * (n - 1) / n
    slowest = 0.0 if cluster.ranks_per_node == 1 else 1 / cluster.inside.speed
    if cluster.nodes > 1:
        slowest = max(slowest, cluster.crossing(1) / cluster.between.speed)
    transfer = _transfer(cluster, slowest, link.collective + cluster.hops * link.latency)
    return replace(transfer, line=Line(transfer.line.latency, around * transfer.line.per_byte))


def _copies(cluster: Cluster) -> Copies | None:
    if cluster.pcie is None:
        return None
    way = Line(1e-5, 1 / cluster.pcie)
    return Copies(way, way, gradients=True)
