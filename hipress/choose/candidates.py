"""Candidates of "auto": codecs whose loss is known to suit, and that can be tried in turns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from casync import strategies
from casync.codec import FLOAT_BYTES, Codec
from casync.predict.timeline import PREDICTED
from hipress.choose import evidence
from hipress.choose.evidence import Finding
from hipress.codecs import (
    compile_codec,
    flat_names,
    gradient_units,
    owed_names,
    strategy_for,
)
from hipress.errors import ConfigError
from hipress.model.params import Param
from hipress.optim.optimizer_kinds import AVERAGED
from hipress.options import Options

__all__ = ["candidates", "expected", "refuses", "within"]

#: those of HARMLESS that lose nothing of gradients of this type only
_OF_TYPE = {"lossless_bf16": torch.bfloat16}


def candidates(
    options: Options, target: str = "cpu", only: Collection[str] | None = None
) -> dict[str, Codec]:
    """The codecs that keep the loss under the optimizer, or stay within `accept_loss`, and suit the
    requested strategy, by key, compiled for a backend. only: restricts the keys. Raises ConfigError
    if there are none."""
    if options.strategy in strategies.list_strategies() and options.strategy not in PREDICTED:
        raise ConfigError(
            f'"auto" cannot predict strategy {options.strategy!r}: name a compressor, or use '
            f"strategy {' or '.join(map(repr, PREDICTED))}"
        )
    suited, refusal, accepted = {}, None, within(options)
    for key, (name, params) in _allowed(options).items():
        if only is not None and key not in only:
            continue
        codec = compile_codec(name, params, target)
        if not _takes_turns(codec, options, drops=key in accepted):
            continue
        try:
            strategy_for(codec, options.strategy)
            suited[key] = codec
        except ConfigError as error:
            refusal = error
    if refusal is not None and not suited:
        raise ConfigError(f'"auto" has no codec for this strategy: {refusal}')
    return suited


def within(options: Options) -> dict[str, Finding]:
    """Specs that `accept_loss` allows, by key: the finding of their largest loss."""
    if options.accept_loss is None or options.optimizer is None:
        return {}
    return evidence.accepted(options.optimizer, options.accept_loss)


def _allowed(options: Options) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Name and given parameters of specs whose loss is known to suit, by key."""
    trusted = {key: (name, params) for key, name, params in evidence.trusted(options.optimizer)}
    return trusted | {key: (each.codec, each.given) for key, each in within(options).items()}


def _takes_turns(codec: Codec, options: Options, *, drops: bool) -> bool:
    """True if the codec can be tried beside other plans: the next plan delivers the gradient that
    its states hold back. drops: True if other states, which begin anew in each turn, may do so."""
    if codec.additive == "float32" or codec.vote:
        return False  # no gain over the native all-reduce, or not predicted
    if options.optimizer in AVERAGED and not owed_names(codec):
        return False  # as for a named codec: see momentum.check
    return drops or flat_names(codec) <= gradient_units(codec).keys()


def refuses(codec: Codec, param: Param) -> str | None:
    """The reason why a candidate does not suit this parameter, or None."""
    wanted = _OF_TYPE.get(codec.name, param.dtype)
    if param.dtype == wanted:
        return None
    return f"{codec.name} would round it: it is not {str(wanted).removeprefix('torch.')}"


def expected(codecs: Mapping[str, Codec], params: Sequence[Param]) -> dict[tuple[str, int], float]:
    """Payload bytes per gradient byte, by codec and parameter, of codecs that send far less than
    their bound; until payloads are measured."""
    return {
        (key, param.index): evidence.HARMLESS[codec.name] / (8 * FLOAT_BYTES)
        for key, codec in codecs.items()
        if not codec.fixed and codec.name in evidence.HARMLESS
        for param in params
    }
