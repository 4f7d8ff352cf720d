"""The collectives of a sharded model: their strategies, and codecs by parameter."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from casync.codec import Codec
from casync.rounds import refuse_workers
from casync.strategies import refuses
from casync.topology import Topology
from hipress.choose import rules
from hipress.choose.plan import Decision, fixed, raw
from hipress.codecs import strategy_for
from hipress.errors import ConfigError
from hipress.model.devices import Placement
from hipress.model.params import Param
from hipress.options import Options

__all__ = [
    "ALL_GATHER",
    "REDUCE_SCATTER",
    "REPLICAS",
    "Collective",
    "Compressor",
    "collectives_of",
]

Compressor: TypeAlias = "str | os.PathLike[str] | Codec | Mapping[str, Any] | None"
#: arguments of hipress.shard
REDUCE_SCATTER, ALL_GATHER, REPLICAS = "reduce_scatter", "all_gather", "replicas"
#: strategies of casync: sums end at the owners of rows; owners' rows go to all
_HALVES = {REDUCE_SCATTER: "push", ALL_GATHER: "pull"}


@dataclass(frozen=True)
class Collective:
    """For each parameter a decision, and its codec (None: uncompressed)."""

    strategy: str
    decisions: tuple[Decision, ...]
    codecs: tuple[Codec | None, ...]


def collectives_of(
    compressors: Mapping[str, Compressor],
    params: Sequence[Param],
    options: Options,
    placement: Placement,
    nodes: Mapping[str, Topology],
    frozen: Collection[int] = (),
) -> dict[str, Collective]:
    """The collectives by argument of `hipress.shard`, without those that stay native.

    compressors: values of these arguments. nodes: those of each one's ranks. frozen: indices of
    parameters that need no gradient: gathers leave their bits, which may be packed numbers of fewer
    bits, unless a rule names them. Raises ConfigError for
    codecs that cannot carry rows, or would lose what they keep for the next step.
    """
    ruled = rules.compiled(options, placement.target)
    assigned = rules.assign(ruled, params)
    collectives: dict[str, Collective] = {}
    for argument, wanted in compressors.items():
        try:
            codec = rules.codec_of(wanted, placement.target)
        except ConfigError as error:
            raise ConfigError(f"{argument}: {error}") from error
        if codec is None:
            continue
        ranks, strategy = nodes[argument].world_size, _strategy(argument, codec, nodes[argument])
        others = [(rule.why, rule.codec) for rule in ruled if rule.codec is not None]
        for why, each in ((argument, codec), *others):
            _refuse(each, argument, why, strategy, ranks)
            placement.refuse(each)
        kept = frozen if argument == ALL_GATHER else ()
        chosen = [
            _decide(param, assigned.get(param.index), codec, strategy, options, ranks)
            if param.index in assigned or param.index not in kept
            else (raw(param, "frozen; a rule may name it"), None)
            for param in params
        ]
        # what is not compressed travels in the collective, too
        decisions = tuple(replace(decision, strategy=strategy) for decision, _ in chosen)
        collectives[argument] = Collective(strategy, decisions, tuple(each for _, each in chosen))
    return collectives


def _strategy(argument: str, codec: Codec, nodes: Topology) -> str:
    """Shards on nodes of several ranks travel uncompressed inside them, and between them once for
    each node; a flat exchange would send them to each of a node's ranks."""
    half = _HALVES.get(argument)
    if half is None:
        return strategy_for(codec)
    return f"hierarchical_{half}" if nodes.nested else half


def _decide(
    param: Param, rule: rules.Rule | None, codec: Codec, strategy: str, options: Options, ranks: int
) -> tuple[Decision, Codec | None]:
    wanted, why = (codec, "asked for") if rule is None else (rule.codec, rule.why)
    if wanted is None:
        return raw(param, why), None
    decision = fixed(param, wanted.name, wanted, strategy, why, options, ranks)
    return decision, None if decision.codec is None else wanted


def _refuse(codec: Codec, argument: str, why: str, strategy: str, ranks: int) -> None:
    """Raise ConfigError for a codec that cannot carry rows of a sharded model. why: the argument or
    rule that names it."""
    if codec.for_shape((64, 64)).digest != codec.digest or codec.rounds:
        reason = "works on a matrix or in rounds, and a rank's row of a sharded model is flat"
    elif codec.vote or codec.difference is not None:
        reason = "has payloads that vote or are differences, which shards do not add up"
    elif codec.states and argument != REPLICAS:
        names = ", ".join(state.name for state in codec.states)
        reason = (
            f"keeps states ({names}), which for {argument} would take the memory of unsharded "
            "gradients on each rank"
        )
    elif refusal := refuses(strategy, codec) or refuse_workers(codec, ranks):
        raise ConfigError(f"{why}: {refusal}")
    else:
        return
    raise ConfigError(
        f"{why}: compressor {codec.name!r} {reason}; use one without states, such as "
        "'int4_group' or 'int8_group'"
    )
