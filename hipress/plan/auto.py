"""compressor="auto": plans of the codecs that keep the loss, the one predicted fastest first.

[Note: never slower]
A prediction is no promise: on a CPU the codec takes cycles that the backward pass could use, which
waiting for a slow link does not. So predictions only rank, and what they rank first is tried on
real steps against DDP's own all-reduce: see [Note: turns] in trial.py. Where all codecs are
predicted to be FAR slower than that, or it to take less than MIN_GAIN_SECONDS, nothing is tried
nor installed, and DDP remains untouched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from casync import strategies
from casync.predict.cost import PREDICTED, Costs, predict
from casync.topology import Topology
from hipress.errors import ConfigError
from hipress.model import Param
from hipress.options import Options
from hipress.plan import evidence
from hipress.plan.codecs import RESIDUAL, compile_codec, flat_names, strategy_for, ways_for
from hipress.plan.overrides import NO_RULES, Overrides
from hipress.plan.rules import Decision, Plan, excluded, partitions, raw, too_small

if TYPE_CHECKING:
    from casync.codec import Codec

TRIED = 3  # plans, besides the native all-reduce
FAR = 2.0  # times the fastest prediction: plans above are not tried
MIN_GAIN_SECONDS = 1e-3  # seconds a step that the native all-reduce takes: nothing to gain below
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
        if not flat_names(codec) <= {RESIDUAL}:
            continue  # a momentum, or a sum kept by hand, could not be handed on to another codec
        try:
            strategy_for(codec, options.strategy)
            found[name] = codec
        except ConfigError as error:
            refusal = error
    if not found:
        raise ConfigError(f'"auto" has no codec for this strategy: {refusal}')
    return found


@dataclass(frozen=True)
class Search:
    """What plans are made of."""

    params: Sequence[Param]
    codecs: Mapping[str, Codec]
    options: Options
    topology: Topology
    overrides: Overrides = NO_RULES  # what is decided already

    def plans(self, costs: Costs) -> tuple[Plan, ...]:
        """Plans worth a try, by predicted time, and then that of the native all-reduce; it alone
        where no other is."""
        priced: dict[int, _Choices] = {}  # by length: a large model has many of few
        choices = [self._choices(param, costs, priced) for param in self.params]
        native = self._plan(choices, ())
        if native.seconds < MIN_GAIN_SECONDS:
            why = f"it is predicted to take {native.seconds * 1e3:.2f} ms a step"
            return (replace(native, why=why),)
        ways = dict.fromkeys(way for each in choices for way in each.rivals)
        made = [self._plan(choices, some) for some in (*([way] for way in ways), ways)]
        distinct = {_what(plan): plan for plan in made if _what(plan) != _what(native)}
        best = min([native.seconds, *(plan.seconds for plan in distinct.values())])
        near = [plan for plan in distinct.values() if plan.seconds <= FAR * best]
        tried = sorted(near, key=_weighed)[:TRIED]
        why = f"predicted to take {native.seconds * 1e3:.3g} ms a step"
        if not tried:
            why += ", and no compressor nearly as little"
        told = [replace(plan, why=_told(plan, native)) for plan in tried]
        return (*told, replace(native, why=why))

    def choices(self, param: Param, costs: Costs) -> list[Decision]:
        """All that may happen to a parameter, the fastest first."""
        made = self._choices(param, costs, {})
        return sorted([*made.rivals.values(), made.native], key=_handicapped)

    def _choices(self, param: Param, costs: Costs, priced: dict[int, _Choices]) -> _Choices:
        if param.index in self.overrides.decisions:
            return _Choices(self.overrides.decisions[param.index], {})
        why = excluded(param, self.options)
        if why is not None:
            return _Choices(raw(param, why), {})
        if param.numel not in priced:
            priced[param.numel] = self._price(param, costs)
        return priced[param.numel]

    def _price(self, param: Param, costs: Costs) -> _Choices:
        plain = _shared(param, None, 1, self.topology, costs)
        return _Choices(
            raw(param, "", plain),
            {
                (name, way): self._rival(param, name, way, costs, plain)
                for name, codec in self.codecs.items()
                if too_small(param, codec, self.options) is None
                for way in ways_for(codec, self.options.strategy, self.topology)
            },
        )

    def _rival(self, param: Param, name: str, way: str, costs: Costs, plain: float) -> Decision:
        codec = self.codecs[name]
        owners = len(self.topology.turns(strategies.load(way).SPREADS)) or 1
        cut = partitions(param.numel, codec, way, owners)
        seconds = _shared(param, codec, cut * owners, self.topology, costs, way)
        return Decision(param.name, param.numel, name, way, cut, "gains time", plain, seconds)

    def _plan(self, choices: Sequence[_Choices], ways: Collection[_Way]) -> Plan:
        """For each parameter the fastest of these ways and of no codec."""
        best = {each: each.cheapest(ways) for each in dict.fromkeys(choices)}
        decisions = tuple(
            replace(best[each], name=param.name)
            for param, each in zip(self.params, choices, strict=True)
        )
        used = {d.codec for d in decisions}
        codecs = {key: codec for key, codec in self.codecs.items() if key in used}
        return Plan(decisions, self.topology, {**codecs, **self.overrides.codecs})


def _what(plan: Plan) -> tuple[tuple[str | None, str], ...]:
    """In what plans differ that are tried."""
    return tuple((d.codec, d.strategy) for d in plan.decisions)


def _told(plan: Plan, native: Plan) -> str:
    own, other = plan.seconds * 1e3, native.seconds * 1e3
    return f"predicted to take {own:.3g} ms a step, DDP's own all-reduce {other:.3g} ms"


def _weighed(plan: Plan) -> float:
    return sum(map(_handicapped, plan.decisions))


def _handicapped(decision: Decision) -> float:
    """Seconds; those of strategies whose owners encode the average once more count for more."""
    again = strategies.load(decision.strategy).SPREADS != ""
    return (decision.seconds or 0.0) * (1 + ONCE * again)


_Way = tuple[str, str]  # codec and strategy


@dataclass(frozen=True, eq=False)
class _Choices:
    """What may happen to parameters of a length."""

    native: Decision
    rivals: Mapping[_Way, Decision]

    def cheapest(self, ways: Collection[_Way]) -> Decision:
        """The fastest of these and of no codec."""
        if self.native.seconds is None or not ways:
            return self.native
        rivals = [self.rivals[way] for way in ways if way in self.rivals]
        best = min(rivals, key=_handicapped, default=None)
        if best is None or best.seconds is None:
            return replace(self.native, why="too small")
        if best.seconds >= self.native.seconds:
            return replace(self.native, why=f"{best.codec} would take longer")
        return best


def _shared(
    param: Param,
    codec: Codec | None,
    chunks: int,
    topology: Topology,
    costs: Costs,
    strategy: str = "allreduce",
) -> float:
    """Predicted seconds; a tensor below BATCH pays its share of a full batch."""
    own = 4.0 * param.numel
    size = max(own, float(BATCH))
    name = None if codec is None else codec.name
    additive = None if codec is None else codec.additive
    whole = predict(size, name, strategy, chunks, topology, costs, additive)
    return whole * own / size
