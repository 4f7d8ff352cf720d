"""A described cluster as a profile, as if `hipress probe` had measured it."""

from __future__ import annotations

from pathlib import Path

from hipress import options
from hipress.choose.search import candidates
from hipress.tools import profile as profiles
from hipress.tools.simulate import costs as cost_tables
from hipress.tools.simulate.cluster import Cluster

__all__ = ["write_profile"]


def write_profile(path: Path, cluster: Cluster, optimizer: str | None) -> None:
    """Write the costs of the cluster's links, and of the codecs that "auto" may try under this kind
    of optimizer: measured ones if the cluster file names a profile. Raises ConfigError, OSError."""
    codecs = candidates(options.make(options.AUTO, optimizer=optimizer), "reference")
    known = cost_tables.codec_costs(cluster, codecs)
    place, device = ("gloo", "cpu") if cluster.device.host else ("nccl", "cuda")
    places = {place: cost_tables.costs(cluster, known)}
    profiles.write(path, places, cluster.topology, codecs, device)
