"""compressor="auto": plans of codecs that keep the loss, the one predicted fastest first.

[Note: never slower] A prediction is no promise. So predictions only rank plans, and the best are
tried in real steps against DDP's own all-reduce: see [Note: turns] in trial.py. If even codecs
without any cost would not make a step faster by MIN_GAIN_SECONDS, nothing is tried or installed,
and DDP is untouched.

[Note: formula] A plan has one codec and strategy for all tensors that these suit, and its step is
predicted by a formula: transfers of all buckets but the last hide behind the backward pass, or are
as slow as the busiest lane; the last bucket's stages follow. On a CPU, codecs and transfers take a
share of the pass's core. Choices by tensor were searched by a simulated timeline, and gained
nothing: docs/how/planner.md has the measurement.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from casync import strategies
from casync.codec import FLOAT_BYTES, Codec
from casync.cost import FREE, CodecCost, Costs
from casync.graph.shares import LEAST_BYTES, SMALL_BYTES
from casync.predict import timeline
from casync.rounds import refuse_workers
from casync.stages import WORK, Item, Stage
from casync.topology import Topology
from hipress.choose import evidence
from hipress.choose.evidence import Finding
from hipress.choose.plan import (
    HOSTED,
    Decision,
    Plan,
    excluded,
    own_codec,
    raw,
    too_large,
    unsuited,
)
from hipress.choose.rules import NO_RULES, Overrides
from hipress.choose.workload import Workload, estimate
from hipress.codecs import (
    compile_codec,
    flat_names,
    gradient_units,
    owed_names,
    partitions,
    strategy_for,
    ways_for,
)
from hipress.errors import ConfigError
from hipress.model.params import Param
from hipress.optim.optimizer_kinds import AVERAGED
from hipress.options import Options

__all__ = ["least_share"]

_SAMPLE = 1 << 20  # elements
_POST = 1e-5  # seconds of the engine for a message, without the transport
TRIED = 3  # plans, besides the native all-reduce
ALIKE = 2  # of these, at most, with the same codec
FAR = 1.25  # largest predicted step over the fastest one: predictions may be that far off
SHARE = 0.1  # least share of elements that a plan compresses
ONCE = 0.1  # worth of one quantization instead of two, as a share of a step's waiting time
MIN_GAIN_SECONDS = 1e-3  # least gain in seconds per step
MANY = 1 << 20  # elements of a payload whose bound is compared with measured lengths
#: those of evidence.HARMLESS that lose nothing of gradients of this type only
_OF_TYPE = {"lossless_bf16": torch.bfloat16}


def candidates(
    options: Options, target: str = "cpu", only: Collection[str] | None = None
) -> dict[str, Codec]:
    """The codecs that keep the loss under the optimizer, or stay within `accept_loss`, and suit the
    requested strategy, by key, compiled for a backend. only: restricts the keys. Raises ConfigError
    if there are none."""
    predicted = timeline.PREDICTED
    if options.strategy in strategies.list_strategies() and options.strategy not in predicted:
        raise ConfigError(
            f'"auto" cannot predict strategy {options.strategy!r}: name a compressor, or use '
            f"strategy {' or '.join(map(repr, predicted))}"
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


def _mistyped(codec: Codec, param: Param) -> str | None:
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


class Registry(Mapping[str, Codec]):
    """Candidates by key, and their variants for shapes of parameters."""

    def __init__(self, codecs: Mapping[str, Codec], options: Options, target: str = "cpu") -> None:
        """codecs: by key; keys of the host's end with HOSTED, for a device. target: backend of
        compll that `compile` compiles for."""
        self._codecs, self._options, self._target = dict(codecs), options, target
        self._variants: dict[tuple[str, tuple[int, ...]], tuple[str, Codec]] = {}
        self._refusals: dict[tuple[str, tuple[int, ...], torch.dtype], str | None] = {}

    def __getitem__(self, key: str) -> Codec:
        return self._codecs[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._codecs)

    def __len__(self) -> int:
        return len(self._codecs)

    def only(self, keys: Iterable[str]) -> Registry:
        """A registry of these candidates."""
        chosen = {key: self._codecs[key] for key in dict.fromkeys(keys)}
        return Registry(chosen, self._options, self._target)

    def hosted(self) -> Registry:
        """A registry of the same candidates for the host, with keys of their own."""
        return Registry({key + HOSTED: codec for key, codec in self.items()}, self._options)

    def variant(self, key: str, param: Param) -> tuple[str, Codec]:
        """Key and codec of a candidate for the shape of a parameter."""
        known = self._variants.get((key, param.shape))
        if known is None:
            codec = self._codecs[key]
            name, own = own_codec(codec, param, self._options)
            settled = name.removeprefix(codec.name)
            bare, at = key.removesuffix(HOSTED), HOSTED * key.endswith(HOSTED)
            known = self._variants[key, param.shape] = f"{bare}{settled}{at}", own
        return known

    def every(self, params: Sequence[Param]) -> dict[str, Codec]:
        """The candidates, and their variants for these parameters, by key."""
        variants = [self.variant(key, param) for key in self._codecs for param in params]
        return {**self._codecs, **dict(variants)}

    def refuses(self, key: str, param: Param) -> str | None:
        """The reason why a candidate does not suit this parameter, or None."""
        known = (key, param.shape, param.dtype)
        if known not in self._refusals:
            codec = self.variant(key, param)[1]
            wrong = _mistyped(codec, param) or unsuited(param, codec, self._options)
            self._refusals[known] = wrong or too_large(param, codec, self._options)
        return self._refusals[known]

    def compile(self, params: Sequence[Param], check: Callable[[], None]) -> dict[str, Codec]:
        """The result of `every`, compiled, for `use_compiled`. check: called before each codec."""
        codecs = {}
        for key in self._codecs:
            check()
            bare = key.removesuffix(HOSTED)
            codecs[key] = candidates(self._options, self._target, only={bare})[bare]
        compiled = Registry(codecs, self._options, self._target)
        for key in codecs:
            for param in params:
                check()
                compiled.variant(key, param)
        return compiled.every(params)

    def use_compiled(self, compiled: Mapping[str, Codec]) -> None:
        """Replace the candidates by compiled ones; plans made from now on have these."""
        self._codecs = {key: compiled[key] for key in self._codecs}
        self._variants.clear()
        self._refusals.clear()


def least_share(costs: Costs, codec: Codec, owners: int) -> int:
    """The least bytes of gradient in an owner's share of the model, for `share_out`.

    A power of two, so that another measurement of the same link gives the same owners.
    """
    peers = min(costs.exchange, key=lambda known: abs(known - owners + 1))
    line = costs.exchange[peers].line
    if line.per_byte <= 0:  # not measured
        return LEAST_BYTES
    payload = (line.latency / peers + _POST) / line.per_byte
    gradient = payload * FLOAT_BYTES * _SAMPLE / max(1, codec.payload_bytes(_SAMPLE))
    rounded = 1 << max(0, round(gradient).bit_length() - 1)
    return min(max(rounded, SMALL_BYTES), LEAST_BYTES)


@dataclass(frozen=True)
class Way:
    """The codec and strategy of tensors."""

    codec: str  # key in a plan
    strategy: str

    @property
    def label(self) -> str:
        """Text such as `int4_group (ps)`."""
        return f"{self.codec} ({self.strategy})"


@dataclass(frozen=True)
class Search:
    """Ranks the plans of "auto" for a model."""

    params: Sequence[Param]
    codecs: Registry
    options: Options
    topology: Topology
    overrides: Overrides = NO_RULES  # decisions of rules
    slots: bool = False  # True if payloads travel by NCCL

    def plans(self, costs: Costs, workload: Workload | None = None) -> tuple[Plan, ...]:
        """Plans worth a try, fastest predicted step first, then the native all-reduce; it alone if
        no other is. workload: by default from `estimate`."""
        work = self.expecting(workload or estimate(self.params))
        own = self._plan(None, work.step or self.seconds(None, costs, work), costs)
        ranked = self.ranked(costs, work)
        tried = [self._plan(way, seconds, costs) for way, seconds in ranked.items()]
        why = f"a step is predicted to take {_ms(own.seconds)}"
        if not tried:
            why += ", and with no compressor nearly as little"
        return (
            *(replace(each, why=why_tried(each.seconds, own.seconds)) for each in tried),
            replace(own, why=why),
        )

    def ranked(self, costs: Costs, workload: Workload) -> dict[Way, float]:
        """Ways worth a try, best first, with predicted seconds of a step. workload: as of
        `expecting`."""
        seconds = {way: self.seconds(way, costs, workload) for way in self.ways}
        # a second quantization has to gain some of the time that a step waits for averages
        alone = workload.backward + workload.rest
        value = {
            way: each + ONCE * (each - alone) * bool(strategies.load(way.strategy).SPREADS)
            for way, each in seconds.items()
        }
        least = min([self.seconds(None, costs, workload), *value.values()])
        near = [way for way in sorted(value, key=value.__getitem__) if value[way] <= FAR * least]
        return {way: seconds[way] for way in _varied(near)[:TRIED]}

    def seconds(self, way: Way | None, costs: Costs, workload: Workload) -> float:
        """Predicted seconds of a step with this codec and strategy for all tensors that they suit;
        None: uncompressed. See [Note: formula]."""
        by_way: dict[Way | None, list[Param]] = {}
        for param in self.params:
            if not param.sparse:
                by_way.setdefault(self._way_of(param, way), []).append(param)
        stages = [
            stage
            for each, some in by_way.items()
            for stage in self._stages(each, some, costs, workload)
        ]
        lanes, beside = defaultdict[str, float](float), 0.0
        for stage in stages:
            lanes[stage.lane] += stage.seconds
            cores = 1.0 if stage.lane == WORK else min(1.0, stage.cores)
            beside += stage.seconds * (cores * (1 - costs.overlap) + stage.slows)
        last = self._share_of_last(workload)
        pass_ends = workload.backward + (1 - last) * beside
        hidden = (1 - last) * max(lanes.values(), default=0.0)
        rest = last * sum(stage.seconds + stage.delay for stage in stages)
        return max(pass_ends, hidden) + rest + workload.rest

    def promising(self, costs: Costs, native: float | None = None) -> Search:
        """The search with those codecs that would make a step faster on this link if they cost no
        time. native: seconds of the native step, if by other costs."""
        costs = replace(costs, codecs=dict.fromkeys(self._all_codecs, CodecCost(FREE, FREE)))
        work = self.expecting(estimate(self.params))
        limit = self.seconds(None, costs, work) if native is None else native
        limit -= MIN_GAIN_SECONDS
        ways = [way for way in self._ways() if self.seconds(way, costs, work) < limit]
        return replace(self, codecs=self.codecs.only(way.codec for way in ways))

    def native(self, costs: Costs) -> float:
        """Estimated seconds of the native step."""
        return self.seconds(None, costs, estimate(self.params))

    def unplanned(self, why: str = "the first steps are watched") -> Plan:
        """The native all-reduce, except where a rule has a codec."""
        return replace(self._plan(None, 0.0, None, why), why=why)

    @cached_property
    def left_out(self) -> Mapping[int, str]:
        """Reasons why no codec may compress a parameter, by index."""
        reasons = {param.index: excluded(param, self.options) for param in self.params}
        return {index: why for index, why in reasons.items() if why is not None}

    @cached_property
    def _free(self) -> list[Param]:
        """Parameters with a choice."""
        decided = self.overrides.decisions.keys() | self.left_out.keys()
        return [param for param in self.params if param.index not in decided]

    @cached_property
    def ways(self) -> list[Way]:
        """Ways that compress more than a few elements."""
        least = SHARE * sum(param.numel for param in self._free)
        return [
            way for way in self._ways()
            if sum(p.numel for p in self._free if self.codecs.refuses(way.codec, p) is None) > least
        ]  # fmt: skip

    @cached_property
    def _accepted(self) -> Mapping[str, Finding]:
        return within(self.options)

    @property
    def _all_codecs(self) -> dict[str, Codec]:
        return {**self.codecs, **self.overrides.codecs}

    def _ways(self) -> Iterator[Way]:
        for key, codec in self.codecs.items():
            if refuse_workers(codec, self.topology.world_size):
                continue
            for strategy in ways_for(codec, self.options.strategy, self.topology):
                if not evidence.swamps(codec, strategy, self.topology.world_size):
                    yield Way(key, strategy)

    def expecting(self, workload: Workload) -> Workload:
        """The workload with expected lengths of payloads that were not measured, and without those
        of payloads that travel at their bound."""
        lengths = {**expected(self.codecs, self.params), **workload.payloads}
        kept = {key: share for key, share in lengths.items() if self._shrinks(key[0], share)}
        return replace(workload, payloads=kept)

    def _shrinks(self, key: str, share: float) -> bool:
        """True if payloads of `share` bytes per gradient byte travel as short as they are: see
        [Note: lengths that vary] in casync/memory/capacity.py."""
        codec = self.codecs.get(key)
        if not self.slots or codec is None or codec.cuts:
            return True
        # the host may always wait in training: see executor() in channel/executors.py
        return not codec.fixed and 2 * share < codec.payload_bytes(MANY) / (FLOAT_BYTES * MANY)

    def _way_of(self, param: Param, way: Way | None) -> Way | None:
        """The way of a parameter in a plan with this way: that of a rule, or none, if it has to."""
        decision = self.overrides.decisions.get(param.index)
        if decision is not None:
            return Way(decision.codec, decision.strategy) if decision.codec else None
        if way is None or param.index in self.left_out:
            return None
        return way if self.codecs.refuses(way.codec, param) is None else None

    def _stages(
        self, way: Way | None, params: Sequence[Param], costs: Costs, workload: Workload
    ) -> Iterator[Stage]:
        """Stages of all buckets, as of as many equal ones."""
        buckets = max(1, len(workload.buckets))
        if way is None:
            size = sum(param.nbytes for param in params) / buckets
            return _times(buckets, timeline.native(size, costs))
        codec, cost = self._all_codecs[way.codec], costs.codecs.get(way.codec)
        payload = sum(self._payload(param, way.codec, workload) for param in params) / buckets
        if cost is None:  # codec of a rule, without measured costs
            return _times(buckets, timeline.native(payload, costs))
        item = Item(
            FLOAT_BYTES * sum(param.numel for param in params) / buckets,
            payload,
            len(params) / buckets,
            codec.additive or "float32",
            max(1, len(codec.rounds)),
        )
        return _times(buckets, timeline.stages_of(way.strategy, item, cost, self.topology, costs))

    def _payload(self, param: Param, key: str, workload: Workload) -> float:
        """Payload bytes of a parameter."""
        measured = workload.payloads.get((key, param.index))
        if measured is not None:
            return measured * FLOAT_BYTES * param.numel
        return self._own(key, param)[1].payload_bytes(param.numel)

    def _own(self, key: str, param: Param) -> tuple[str, Codec]:
        """Key and variant of a codec for a parameter."""
        ruled = self.overrides.codecs.get(key)
        return self.codecs.variant(key, param) if ruled is None else (key, ruled)

    def _share_of_last(self, workload: Workload) -> float:
        """Share of the elements in the bucket that is ready last."""
        if not workload.buckets:
            return 1.0
        numel = {param.index: param.numel for param in self.params}
        last = sum(numel[index] for index in workload.buckets[-1].indices)
        return last / max(1, sum(numel.values()))

    def _plan(self, way: Way | None, seconds: float, costs: Costs | None, why: str = "") -> Plan:
        decisions = tuple(self._decision(param, way, why) for param in self.params)
        used = {decision.codec for decision in decisions}
        known = {**self.codecs.every(self.params), **self.overrides.codecs}
        codecs = {key: codec for key, codec in known.items() if key in used}
        least = LEAST_BYTES
        if way is not None and costs is not None:
            least = least_share(costs, self.codecs[way.codec], self.topology.world_size)
        return Plan(decisions, self.topology, codecs, seconds=seconds, least=least)

    def _decision(self, param: Param, way: Way | None, why: str) -> Decision:
        decided = self.overrides.decisions.get(param.index)
        if decided is not None:
            return decided
        if param.index in self.left_out:
            return raw(param, self.left_out[param.index])
        if way is None:
            return raw(param, why or "no compressor would make the step faster")
        if (refusal := self.codecs.refuses(way.codec, param)) is not None:
            return raw(param, refusal)
        key, codec = self.codecs.variant(way.codec, param)
        cut = partitions(param.numel, codec, way.strategy, self.topology.world_size)
        why = "gains time" + self._loss_of(way.codec)
        return Decision(param.name, param.numel, key, way.strategy, cut, why)

    def _loss_of(self, key: str) -> str:
        """The measured loss of a codec that `accept_loss` allows; else ""."""
        finding, loss = self._accepted.get(key.removesuffix(HOSTED)), self.options.accept_loss
        return "" if finding is None else f", within accept_loss={loss}: {finding}"


def _times(count: int, stages: Sequence[Stage]) -> Iterator[Stage]:
    """The stages of `count` buckets in a row, each lane's as one."""
    for stage in stages:
        yield replace(stage, seconds=count * stage.seconds, delay=count * stage.delay)


def _varied(ways: Sequence[Way]) -> list[Way]:
    """At most ALIKE ways of one codec: an error in its prediction affects all of them."""
    codecs: Counter[str] = Counter()
    varied = []
    for way in ways:
        codecs[way.codec] += 1
        if codecs[way.codec] <= ALIKE:
            varied.append(way)
    return varied


def why_tried(own: float, native: float) -> str:
    """Text on a plan to try, by seconds of a step."""
    return f"a step is predicted to take {_ms(own)}, with DDP's own all-reduce {_ms(native)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
