"""Synchronization strategies; the module's name is the strategy's name.

A strategy module has the members of `Strategy`. To add one, add a
file here. A name may have an argument after a colon, as in `gossip:torus`: its module reads the
argument from `Part.strategy`. `push`, `pull` and `ps` can run over nodes of ranks, by names of
their own; to all other names every rank is a node.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from functools import cache
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, cast

from casync.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from casync.building.builder import Builder
    from casync.building.parts import Part
    from casync.codec import Codec
    from casync.stages import Item, Setting, Stage
    from casync.topology import Spread, Topology

__all__ = [
    "HALVES",
    "Result",
    "Strategy",
    "current_name",
    "encodes_shares",
    "groups",
    "instead",
    "list_strategies",
    "load",
    "over_nodes",
    "owns_mean",
    "refuses",
]

#: contents of the buckets in the end: the mean of all; the sign of the sum (codecs that vote); the
#: sum at a part's owner, and elsewhere as before, or over nodes sums of some ranks; the owner's
#: values; on each rank as before, while copies of neighbours' values follow them
Result: TypeAlias = Literal["mean", "majority", "sum at owner", "owner's", "own"]
#: results of half an average, for callers that need no more
HALVES: tuple[Result, ...] = ("sum at owner", "owner's")

_RENAMED = {"allgather": "exchange"}  # old name -> name
#: name -> the strategy that it runs over the nodes of a topology
_OVER_NODES = {"hierarchical": "ps", "hierarchical_push": "push", "hierarchical_pull": "pull"}


class Strategy(Protocol):
    """Members of a strategy module."""

    SPREADS: Spread  # the owners over which a tensor's chunks are spread
    #: True if owners encode the mean, and may do so with a codec of their own (`down`)
    TWO_WAY: bool
    SHARES: bool  # True if workers encode 1/world_size of their values
    RESULT: Result  # what buckets hold in the end; tests prove it

    def refuses(self, codec: Codec, down: Codec, name: str) -> str | None:
        """The reason why this strategy cannot carry these codecs, with an alternative; or None.

        down: codec of the owners; the same as `codec` unless the strategy is TWO_WAY. name: of the
        strategy, which tells if it runs over nodes.
        """
        ...

    def build(self, b: Builder, part: Part, topology: Topology) -> None:
        """Add the tasks of `part`: see [Note: phases] and [Note: own slice] in builder.py.
        topology: as the strategy sees it, see `groups`."""
        ...

    #: stages of a rank, for predictions: see casync/stages.py; None if it is not predicted
    stages: Callable[[Item, Setting], tuple[Stage, ...]] | None


def list_strategies() -> tuple[str, ...]:
    """Names of all strategies, sorted."""
    return tuple(sorted((*_OVER_NODES, *(m.name for m in pkgutil.iter_modules(__path__)))))


def over_nodes(name: str) -> bool:
    """True if the strategy of this name runs over the nodes of a topology."""
    return name in _OVER_NODES


def groups(name: str, topology: Topology) -> Topology:
    """The topology as the strategy sees it: every rank is a node, unless it runs over nodes."""
    return topology if over_nodes(name) else topology.flattened


def current_name(name: str) -> str:
    """The name of a strategy that was renamed, with a warning; otherwise the same name."""
    if name not in _RENAMED:
        return name
    warnings.warn(
        f"strategy {name!r} is called {_RENAMED[name]!r} now", FutureWarning, stacklevel=1
    )
    return _RENAMED[name]


@cache
def load(name: str) -> Strategy:
    """The strategy module of a name; raises PlanError when there is none."""
    module, *_ = current_name(name).split(":")
    if module not in list_strategies():
        raise PlanError(f"unknown strategy {name!r}; one of {', '.join(list_strategies())}")
    module = _OVER_NODES.get(module, module)
    return cast(Strategy, importlib.import_module(f"{__name__}.{module}"))


def refuses(name: str, codec: Codec, down: Codec | None = None) -> str | None:
    """The reason why the strategy cannot carry the codec, or None. down: the owners' codec."""
    strategy = load(name)
    if codec.difference is not None and strategy is not load("exchange"):
        return (
            f"codec {codec.name!r} sends differences from references, so every rank must decode "
            f"every payload, which strategy {name!r} does not do; use {instead(codec)}"
        )
    if down is not None and not strategy.TWO_WAY:
        two_way = " or ".join(repr(s) for s in list_strategies() if load(s).TWO_WAY)
        return (
            f"strategy {name!r} has one direction, so it cannot send {down.name!r} down; "
            f"leave down out, or use strategy {two_way}"
        )
    return strategy.refuses(codec, codec if down is None else down, name)


def owns_mean(part: Part, rank: int) -> bool:
    """True if the rank encodes the mean of all ranks' values of `part`, as an aggregator."""
    return load(part.strategy).TWO_WAY and rank == part.owner


def encodes_shares(name: str, codec: Codec) -> bool:
    """True if workers encode 1/world_size of their values. Codecs with rounds divide by themselves,
    and feed back what is missing of a rank's own values."""
    return load(name).SHARES and not codec.rounds


def instead(codec: Codec) -> str:
    """Text for refusals: strategies that carry the codec."""
    if codec.rounds:
        return "strategy 'allreduce'"
    if codec.vote:
        return "strategy 'vote'"
    if not codec.reencodes:
        return "strategy 'exchange'"
    return "strategy 'ps'" if codec.additive == "float16" else "strategy 'ps' or 'ring'"


def refuse_partial_sums(codec: Codec, down: Codec, strategy: str) -> str | None:
    """The reason why strategies that encode sums of some ranks, before the average of all, cannot
    carry `codec`, and `down` for the average; or None."""
    return refuse_single_encoder(codec, down, strategy) or refuse_overflow(codec, strategy)


def refuse_overflow(codec: Codec, strategy: str) -> str | None:
    """The reason why strategies that encode sums of some ranks cannot carry float16, or None."""
    if codec.additive != "float16":
        return None
    return (
        f"codec {codec.name!r} sends float16, in which the partial sums of strategy "
        f"{strategy!r} overflow where the mean would not; "
        f"use strategy {_OVER_NODES.get(strategy, 'ps')!r}, or bfloat16"
    )


def refuse_rounds(codec: Codec, strategy: str) -> str | None:
    """The reason why strategies other than allreduce cannot carry a codec with rounds, or None."""
    if not codec.rounds:
        return None
    return (
        f"codec {codec.name!r} aggregates in rounds, which strategy {strategy!r} cannot; "
        "use strategy 'allreduce'"
    )


def refuse_special(codec: Codec, strategy: str) -> str | None:
    """The reason why strategies that average decoded payloads cannot carry a codec with rounds, or
    one that votes; or None."""
    return refuse_rounds(codec, strategy) or (refuse_vote(codec, strategy) if codec.vote else None)


def refuse_vote(codec: Codec, strategy: str) -> str:
    """The reason why strategies that average cannot carry a codec that votes."""
    return (
        f"payloads of codec {codec.name!r} vote, which strategy {strategy!r} does not count; "
        f"use {instead(codec)}"
    )


def refuse_single_encoder(codec: Codec, again: Codec, strategy: str) -> str | None:
    """The reason why strategies that encode again on the way, with codec `again`, cannot carry
    `codec`; or None."""
    if refusal := refuse_special(codec, strategy) or refuse_special(again, strategy):
        return refusal
    if not again.reencodes:
        return (
            f"codec {again.name!r} cannot encode twice (as with states of its own), which strategy "
            f"{strategy!r} needs; "
            f"use {instead(again)}"
        )
    return None
