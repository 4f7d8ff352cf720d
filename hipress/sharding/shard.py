"""hipress.shard: the collectives of FSDP2, compressed."""

from __future__ import annotations

import inspect
import logging
import operator
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, SupportsIndex

from torch import nn

from casync.raw import RAW
from hipress import compat
from hipress import options as options_
from hipress.arguments import group_of
from hipress.engine.exchange import Exchange
from hipress.engine.failures import Failures
from hipress.errors import ConfigError, StateError, unknown
from hipress.model.devices import Placement, backends_of, place
from hipress.model.params import Param
from hipress.options import AUTO, Options
from hipress.plan.codecs import compiling_told_by, described
from hipress.plan.plan import check_patterns
from hipress.ranks import coordinator as coordinators
from hipress.ranks import job
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.link import group_timeout
from hipress.session import versions
from hipress.sharding.comms import Gather, Link, Scatter, Traffic
from hipress.sharding.fsdp import Group, groups_of, params_of
from hipress.sharding.shard_report import ShardReport
from hipress.sharding.ways import PULL, PUSH, Compressor, Way, ways_of

__all__ = ["Sharding", "shard", "sharding_of"]

log = logging.getLogger("hipress")
FORMAT = 1
_REFUSED = {
    "process_group": "the ranks are those of the mesh of fully_shard",
    "ddp_kwargs": "FSDP2 has no DistributedDataParallel",
    "scope": "FSDP2 has no buckets; each parameter is compressed by itself",
    "strategy": "a sum goes to the rank that owns the shard, and its values to all",
    "down": "all_gather is the compressor of what ranks receive",
    "compressor": "name reduce_scatter, of gradients, and all_gather, of weights",
    "optimizer": "shards of momentum are not averaged",
    "policy": "its compressors stay the same",
    "verify": "no two ranks hold the same gradients",
}


def shard(
    model: nn.Module,
    *,
    reduce_scatter: Compressor = "int4_group",
    all_gather: Compressor = "int8_group",
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
        rules: other compressors for some parameters, both ways: see `hipress.options.Options`.
        exclude: patterns of parameters that travel uncompressed, both ways; by default those of at
            most one dimension, such as biases and norms.
        min_size: as for `wrap`, of a rank's shard.
        in_flight: reduce-scatters that may be under way while the backward pass goes on. Each keeps
            the gradients of a module of `fully_shard` (on a GPU from torch 2.13 on; before: 1).
        seed, timeout, topology, transport, checksum: as for `wrap`.

    Raises ConfigError, ConfigMismatch, AgreementTimeout and RankLost as `wrap` does; a forward or
    backward pass raises RankLost, AgreementTimeout or SyncError, which name rank, peer and task.
    """
    group_of(None)  # torch.distributed is initialized
    model = _model(model)
    groups = groups_of(model)
    ranks = groups[0].ranks
    with coordinators.failures_told(ranks):
        _refuse(others)
        options = options_.make(
            "none", rules=rules, exclude=exclude, min_size=min_size, seed=seed, topology=topology,
            transport=transport, checksum=checksum,
            timeout=group_timeout(ranks) if timeout is None else timeout,
        )  # fmt: skip
        buffers = _buffers(in_flight)
        params = params_of(model, groups)
        check_patterns(params, options)
        placement = _placement(params, options, groups)
        asked = {PUSH: ("reduce_scatter", reduce_scatter), PULL: ("all_gather", all_gather)}
    coordinator = coordinators.coordinator(ranks, options.timeout)
    with coordinator.failures_told(), compiling_told_by(coordinator.rank == 0):
        plan = ways_of(asked, params, options, placement, ranks.size())
    coordinator.require_equal(_facts(options, params, plan, placement))
    sharding = Sharding(coordinator, options, plan)
    if ranks.size() > 1:
        with coordinator.failures_told():
            sharding.connect(groups, placement, buffers)
    SHARDINGS[model] = sharding
    weakref.finalize(model, sharding.close)
    _tell(sharding)
    return model


class Sharding:
    """The compressed collectives of a model."""

    def __init__(self, coordinator: Coordinator, options: Options, plan: Mapping[str, Way]) -> None:
        """plan: by strategy, PUSH for gradients and PULL for weights; native ones are left out."""
        self.coordinator, self.options, self.plan = coordinator, options, plan
        self.link: Link | None = None  # None with one rank
        self._groups: weakref.WeakSet[Group] = weakref.WeakSet()  # which refer to the model
        self._sent = Traffic()
        self._passes = 0  # of a loaded state, if there is no link

    def connect(self, groups: Sequence[Group], placement: Placement, buffers: int) -> None:
        """Connect, and take the place of FSDP's collectives where something is compressed."""
        exchange = Exchange(
            "shards", self.options, self.coordinator,
            placement=placement, memory=placement.memory(),
        )  # fmt: skip
        job.watch()
        self.link = link = Link(exchange, Failures(self.coordinator, self.options.timeout), buffers)
        start = 0
        for number, group in enumerate(groups):
            mine = slice(start, start + len(group.lengths))
            start = mine.stop
            keys = {
                way: [RAW if codec is None else exchange.add(codec) for codec in each.codecs[mine]]
                for way, each in self.plan.items()
            }
            common = link, number, len(groups), self._sent
            gather = scatter = None
            if any(key != RAW for key in keys.get(PULL, ())):
                gather = Gather(group, keys[PULL], *common)
                gather.native = group.before[0]
            if any(key != RAW for key in keys.get(PUSH, ())):
                scatter = Scatter(group, keys[PUSH], *common)
            group.install(gather, scatter, buffers)
            self._groups.add(group)

    @property
    def passes(self) -> int:
        """Backward passes so far that sent gradients."""
        return self._passes if self.link is None else self.link.passes

    def report(self) -> ShardReport:
        """Choices, bytes and times so far."""
        link, rank = self.link, self.coordinator.rank
        counters = None if link is None else link.exchange.executor.counters
        return ShardReport(
            rank=rank,
            world_size=len(self.coordinator.ranks),
            installed=link is not None,
            passes=self.passes,
            gradients=self.plan[PUSH].decisions if PUSH in self.plan else (),
            weights=self.plan[PULL].decisions if PULL in self.plan else (),
            native_bytes=self._sent.gathered + self._sent.reduced,
            bytes_sent=0 if counters is None else counters.bytes_sent,
            encode_seconds=0.0 if counters is None else counters.encode_seconds,
            decode_seconds=0.0 if counters is None else counters.decode_seconds,
            wait_seconds=0.0 if link is None else link.waited,
        )

    def state_dict(self) -> dict[str, Any]:
        """The number by which stochastic codecs draw: equal on all ranks."""
        self._refuse_failed()
        return {"format": FORMAT, "passes": self.passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of `state_dict`. Raises StateError for any other."""
        self._refuse_failed()
        passes = state.get("passes")
        if state.get("format") != FORMAT or type(passes) is not int or passes < 0:
            raise StateError(
                "this is no state of a model of hipress.shard: pass hipress.state_dict(model) of "
                "one"
            )
        self.coordinator.require_equal({"backward passes of the state to load": passes})
        if self.link is None:
            self._passes = passes
        else:
            self.link.passes = passes

    def detach(self) -> None:
        """Give FSDP its own collectives back, and end threads and connections."""
        for group in self._groups:
            group.restore()
        self.close()
        for model in [model for model, each in SHARDINGS.items() if each is self]:
            del SHARDINGS[model]

    def close(self) -> None:
        """End threads and connections. May repeat."""
        if self.link is not None:
            self.link.exchange.close()

    def _refuse_failed(self) -> None:
        if self.link is not None and self.link.failures.first is not None:
            raise StateError(f"rank {self.coordinator.rank}: {self.link.failures.first}")


_OPTIONS = tuple(name for name in inspect.signature(shard).parameters if name != "others")
SHARDINGS: weakref.WeakKeyDictionary[nn.Module, Sharding] = weakref.WeakKeyDictionary()


def sharding_of(model: object) -> Sharding | None:
    """The collectives of a model of `hipress.shard`; None for any other object."""
    if not isinstance(model, nn.Module) or not SHARDINGS:
        return None
    return SHARDINGS.get(compat.uncompiled(model))


def _model(given: object) -> nn.Module:
    """The model, without torch.compile's wrapper; ConfigError for anything else, or again."""
    if not isinstance(given, nn.Module):
        raise ConfigError(f"the model must be a torch.nn.Module, got {given!r}")
    model = compat.uncompiled(given)
    parts = {*model.modules()}
    for other in [each for reference in SHARDINGS.keyrefs() if (each := reference()) is not None]:
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


def _buffers(in_flight: Any) -> int:
    try:
        buffers = 0 if isinstance(in_flight, bool) else operator.index(in_flight)
    except TypeError:
        buffers = 0
    if buffers < 1:
        raise ConfigError(f"in_flight is a positive number of reduce-scatters, not {in_flight!r}")
    return buffers


def _placement(params: Sequence[Param], options: Options, groups: Sequence[Group]) -> Placement:
    where = [(param.name, param.device) for param in params]
    placement = place(where, options.transport, backends_of(groups[0].ranks))
    if placement.copies:
        raise ConfigError(
            "transport='host' copies whole buckets, which FSDP2 has not: pass transport=\"staged\""
        )
    placement.refuse_other_current()
    return placement


def _facts(
    options: Options, params: Sequence[Param], ways: Mapping[str, Way], placement: Placement
) -> dict[str, Any]:
    """All values that must be equal on all ranks."""
    used = [each for way in ways.values() for each in way.codecs if each is not None]
    return {
        "called": "hipress.shard",
        "parameters of shards": [str(param) for param in params],
        **{f"{way}": [[d.name, d.codec] for d in each.decisions] for way, each in ways.items()},
        "digests": {f"compressor {described(each)!r}": each.digest for each in used},
        "seed": options.seed,
        "checksum": options.checksum,
        "transport": placement.transport,
        "versions": versions(),
    }


def _tell(sharding: Sharding) -> None:
    """Log the plan on the first rank."""
    if sharding.coordinator.rank != 0:
        return
    if sharding.link is None:
        log.info("hipress.shard: one rank holds all shards, so nothing is installed")
        return
    for way, name in ((PUSH, "gradients"), (PULL, "weights")):
        decisions = sharding.plan[way].decisions if way in sharding.plan else ()
        done = sum(d.numel for d in decisions if d.codec is not None)
        names = " and ".join(sorted({d.codec for d in decisions if d.codec is not None}))
        every = sum(d.numel for d in decisions)
        told = f"{names} for {done / max(1, every):.1%} of the elements" if names else "native"
        log.info("hipress.shard: %s: %s", name, told)
    nodes = sharding.link.exchange.topology
    if nodes.nested:
        log.warning(
            "hipress.shard: the shards are spread over %d nodes of up to %d ranks, and each rank "
            "sends its own part to every other node: shard within the nodes, if memory allows",
            len(nodes.nodes), nodes.largest,
        )  # fmt: skip
