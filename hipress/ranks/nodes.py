"""Nodes of ranks: as given by the user, by torchrun, or by host names."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from casync.errors import PlanError
from casync.topology import Topology
from hipress.errors import ConfigError

__all__ = ["place", "topology_of"]


def place() -> dict[str, str | None]:
    """Host name and torchrun's LOCAL_WORLD_SIZE of this rank, for the others."""
    return {"host": socket.gethostname(), "local": os.environ.get("LOCAL_WORLD_SIZE")}


def topology_of(
    topology: int | Sequence[Sequence[int]] | None,
    places: Sequence[Mapping[str, Any]],
    ranks: Sequence[int],
) -> Topology:
    """The nodes of a group's ranks. places: `place()` of each; ranks: their global numbers.

    Raises ConfigError if the requested topology does not fit the world size.
    """
    if isinstance(topology, int):
        return _even(topology, len(ranks))
    if topology is not None:
        return _listed(topology, len(ranks))
    sizes = {place["local"] for place in places}
    local = sizes.pop() if len(sizes) == 1 else None
    if local is not None and local.isdigit() and int(local) > 0:  # torchrun numbers node by node
        names = [str(rank // int(local)) for rank in ranks]
    else:
        names = [place["host"] for place in places]
    nodes: dict[str, list[int]] = defaultdict(list)
    for rank, name in enumerate(names):
        nodes[name].append(rank)
    return Topology.of(nodes.values())


def _even(per_node: int, world_size: int) -> Topology:
    if world_size % per_node:
        raise ConfigError(
            f"topology={per_node}: {world_size} ranks do not make nodes of {per_node}; give the "
            "number of ranks per node, or lists of ranks, such as [[0, 1], [2]]"
        )
    return Topology.even(world_size, per_node)


def _listed(nodes: Sequence[Sequence[int]], world_size: int) -> Topology:
    try:
        topology = Topology.of(nodes)
    except PlanError as error:
        raise ConfigError(f"topology: {error}") from error
    if topology.world_size != world_size:
        raise ConfigError(
            f"topology={[list(node) for node in nodes]} has {topology.world_size} ranks, but the "
            f"group has {world_size}"
        )
    return topology
