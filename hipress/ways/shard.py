"""hipress.shard: the collectives of FSDP2, compressed."""

from __future__ import annotations

import inspect
import logging
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, SupportsIndex

import torch.distributed as dist
from torch import nn

from casync.shutdown import end_with
from casync.topology import Topology
from hipress import compat, registry
from hipress import options as options_
from hipress.arguments import group_of
from hipress.choose.plan import check_patterns
from hipress.codecs import compilations_told_by, full_name
from hipress.errors import ConfigError, unknown
from hipress.model.devices import Placement, backends_of, place
from hipress.model.params import Param
from hipress.model.shards import mesh_size
from hipress.options import AUTO, Options
from hipress.ranks import coordinator as coordinators
from hipress.ranks import nodes
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.groups import group_timeout
from hipress.session import versions
from hipress.sharding.collectives import (
    ALL_GATHER,
    REDUCE_SCATTER,
    REPLICAS,
    Collective,
    Compressor,
    collectives_of,
)
from hipress.sharding.fsdp import Group, groups_of, params_of
from hipress.sharding.sharding import Sharding

__all__ = ["shard"]

log = logging.getLogger("hipress")
_REFUSED = {
    "process_group": "the ranks are those of the mesh of fully_shard",
    "ddp_kwargs": "FSDP2 has no DistributedDataParallel",
    "scope": "FSDP2 has no buckets; each parameter is compressed by itself",
    "strategy": "a sum goes to the rank that owns the shard, and its values to all",
    "down": "all_gather is the compressor of what ranks receive",
    "compressor": "name reduce_scatter=, of gradients, and all_gather=, of weights",
    "optimizer": "shards of momentum are not averaged",
    "policy": "its compressors stay the same",
    "verify": "no two ranks hold the same gradients",
}


def shard(
    model: nn.Module,
    *unnamed: object,
    reduce_scatter: Compressor = "int4_group",
    all_gather: Compressor = "int8_group",
    replicas: Compressor = None,
    replica_group: dist.ProcessGroup | None = None,
    rules: Mapping[str, Any] | str | os.PathLike[str] = MappingProxyType({}),
    exclude: str | Iterable[str] = ("@1d",),
    min_size: SupportsIndex | None = None,
    in_flight: SupportsIndex = 2,
    seed: SupportsIndex = 0,
    timeout: float | timedelta | None = None,
    topology: SupportsIndex | Iterable[Iterable[SupportsIndex]] | None = None,
    transport: str = AUTO,
    checksum: bool = False,
    **others: Any,
) -> nn.Module:
    """Compress the collectives of a model of FSDP2's `fully_shard`, in place; return the model.

    Call it after the last `fully_shard`, before a forward pass. All ranks of the mesh call it, with
    the same arguments (`timeout` may differ). With one rank nothing is installed.

    Args:
        reduce_scatter: the compressor of gradients: a name or path, a compiled codec, a mapping of
            `compressor` and its parameters, or None: FSDP2's own reduce-scatter stays. It must be
            stateless: a residual would take the memory of an unsharded gradient on each rank.
        all_gather: the compressor of weights, likewise. All ranks, the sender too, compute with
            what its payload decodes to; the shards that the optimizer steps stay exact.
        replicas: the compressor of averages between replicas of the shards, with error feedback if
            it has any: 1/N of the gradients' memory. Shard over one dimension of a mesh,
            `fully_shard(model, mesh=mesh["shard"])`, and begin with the same weights.
        replica_group: ranks that hold the same shards: `mesh["replicate"].get_group()`.
        rules: other compressors for some parameters, all ways: see `hipress.options.Options`.
        exclude: patterns of parameters that travel uncompressed, all ways; by default those of at
            most one dimension, such as biases and norms.
        min_size: as for `wrap`, of a rank's shard.
        in_flight: reduce-scatters that may be under way while the backward pass goes on. Each keeps
            the gradients of a module of `fully_shard` (on a GPU from torch 2.13 on; before: 1).
        topology: nodes of the ranks that hold the shards, as for `wrap`. Between nodes of several
            ranks, each node sends and gets a shard once; inside it travels uncompressed.
        seed, timeout, transport, checksum: as for `wrap`.

    Raises ConfigError, ConfigMismatch, AgreementTimeout and RankLost as `wrap` does; a forward or
    backward pass raises RankLost, AgreementTimeout or SyncError, which name rank, peer and task.
    """
    group_of(None)  # torch.distributed is initialized
    model = _check_model(model)
    groups = groups_of(model)
    ranks = groups[0].ranks
    with coordinators.failures_told(ranks):
        _refuse({"compressor": None, **others} if unnamed else others)
        options = options_.make(
            "none", rules=rules, exclude=exclude, min_size=min_size, seed=seed, topology=topology,
            transport=transport, checksum=checksum,
            timeout=group_timeout(ranks) if timeout is None else timeout,
        )  # fmt: skip
        buffers = _check_in_flight(in_flight)
        params = params_of(model, groups)
        check_patterns(params, options)
        placement = _placement(params, options, groups)
        _refuse_replicas(replicas, replica_group, groups)
    compressors = {REDUCE_SCATTER: reduce_scatter, ALL_GATHER: all_gather, REPLICAS: replicas}
    coordinator = coordinators.coordinator(ranks, options.timeout)
    places = coordinator.require_equal({"topology": str(options.topology)}, nodes.place())
    with coordinator.failures_told(), compilations_told_by(coordinator.rank == 0):
        hosts = nodes.topology_of(options.topology, places, coordinator.ranks)
        spread = dict.fromkeys(compressors, hosts)
        if replica_group is not None:
            spread[REPLICAS] = Topology.flat(replica_group.size())
        kept = [still for group in groups for still in group.frozen]
        frozen = [index for index, still in enumerate(kept) if still]
        collectives = collectives_of(compressors, params, options, placement, spread, frozen)
    coordinator.require_equal(_facts(options, params, collectives, placement))
    sharding = Sharding(coordinator, options, params, collectives, buffers)
    with coordinator.failures_told():
        if ranks.size() > 1:
            sharding.connect("shards", coordinator, ranks, (REDUCE_SCATTER, ALL_GATHER), placement)
        if replica_group is not None and replica_group.size() > 1:
            between = coordinators.coordinator(replica_group, options.timeout)
            between.require_equal(_facts(options, params, collectives, placement))
            sharding.connect("replicas", between, replica_group, (REPLICAS,), placement)
    sharding.install(groups)
    registry.put(model, sharding)
    end_with(model, sharding.close)
    _tell(sharding)
    _warn_of_parts(model, coordinator, replica_group)
    return model


_UNNAMED = ("unnamed", "others")
_OPTIONS = tuple(name for name in inspect.signature(shard).parameters if name not in _UNNAMED)


def _check_model(candidate: object) -> nn.Module:
    """The model, without torch.compile's wrapper. Raises ConfigError for anything else, and for a
    model that is sharded already."""
    if not isinstance(candidate, nn.Module):
        raise ConfigError(f"the model must be a torch.nn.Module, got {candidate!r}")
    model = compat.uncompiled(candidate)
    parts = {*model.modules()}
    for other, _ in registry.every(Sharding):
        if other in parts or model in {*other.modules()}:
            raise ConfigError(
                "hipress.shard was called for this model, or a part of it, before: hipress.detach "
                "that first, and call it once for the whole model"
            )
    return model


def _refuse(others: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that shards do not take."""
    for name in others:
        why = _REFUSED.get(name)
        if why is None and options_.elsewhere(name):
            why = "it is an argument of DistributedDataParallel or of an optimizer of hipress.optim"
        if why is None:
            raise unknown("option of hipress.shard", name, _OPTIONS)
        raise ConfigError(f"hipress.shard takes no {name}: {why}")


def _check_in_flight(in_flight: Any) -> int:
    try:
        buffers = 0 if isinstance(in_flight, bool) else operator.index(in_flight)
    except TypeError:
        buffers = 0
    if buffers < 1:
        raise ConfigError(f"in_flight is a positive number of reduce-scatters, not {in_flight!r}")
    return buffers


def _refuse_replicas(
    codec: Compressor, group: dist.ProcessGroup | None, groups: Sequence[Group]
) -> None:
    if (codec is None) != (group is None):
        raise ConfigError(
            'replicas= and replica_group= go together: a compressor, such as "int4_group", and the '
            'ranks that hold the same shards, mesh["replicate"].get_group()'
        )
    if codec is not None and any(each.replicated for each in groups):
        raise ConfigError(
            "FSDP2 averages the replicas of this model itself, since fully_shard got both "
            'dimensions of the mesh: fully_shard(model, mesh=mesh["shard"]) leaves replicas to '
            "hipress.shard(model, replicas=...)"
        )


def _placement(params: Sequence[Param], options: Options, groups: Sequence[Group]) -> Placement:
    where = [(param.name, param.device) for param in params]
    placement = place(where, options.transport, backends_of(groups[0].ranks))
    if placement.copies:
        raise ConfigError(
            "transport='host' copies whole buckets, which FSDP2 has not: pass transport=\"staged\""
        )
    placement.refuse_checksum(options.checksum)
    placement.refuse_other_current()
    return placement


def _facts(
    options: Options,
    params: Sequence[Param],
    collectives: Mapping[str, Collective],
    placement: Placement,
) -> dict[str, Any]:
    """All values that must be equal on all ranks."""
    used = [each for one in collectives.values() for each in one.codecs if each is not None]
    return {
        "called": "hipress.shard",
        "parameters of shards": [str(param) for param in params],
        **{name: [[d.name, d.codec] for d in each.decisions] for name, each in collectives.items()},
        "digests": {f"compressor {full_name(each)!r}": each.digest for each in used},
        "seed": options.seed,
        "checksum": options.checksum,
        "transport": placement.transport,
        **versions(),
    }


def _warn_of_parts(
    model: nn.Module, coordinator: Coordinator, replica_group: dist.ProcessGroup | None
) -> None:
    """Warn if gradients are averaged over a part of the job's ranks."""
    replicas = 1 if replica_group is None else replica_group.size()
    ranks, jobs = mesh_size(model) * replicas, dist.get_world_size()
    if ranks < jobs and coordinator.rank == 0:
        log.warning(
            "hipress.shard: fully_shard got a mesh of %d of the job's %d ranks, and nothing "
            "averages gradients with the others: the parts of the job train apart. Pass replicas= "
            "and replica_group=, or both dimensions of the mesh to fully_shard. This is meant for "
            "sites of hipress.Outer, stages of a pipeline, and replicas that something else "
            "averages, such as a hipress.Synchronizer",
            ranks, jobs,
        )  # fmt: skip


def _tell(sharding: Sharding) -> None:
    """Log the plan on the first rank."""
    if sharding.coordinator.rank != 0:
        return
    if not sharding.connections:
        log.info("hipress.shard: one rank holds all shards, so nothing is installed")
        return
    for argument in (REDUCE_SCATTER, ALL_GATHER, REPLICAS):
        decisions = (
            sharding.collectives[argument].decisions if argument in sharding.connections else ()
        )
        done = sum(d.numel for d in decisions if d.codec is not None)
        names = " and ".join(sorted({d.codec for d in decisions if d.codec is not None}))
        share = done / max(1, sum(d.numel for d in decisions))
        log.info(
            "hipress.shard: %s: %s",
            argument, f"{names} for {share:.1%} of the elements" if names else "native",
        )  # fmt: skip
