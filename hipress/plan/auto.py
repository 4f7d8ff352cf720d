"""compressor="auto": per tensor, the cheapest of no codec and of those that keep the loss.

[Note: never slower]
A prediction is no promise, and on a CPU the codec takes cycles that the backward pass could use,
which waiting for a slow link does not. So codec times are counted CONTENTION times, which keeps
compression off a loopback or a link as fast as memory, and it has to win clearly: by MARGIN of
the tensor's time and of that of all tensors that may be compressed, and by MIN_GAIN_SECONDS.
Otherwise nothing is installed and DDP's own all-reduce remains, untouched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from casync import strategies
from casync.predict.cost import PREDICTED, CodecCost, Costs, Line, predict
from casync.topology import Topology
from hipress.errors import ConfigError
from hipress.model import Param
from hipress.options import Options
from hipress.plan import evidence
from hipress.plan.codecs import compile_codec, strategy_for, ways_for
from hipress.plan.rules import Decision, Plan, excluded, partitions, raw, too_small

if TYPE_CHECKING:
    from casync.codec import Codec

MARGIN = 0.25  # of a tensor's time: probes on a busy machine are off by as much
CONTENTION = 2.0  # the backward pass and the other ranks of this host want the same cores
MIN_GAIN_SECONDS = 1e-3  # seconds a step
ONCE = 0.1  # of a tensor's time: what one quantization instead of two is worth
BATCH = 4 << 20  # bytes: smaller tensors share a message and its latency


def candidates(options: Options) -> dict[str, Codec]:
    """The codecs that keep the loss under the optimizer and that the asked strategy can carry,
    compiled. ConfigError where none is."""
    if options.strategy in strategies.list_strategies() and options.strategy not in PREDICTED:
        raise ConfigError(
            f'"auto" has no formula for strategy {options.strategy!r}: name a compressor, or use '
            f"strategy {' or '.join(map(repr, PREDICTED))}"
        )
    found, refusal = {}, None
    for name in evidence.trusted(options.optimizer):
        codec = compile_codec(name, {})
        if codec.additive == "float32" or codec.rounds or codec.vote:
            continue  # what the native all-reduce sends anyway; what no formula predicts
        try:
            strategy_for(codec, options.strategy)
            found[name] = codec
        except ConfigError as error:
            refusal = error
    if not found:
        raise ConfigError(f'"auto" has no codec for this strategy: {refusal}')
    return found


def auto_plan(
    params: Sequence[Param],
    codecs: Mapping[str, Codec],
    costs: Costs,
    options: Options,
    topology: Topology,
) -> Plan:
    """Decide tensor by tensor; give all of it up when the whole gain is too small."""
    costs, ranks = _contended(costs), topology.world_size
    decisions = tuple(_decide(p, codecs, costs, options, ranks) for p in params)
    gain = sum((d.raw_seconds or 0.0) - (d.seconds or 0.0) for d in decisions if d.codec)
    least = max(MIN_GAIN_SECONDS, MARGIN * sum(d.raw_seconds or 0.0 for d in decisions))
    if gain < least:
        why = f"predicted gain {gain * 1e3:.2f} ms a step, less than {least * 1e3:.3g} ms"
        return Plan(tuple(_give_up(d) for d in decisions), topology, {}, why)
    used = {d.codec for d in decisions}
    why = f"predicted gain {gain * 1e3:.1f} ms a step"
    return Plan(decisions, topology, {k: c for k, c in codecs.items() if k in used}, why)


def _contended(costs: Costs) -> Costs:
    """The costs with slower codecs; see [Note: never slower]."""

    def slower(line: Line) -> Line:
        return Line(CONTENTION * line.latency, CONTENTION * line.per_byte)

    return replace(
        costs,
        codecs={
            name: CodecCost(slower(c.encode), slower(c.decode), c.rate)
            for name, c in costs.codecs.items()
        },
    )


def _decide(
    param: Param, codecs: Mapping[str, Codec], costs: Costs, options: Options, ranks: int
) -> Decision:
    why = excluded(param, options)
    if why is not None:
        return raw(param, why)
    plain = _shared(param, None, 1, ranks, costs)
    rivals = [
        _rival(param, name, codec, costs, strategy, ranks)
        for name, codec in codecs.items()
        if too_small(param, codec, options) is None
        for strategy in ways_for(codec, options.strategy)
    ]
    best = min(rivals, key=_handicapped, default=None)
    seconds = None if best is None else best.seconds
    if best is None or seconds is None:
        return raw(param, "too small", plain)
    best = replace(best, raw_seconds=plain)
    gain = 1 - seconds / plain
    if gain <= MARGIN:
        would = "gain too little" if gain > 0 else "take longer"
        return raw(param, f"{best.codec} would {would}", plain)
    return replace(best, why="gains time")


def _rival(
    param: Param, name: str, codec: Codec, costs: Costs, strategy: str, ranks: int
) -> Decision:
    cut = partitions(param.numel, codec, strategy, ranks)
    chunks = cut * (ranks if strategies.load(strategy).SPREADS else 1)
    seconds = _shared(param, codec, chunks, ranks, costs, strategy)
    return Decision(param.name, param.numel, name, strategy, cut, "", None, seconds)


def _handicapped(rival: Decision) -> float:
    """Seconds; those of strategies whose owners encode the average once more count for more."""
    again = strategies.load(rival.strategy).SPREADS != ""
    return (rival.seconds or 0.0) * (1 + ONCE * again)


def _shared(
    param: Param,
    codec: Codec | None,
    chunks: int,
    ranks: int,
    costs: Costs,
    strategy: str = "allreduce",
) -> float:
    """Predicted seconds; a tensor below BATCH pays its share of a full batch."""
    own = 4.0 * param.numel
    size = max(own, float(BATCH))
    name = None if codec is None else codec.name
    additive = None if codec is None else codec.additive
    whole = predict(size, name, strategy, chunks, ranks, costs, additive)
    return whole * own / size


def _give_up(decision: Decision) -> Decision:
    if decision.codec is None:
        return decision
    return replace(
        decision,
        codec=None,
        strategy="allreduce",
        partitions=1,
        why="the whole gain is too small",
        seconds=decision.raw_seconds,
    )
