"""Codecs of a sharded model's collectives, by parameter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from casync.strategies import refuses
from hipress.errors import ConfigError
from hipress.model.devices import Placement
from hipress.model.params import Param
from hipress.options import Options
from hipress.plan import rules
from hipress.plan.plan import Decision, fixed, raw

if TYPE_CHECKING:
    from casync.codec import Codec

__all__ = ["PULL", "PUSH", "Compressor", "Way", "ways_of"]

Compressor: TypeAlias = "str | os.PathLike[str] | Codec | Mapping[str, Any] | None"
#: strategies of casync: sums end at the owners of rows; owners' rows go to all
PUSH, PULL = "push", "pull"


@dataclass(frozen=True)
class Way:
    """A collective: for each parameter a decision, and its codec (None: uncompressed)."""

    decisions: tuple[Decision, ...]
    codecs: tuple[Codec | None, ...]


def ways_of(
    asked: Mapping[str, tuple[str, Compressor]],
    params: Sequence[Param],
    options: Options,
    placement: Placement,
    ranks: int,
) -> dict[str, Way]:
    """The collectives by strategy, without those that stay native.

    asked: argument's name and value by strategy. Raises ConfigError for codecs that cannot carry
    rows, or would lose what they keep for the next step.
    """
    ruled = rules.compiled(options, placement.target)
    assigned = rules.assign(ruled, params)
    ways: dict[str, Way] = {}
    for strategy, (argument, wanted) in asked.items():
        try:
            codec = rules.codec_of(wanted, placement.target)
        except ConfigError as error:
            raise ConfigError(f"{argument}: {error}") from error
        if codec is None:
            continue
        _refuse(codec, strategy, argument, placement)
        for rule in ruled:
            if rule.codec is not None:
                _refuse(rule.codec, strategy, rule.why, placement)
        chosen = [
            _decide(p, assigned.get(p.index), codec, strategy, options, ranks) for p in params
        ]
        ways[strategy] = Way(*(tuple(each) for each in zip(*chosen, strict=True)))
    return ways


def _decide(
    param: Param, rule: rules.Rule | None, codec: Codec, strategy: str, options: Options, ranks: int
) -> tuple[Decision, Codec | None]:
    wanted, why = (codec, "asked for") if rule is None else (rule.codec, rule.why)
    if wanted is None:
        return raw(param, why), None
    decision = fixed(param, wanted.name, wanted, strategy, why, options, ranks)
    return decision, None if decision.codec is None else wanted


def _refuse(codec: Codec, strategy: str, argument: str, placement: Placement) -> None:
    """Raise ConfigError for a codec that cannot carry rows of a sharded model."""
    placement.refuse(codec, strategy)
    if codec.for_shape((64, 64)).digest != codec.digest or codec.rounds:
        why = "works on a matrix or in rounds, and a rank's row of a sharded model is flat"
    elif codec.states:
        kept = ", ".join(state.name for state in codec.states)
        why = (
            f"keeps states ({kept}), which for a sharded model would take the memory of unsharded "
            "gradients on each rank"
        )
    elif refuses(strategy, codec) is not None:
        why = "has payloads that vote or are differences, which no owner can add up"
    else:
        return
    raise ConfigError(
        f"{argument}: compressor {codec.name!r} {why}; use one without states, such as "
        "'int4_group' or 'int8_group'"
    )
