"""Synchronization strategies; the module's name is the strategy's name.

A strategy module has three functions and one constant, described by `Strategy`. To add one, add
a file here.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

from casync.errors import PlanError
from casync.rounds import refuse_rounds

if TYPE_CHECKING:
    from casync.codec import Codec
    from casync.graph.builder import Builder
    from casync.graph.plan import Part

__all__ = ["Strategy", "instead", "list_strategies", "load"]


class Strategy(Protocol):
    """What a module in this package provides."""

    SPREADS: bool  # whether a tensor's chunks are spread over owners (world_size * partitions)

    def refuses(self, codec: Codec | None) -> str | None:
        """Why this strategy cannot carry this codec, with what to use instead; or None."""
        ...

    def build(self, b: Builder, part: Part) -> Iterator[None]:
        """Add the tasks of `part`. Each `yield` lets all other parts do their tasks up to there.

        So the order over all parts is: everybody's first phase, everybody's second, ...
        """
        ...


def list_strategies() -> tuple[str, ...]:
    """Names of all strategies, sorted."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(__path__)))


@cache
def load(name: str) -> Strategy:
    """The strategy module `name`; raises PlanError when there is none."""
    if name not in list_strategies():
        raise PlanError(f"unknown strategy {name!r}; one of {', '.join(list_strategies())}")
    return cast(Strategy, importlib.import_module(f"{__name__}.{name}"))


def instead(codec: Codec | None) -> str:
    """Strategies that carry the codec, as refusals suggest them."""
    if codec is None or codec.rounds:
        return "strategy 'allreduce'"
    if codec.vote:
        return "strategy 'vote'"
    return "strategy 'ps' or 'ring'" if codec.reencodes else "strategy 'allgather'"


def refuse_vote(codec: Codec, strategy: str) -> str:
    """The refusal of strategies that average."""
    return (
        f"payloads of codec {codec.name!r} vote, which strategy {strategy!r} does not count; "
        f"use {instead(codec)}"
    )


def refuse_single_encoder(codec: Codec | None, strategy: str) -> str | None:
    """The refusal of strategies that encode again on the way."""
    if codec is None:
        return f"strategy {strategy!r} needs a codec; without one use {instead(None)}"
    if codec.rounds:
        return refuse_rounds(codec, strategy)
    if codec.vote:
        return refuse_vote(codec, strategy)
    if not codec.reencodes:
        return (
            f"codec {codec.name!r} cannot encode twice (as with states of its own), which strategy "
            f"{strategy!r} needs; "
            f"use {instead(codec)}"
        )
    return None
