"""compressor="auto": plans of codecs that keep the loss, the one predicted fastest first.

[Note: never slower] A prediction is no promise. So predictions only rank plans, and the best are
tried in real steps against DDP's own all-reduce: see [Note: turns] in trial.py. If even codecs
without any cost would not make a step faster by MIN_GAIN_SECONDS, nothing is tried or installed,
and DDP is untouched.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from casync.codec import FLOAT_BYTES, Codec
from casync.cost import FREE, CodecCost, Costs, Line
from casync.graph.shares import LEAST_BYTES, SMALL_BYTES
from casync.rounds import refuse_workers
from casync.topology import Topology
from hipress.choose import candidates
from hipress.choose.evidence import Finding, swamps
from hipress.choose.local_search import Choices, LocalSearch
from hipress.choose.objective import Kind, Objective, Way
from hipress.choose.plan import HOSTED, Decision, Plan, excluded, raw
from hipress.choose.registry import Registry
from hipress.choose.rules import NO_RULES, Overrides
from hipress.choose.workload import Bucket, Workload, estimate, kinds
from hipress.codecs import ways_for
from hipress.model.params import Param
from hipress.options import Options

__all__ = ["least_share"]

_SAMPLE = 1 << 20  # elements
_POST = 1e-5  # seconds of the engine for a message, without the transport: python -m bench.bulk


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


TRIED = 3  # plans, besides the native all-reduce
ALIKE = 2  # of these, at most, with the same codec
FAR = 1.25  # largest predicted step over the fastest one: predictions may be that far off
SHARE = 0.1  # least share of elements that a plan compresses
MIN_GAIN_SECONDS = 1e-3  # least gain in seconds per step
AS_PROBED, HALVINGS = (0.5, 4.0), 7  # range of an all-reduce's time over its probed time
MANY = 1 << 20  # elements of a payload whose bound is compared with measured lengths


@dataclass(frozen=True)
class Search:
    """Inputs of a search for plans."""

    params: Sequence[Param]
    codecs: Registry
    options: Options
    topology: Topology
    overrides: Overrides = NO_RULES  # decisions of rules
    watched: bool = True  # True if the native step was measured with these costs
    slots: bool = False  # True if payloads travel by NCCL, in groups for phases or for turns

    def plans(self, costs: Costs, workload: Workload | None = None) -> tuple[Plan, ...]:
        """Plans worth a try, fastest predicted step first, then the native all-reduce; it alone if
        no other is. workload: by default from `estimate`."""
        workload = self._expecting(workload or estimate(self.params))
        objective = self._calibrated(costs, workload)
        local = self._local(objective)
        local.run([*self._ways()], fuses=self.options.scope == "tensor", turns=self.slots)
        return _PlanMaker(self, local, objective.least).plans()

    def promising(self, costs: Costs, native: float | None = None) -> Search:
        """The search with those codecs that would make a step faster on this link if they cost no
        time. native: seconds of the native step, if by other costs."""
        free = CodecCost(FREE, FREE)
        costs = replace(costs, codecs=dict.fromkeys(self._all_codecs, free))
        local = self._local(self._objective(costs, self._expecting(estimate(self.params))))
        limit = local.predict(local.native).seconds if native is None else native
        limit -= MIN_GAIN_SECONDS
        ways = [way for way in self._ways() if local.predict(local.everywhere(way)).seconds < limit]
        return replace(self, codecs=self.codecs.only(way.codec for way in ways))

    def native(self, costs: Costs) -> float:
        """Estimated seconds of the native step."""
        return self._objective(costs, estimate(self.params)).step(self._native).seconds

    def unplanned(self, why: str = "the first steps are watched") -> Plan:
        """The native all-reduce, except where a rule has a codec."""
        decided = self.overrides.decisions
        plain = [decided.get(p.index, raw(p, self.left_out.get(p.index, why))) for p in self.params]
        return Plan(tuple(plain), self.topology, dict(self.overrides.codecs), why)

    @cached_property
    def left_out(self) -> Mapping[int, str]:
        """Reasons why no codec may compress a parameter, by index."""
        reasons = {param.index: excluded(param, self.options) for param in self.params}
        return {index: why for index, why in reasons.items() if why is not None}

    @cached_property
    def free(self) -> list[Kind]:
        """Parameters that share a choice."""
        decided = self.overrides.decisions.keys() | self.left_out.keys()
        return kinds([param for param in self.params if param.index not in decided])

    @cached_property
    def bound(self) -> list[Param]:
        """Parameters without a choice, except sparse ones."""
        free = {param.index for kind in self.free for param in kind}
        return [param for param in self.params if param.index not in free and not param.sparse]

    def own(self, key: str, param: Param) -> tuple[str, Codec]:
        """Key and variant of a codec for a parameter."""
        ruled = self.overrides.codecs.get(key)
        return self.codecs.variant(key, param) if ruled is None else (key, ruled)

    def refuses(self, key: str, param: Param) -> str | None:
        """The reason why a codec does not suit this parameter, or None."""
        return None if key in self.overrides.codecs else self.codecs.refuses(key, param)

    def loss_of(self, key: str) -> str:
        """The measured loss of a codec that `accept_loss` allows; else ""."""
        finding, loss = self._accepted.get(key.removesuffix(HOSTED)), self.options.accept_loss
        return "" if finding is None else f", within accept_loss={loss}: {finding}"

    @cached_property
    def _accepted(self) -> Mapping[str, Finding]:
        return candidates.within(self.options)

    @property
    def _all_codecs(self) -> dict[str, Codec]:
        return {**self.codecs, **self.overrides.codecs}

    def _ways(self) -> Iterator[Way]:
        for key, codec in self.codecs.items():
            if refuse_workers(codec, self.topology.world_size):
                continue
            for strategy in ways_for(codec, self.options.strategy, self.topology):
                if not swamps(codec, strategy, self.topology.world_size):
                    yield Way(key, strategy)

    def _expecting(self, workload: Workload) -> Workload:
        """The workload with expected lengths of payloads that were not measured, and without those
        of payloads that travel at their bound."""
        lengths = {**candidates.expected(self.codecs, self.params), **workload.payloads}
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

    @cached_property
    def _bound(self) -> Choices:
        """Ways of `bound`: those of rules."""
        return tuple(_decided(self.overrides.decisions.get(param.index)) for param in self.bound)

    @property
    def _native(self) -> Choices:
        return (None,) * len(self.free) + self._bound

    def _objective(self, costs: Costs, workload: Workload) -> Objective:
        every = [*self.free, *((param,) for param in self.bound)]
        size, codecs = self.topology.world_size, self._all_codecs
        least = {key: least_share(costs, codec, size) for key, codec in codecs.items()}
        return Objective(every, codecs, self.topology, costs, workload, least=least)

    def _local(self, objective: Objective) -> LocalSearch:
        suited = [
            {key for key in self.codecs if self.refuses(key, kind[0]) is None} for kind in self.free
        ]
        return LocalSearch(objective, self._all_codecs, suited, self._bound)

    def _calibrated(self, costs: Costs, workload: Workload) -> Objective:
        """The objective, calibrated by the measured native step, if there is one.

        All-reduces are scaled until the native step takes its measured time, since in training they
        share cores and have other sizes than in the probe; the backward pass is freed of their
        slow-down.
        """
        if not self.watched or workload.step <= 0:
            return self._objective(costs, workload)
        low, high = AS_PROBED
        for _ in range(HALVINGS):
            factor = math.sqrt(low * high)
            objective = self._undisturbed(_slower(costs, factor), workload)
            if objective.step(self._native).seconds < workload.step:
                low = factor
            else:
                high = factor
        return objective

    def _undisturbed(self, costs: Costs, workload: Workload) -> Objective:
        """The objective with a backward pass freed of the slow-down by the native all-reduce, with
        which the workload was watched."""
        objective = self._objective(costs, workload)
        if workload.backward <= 0:
            return objective
        share = workload.backward / max(workload.backward, objective.step(self._native).backward)
        buckets = tuple(Bucket(each.indices, share * each.ready) for each in workload.buckets)
        less = replace(workload, buckets=buckets, backward=share * workload.backward)
        return self._objective(costs, less)


def _slower(costs: Costs, factor: float) -> Costs:
    """The costs with all-reduces that take `factor` times as long for each byte."""
    lines = {
        name: replace(each, line=Line(each.line.latency, factor * each.line.per_byte))
        for name, each in costs.reduce.items()
    }
    return replace(costs, reduce=lines)


class _PlanMaker:
    """Makes plans of the choices that a local search has tried, with reasons."""

    def __init__(self, search: Search, local: LocalSearch, least: Mapping[str, int]) -> None:
        """local: has run. least: as for Objective."""
        self._search, self._local, self._least = search, local, least
        self._kinds: list[Kind] = [*search.free, *((param,) for param in search.bound)]

    def plans(self) -> tuple[Plan, ...]:
        """Plans for Search.plans: the best, and the best of each with one codec and strategy, which
        depend less on details of a prediction."""
        local = self._local
        native = self._plan(local.native)
        plain = [each for each in local.known if len(self._ways(each)) == 1]
        by_ways: dict[frozenset[Way], Choices] = {}
        for choices in (local.best, *sorted(plain, key=local.weigh)):
            if self._mainly(choices) is not None:
                by_ways.setdefault(self._ways(choices), choices)
        least = min(map(local.weigh, local.known))
        near = [each for each in by_ways.values() if local.weigh(each) <= FAR * least]
        tried = [self._plan(each) for each in self._varied(near)[:TRIED]]
        why = f"a step is predicted to take {_ms(native.seconds)}"
        if not tried:
            why += ", and with no compressor nearly as little"
        return (
            *(replace(each, why=why_tried(each.seconds, native.seconds)) for each in tried),
            replace(native, why=why),
        )

    def _ways(self, choices: Choices) -> frozenset[Way]:
        """Codecs and strategies of tensors that no rule decides, whatever their cuts and fusion."""
        ways = choices[: len(self._search.free)]
        return frozenset(replace(way, cut=1, fused=False) for way in ways if way is not None)

    def _varied(self, plans: Sequence[Choices]) -> list[Choices]:
        """At most ALIKE plans of one codec: an error in its prediction affects all of them."""
        codecs: Counter[str | None] = Counter()
        varied = []
        for choices in plans:
            codec = self._mainly(choices)
            codecs[codec] += 1
            if codecs[codec] <= ALIKE:
                varied.append(choices)
        return varied

    def _mainly(self, choices: Choices) -> str | None:
        """The codec of most compressed elements; None if few are compressed."""
        elements: Counter[str] = Counter()
        for kind, way in zip(self._search.free, choices, strict=False):
            if way is not None:
                elements[way.codec] += sum(param.numel for param in kind)
        total = sum(param.numel for kind in self._search.free for param in kind)
        few = elements.total() <= SHARE * total
        return None if few else max(elements, key=lambda codec: elements[codec])

    def _plan(self, choices: Choices) -> Plan:
        search, local = self._search, self._local
        decisions = {
            param.index: self._decision(number, param, way, choices)
            for number, (kind, way) in enumerate(zip(self._kinds, choices, strict=True))
            for param in kind
        }
        for param in search.params:
            if (why := search.left_out.get(param.index)) is not None:
                decisions[param.index] = raw(param, why)
        decisions |= search.overrides.decisions
        used = {decision.codec for decision in decisions.values()}
        known = {**search.codecs.every(search.params), **search.overrides.codecs}
        return Plan(
            tuple(decisions[param.index] for param in search.params),
            search.topology,
            {key: codec for key, codec in known.items() if key in used},
            seconds=local.predict(choices).seconds,
            fused=any(way is not None and way.fused for way in choices),
            least=self._least.get(self._mainly(choices) or "", LEAST_BYTES),
            turns=choices == local.turning,
        )

    def _decision(self, kind: int, param: Param, way: Way | None, choices: Choices) -> Decision:
        if way is None:
            decision = raw(param, self._why_raw(kind))
        elif (refusal := self._search.refuses(way.codec, param)) is not None:
            decision = raw(param, refusal)  # unlike the others of its kind
        else:
            key, codec = self._search.own(way.codec, param)
            cut = way.partitions(param.numel, codec, self._search.topology)
            why = "gains time" + self._search.loss_of(way.codec)
            decision = Decision(param.name, param.numel, key, way.strategy, cut, why)
        around = self._local.around.get(kind, {}) if choices == self._local.best else {}
        return _compared(decision, way, around)

    def _why_raw(self, kind: int) -> str:
        around = self._local.around.get(kind, {None: 0.0})
        return "no compressor would make the step faster" if len(around) > 1 else "too small"


def _compared(decision: Decision, way: Way | None, around: Mapping[Way | None, float]) -> Decision:
    """The decision with the seconds that it gains on others. around: of a step, by way."""
    others = {
        each: seconds
        for each, seconds in around.items()
        if each != way and (each is None or way is None or replace(each, cut=way.cut) != way)
    }
    if not others:
        return decision
    runner_up = min(others, key=lambda each: others[each])
    return replace(
        decision,
        gain=around[None] - around[way],
        runner_up=runner_up.label if runner_up else "no compression",
        margin=max(0.0, others[runner_up] - around[way]),  # gains below WORTH are ignored
    )


def _decided(decision: Decision | None) -> Way | None:
    """The way of a rule's decision."""
    if decision is None or decision.codec is None:
        return None
    return Way(decision.codec, decision.strategy)


def why_tried(own: float, native: float) -> str:
    """Text on a plan to try, by seconds of a step."""
    return f"a step is predicted to take {_ms(own)}, with DDP's own all-reduce {_ms(native)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
