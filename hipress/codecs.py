"""From a name and parameters to a codec, and the strategy that suits it. The bridge to compll."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from casync import strategies
from casync.codec import Codec
from casync.memory import Memory
from casync.topology import Topology
from hipress import options as options_
from hipress.errors import ConfigError, closest, unknown
from hipress.options import AUTO, Options

NATIVE = "allreduce"  # strategy of a tensor without codec
CHUNK = 1 << 20  # elements: a bigger tensor is cut, so that encoding overlaps the transfer
REFERENCE, MEAN = "reference", "mean"  # states of derived feedback of differences


def flat_names(codec: Codec) -> set[str]:
    """Names of states with a value per element."""
    return {state.name for state in codec.states if state.per == "element"}


def owed_names(codec: Codec) -> set[str]:
    """Names of residuals: states that are gradient not sent yet."""
    return {state.name for state in codec.states if state.fate == "owed"}


def gradient_units(codec: Codec, *, sums: bool = True) -> dict[str, float]:
    """Undelivered gradient that a value of 1 in a state stands for, by the state's name. sums:
    False leaves out those that the spec's `owed:` names."""
    own = {state.name: state.gradient for state in codec.states if sums and state.gradient}
    return own | dict.fromkeys(owed_names(codec), 1.0)


def state_of(codec: Codec, memory: Memory, n: int, tensors: int = 1) -> dict[str, Any]:
    """Zeroed states of n elements of a number of tensors, in a memory, as codecs take them."""
    arrays, sizes = dict[str, Any](), {"element": n, "tensor": tensors}
    for state in codec.states:
        zeros = memory.zeros(sizes[state.per], getattr(torch, state.dtype))
        arrays[state.name] = memory.array(zeros) if memory.host else zeros
    return arrays


def resolve(options: Options, target: str = "cpu") -> Codec:
    """The codec of `options`, for a backend of compll; ConfigError with the nearest known name."""
    if isinstance(options.compressor, str):
        return compile_codec(options.compressor, options.params, target)
    return options.compressor


def compile_codec(name: str, params: Mapping[str, Any], target: str = "cpu") -> Codec:
    """Compile a spec by name or path, for a backend of compll. Raises ConfigError."""
    import compll
    from compll.runtime import library

    _refuse_arguments(params)
    if not library.is_path(name) and name not in compll.list_specs():
        known, every = (AUTO, *compll.list_specs()), "`compll list` prints all."
        raise unknown("compressor", name, known, library.meant(name), every)
    try:
        _refuse_unknown(name, params)
        # compll does not know casync's Protocol; its codecs have these members.
        return cast("Codec", compll.compile(name, target=target, **params))
    except (compll.CompllError, TypeError, OSError) as error:
        raise ConfigError(f"compressor {name!r}: {error}") from error


@contextmanager
def compilations_told_by(first: bool) -> Iterator[None]:
    """Let only the first rank report compilations of compll: all ranks compile the same kernels."""
    logger = logging.getLogger("compll")

    def reports(record: logging.LogRecord) -> bool:
        return first

    logger.addFilter(reports)
    try:
        yield
    finally:
        logger.removeFilter(reports)


def for_shape(codec: Codec, shape: Sequence[int]) -> tuple[str, Codec]:
    """The codec for a parameter of this shape, and its key in a plan, such as
    `powersgd(columns=650)`."""
    own = codec.for_shape(shape)
    if own.digest == codec.digest:
        return codec.name, codec
    before, now = codec.params, own.params
    settled = ", ".join(f"{k}={v}" for k, v in now.items() if v != before[k])
    return f"{codec.name}({settled})", own


def full_name(codec: Codec) -> str:
    """The codec's name with all parameters, so that `topk` and `topk(ratio=0.01)` compare equal."""
    return call(codec.name, codec.params)


def call(name: str, params: Mapping[str, Any]) -> str:
    """Text such as `topk(ratio=0.01)`."""
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in sorted(params.items()))})"


def _refuse_arguments(params: Mapping[str, Any]) -> None:
    """Raise ConfigError for names of compll.compile's own arguments: no spec can have them."""
    import compll

    own = inspect.signature(compll.compile).parameters.values()
    for name in (each.name for each in own if each.kind is not each.VAR_KEYWORD):
        if name in params:
            raise ConfigError(
                f"{name!r} is no parameter of a spec: hipress compiles specs itself, for where "
                "the model is; leave it out"
            )


def refuse_misspelt(
    caller: str, takes: Collection[str], compressor: object, params: Mapping[str, Any]
) -> None:
    """Raise ConfigError for a misspelt option of a function that takes not all of `wrap`'s, before
    a hint names one of these. takes: its options."""
    import compll

    if not isinstance(compressor, str) or compressor not in compll.list_specs():
        return
    known = _parameters_of(compressor)
    for param in params:
        if param not in known:
            close = closest(param, [*known, *takes])
            hint = f": did you mean {close!r}?" if close else ""
            raise ConfigError(
                f"neither hipress.{caller} nor compressor {compressor!r} takes {param!r}{hint}"
            )


def _parameters_of(name: str) -> list[str]:
    from compll.errors import Problems
    from compll.frontend import feedback
    from compll.runtime import library

    untold = Problems(name)  # dropped: compiling reports them, with all others
    return [each.name for each in feedback.accepted(library.load(name, untold))]


def _refuse_unknown(name: str, params: Mapping[str, Any]) -> None:
    """Raise ConfigError for a misspelt option of `wrap`, taken for a parameter of the spec."""
    known = _parameters_of(name)
    for param in params:
        if param not in known and (message := options_.elsewhere(param)):
            raise ConfigError(message)
        if param not in known and (close := closest(param, [*known, *options_.names()])):
            raise ConfigError(
                f"compressor {name!r} has no parameter {param!r}; did you mean {close!r}?"
            )


def resolve_down(options: Options, codec: Codec, target: str = "cpu") -> Codec | None:
    """The codec of owners, if it differs from that of workers. Raises ConfigError."""
    from casync.raw import Raw

    if options.down is None or options.down == "none":
        return Raw()
    if isinstance(options.down, str):
        if options.down == AUTO:
            return None
        down = compile_codec(options.down, {}, target)
    else:
        down = options.down
    return None if down.digest == codec.digest else down


def strategy_for(codec: Codec, strategy: str = AUTO, down: Codec | None = None) -> str:
    """`strategy` if it can carry the codecs, else ConfigError; for "auto", the suited one.

    With a codec of their own (`down`), owners get payloads, by `ps`. Otherwise additive payloads,
    also of several rounds, use the native collective. Codecs that may encode again go through
    owners (`ps`): two quantizations whatever the world size. Signs that vote go to owners, too
    (`vote`); the rest, sparse codecs, are all-gathered. A stateless codec in groups is not sparse,
    whatever its length: what varies is how it codes its values (`lossless`, `entropy`).
    """
    suited = _suiting_strategy(codec) if down is None else "ps"
    name = strategies.current_name(suited if strategy == AUTO else strategy)
    if name not in strategies.list_strategies():
        raise unknown("strategy", name, (AUTO, *strategies.list_strategies()))
    if strategies.load(name).RESULT in strategies.HALVES:
        raise ConfigError(
            f"strategy {name!r} is half of an average: it leaves ranks with other values; "
            "use strategy 'ps'"
        )
    refusal = strategies.refuses(name, codec, down)
    if refusal is not None:
        raise ConfigError(refusal)
    return name


def ways_for(codec: Codec, strategy: str, topology: Topology) -> tuple[str, ...]:
    """Strategies that the planner compares: `strategy`, or the suited one; instead of `ps` also an
    all-gather, which encodes once, a ring, and a hierarchy if there are nodes."""
    name = strategy_for(codec, strategy)
    if strategy != AUTO or name != "ps":
        return (name,)
    ring = () if codec.states else ("ring",)  # encodes N times, with feedback or without
    return (name, "exchange", *ring, *(["hierarchical"] * topology.nested))


def partitions(numel: int, codec: Codec, strategy: str, world_size: int) -> int:
    """Partitions of a tensor: chunks of about CHUNK elements.

    A codec without groups is not cut: each chunk would have a scale, or a selection, of its own. A
    strategy that spreads over owners cuts a partition into world_size chunks anyway.
    """
    if codec.align == 1 and codec.additive is None:
        return 1
    chunks = max(1, math.ceil(numel / CHUNK))
    if strategies.load(strategy).SPREADS in ("", "tensors"):
        return chunks
    return max(1, math.ceil(chunks / world_size))


def _suiting_strategy(codec: Codec) -> str:
    if codec.rounds or (codec.additive is not None and codec.fixed):
        return "allreduce"
    if codec.vote:
        return "vote"
    dense = codec.fixed or (codec.align > 1 and not codec.states)
    return "ps" if codec.reencodes and dense else "exchange"
