"""compressor="auto": plans of codecs that keep the loss, the one predicted fastest first.

[Note: never slower] A prediction is no promise. So predictions only rank plans, and the best are
tried in real steps against DDP's own all-reduce: see [Note: turns] in trial.py. If even codecs
without any cost would not make a step faster by MIN_GAIN_SECONDS, nothing is tried or installed,
and DDP is untouched.

[Note: search] A plan is judged by its predicted step (casync/predict/timeline.py), so a choice for
a tensor is judged together with the choices for all others: compressing a tensor whose transfer
ends behind the backward pass gains nothing. First each way (codec and strategy) is used for all
tensors. The best of these is then changed tensor by tensor, largest first, repeatedly until nothing
helps or BUDGET steps have been simulated. Tensors of equal length share a choice, except the
largest. At last the result is tried with neighbours in a bucket fused before compression: fewer
messages, coarser chunks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from casync.cost import FREE, CodecCost, Costs, Line
from casync.graph.shares import LEAST_BYTES
from casync.rounds import refuse_workers
from casync.topology import Topology
from hipress.auto import candidates
from hipress.auto.objective import Kind, Objective, Predicted, Way, cuttable
from hipress.auto.registry import Registry
from hipress.auto.workload import Bucket, Workload, estimate, kinds
from hipress.model.params import Param
from hipress.options import AUTO, Options
from hipress.plan.codecs import ways_for
from hipress.plan.evidence import HARMLESS, Finding
from hipress.plan.messages import least_share
from hipress.plan.plan import HOSTED, Decision, Plan, excluded, raw
from hipress.plan.rules import NO_RULES, Overrides

if TYPE_CHECKING:
    from casync.codec import Codec

TRIED = 3  # plans, besides the native all-reduce
ALIKE = 2  # of these, at most, with the same codec
FAR = 1.25  # largest predicted step over the fastest one: predictions may be that far off
SHARE = 0.1  # least share of elements that a plan compresses
MIN_GAIN_SECONDS = 1e-3  # least gain in seconds per step
BUDGET = 100  # simulated steps
WORTH = 0.01  # least gain of a tensor's own choice, over the step; predictions err by more
WAYS = 6  # ways tried for a tensor: those that are fastest for all
AS_PROBED, HALVINGS = (0.5, 4.0), 7  # range of an all-reduce's time over its probed time
CUTS = (2, 4)  # multiples of the usual partitions that are tried, too


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

    def own(self, key: str, param: Param) -> tuple[str, Codec]:
        """Key and variant of a codec for a parameter."""
        ruled = self.overrides.codecs.get(key)
        return self.codecs.variant(key, param) if ruled is None else (key, ruled)

    def loss_of(self, key: str) -> str:
        """The measured loss of a codec that `accept_loss` allows; else ""."""
        found = self._accepted.get(key.removesuffix(HOSTED))
        return "" if found is None else f", within accept_loss={self.options.accept_loss}: {found}"

    @cached_property
    def _accepted(self) -> Mapping[str, Finding]:
        return candidates.within(self.options)

    def refuses(self, key: str, param: Param) -> str | None:
        """The reason why a codec does not suit this parameter, or None."""
        return None if key in self.overrides.codecs else self.codecs.refuses(key, param)

    def promising(self, costs: Costs, native: float | None = None) -> Search:
        """The search with those codecs that would make a step faster on this link if they cost no
        time. native: seconds of the native step, if by other costs."""
        free = CodecCost(FREE, FREE)
        costs = replace(costs, codecs=dict.fromkeys(self._all_codecs, free))
        found = _Found(self, costs, self._expecting(estimate(self.params)))
        limit = found.predict(found.native).seconds if native is None else native
        limit -= MIN_GAIN_SECONDS
        ways = [way for way in self._ways() if found.predict(found.everywhere(way)).seconds < limit]
        return replace(self, codecs=self.codecs.only(way.codec for way in ways))

    def _expecting(self, workload: Workload) -> Workload:
        """The workload with expected lengths of payloads that were not measured."""
        usual = candidates.expected(self.codecs, self.params)
        return replace(workload, payloads={**usual, **workload.payloads})

    def native(self, costs: Costs) -> float:
        """Estimated seconds of the native step."""
        found = _Found(self, costs, estimate(self.params))
        return found.predict(found.native).seconds

    def plans(self, costs: Costs, workload: Workload | None = None) -> tuple[Plan, ...]:
        """Plans worth a try, fastest predicted step first, then the native all-reduce; it alone if
        no other is. workload: by default from `estimate`."""
        found = _calibrated(self, costs, self._expecting(workload or estimate(self.params)))
        ways = sorted(self._ways(), key=lambda way: found.weigh(found.everywhere(way)))
        found.improve(ways[:WAYS])
        found.fuse()
        found.turn()
        return found.plans()

    def unplanned(self, why: str = "the first steps are watched") -> Plan:
        """The native all-reduce, except where a rule has a codec."""
        decided = self.overrides.decisions
        plain = [
            decided.get(p.index, raw(p, excluded(p, self.options) or why)) for p in self.params
        ]
        return Plan(tuple(plain), self.topology, dict(self.overrides.codecs), why)

    @property
    def _all_codecs(self) -> dict[str, Codec]:
        return {**self.codecs, **self.overrides.codecs}

    def _ways(self) -> Iterator[Way]:
        for key, codec in self.codecs.items():
            if refuse_workers(codec, self.topology.world_size):
                continue
            for strategy in self._strategies(codec):
                yield Way(key, strategy)

    def _strategies(self, codec: Codec) -> tuple[str, ...]:
        """Strategies to compare; with "ps" for codecs that lose nothing by encoding again."""
        found = ways_for(codec, self.options.strategy, self.topology)
        exact = codec.name in HARMLESS and self.options.strategy == AUTO
        return found if not exact or "ps" in found else (*found, "ps")


def _calibrated(search: Search, costs: Costs, workload: Workload) -> _Found:
    """The state of a search, calibrated by the measured native step, if there is one.

    All-reduces are scaled until the native step takes its measured time, since in training they
    share cores and have other sizes than in the probe; the backward pass is freed of their
    slow-down.
    """
    found = _Found(search, costs, workload)
    if not search.watched or workload.step <= 0:
        return found
    low, high = AS_PROBED
    for _ in range(HALVINGS):
        factor = math.sqrt(low * high)
        found = _Found(search, _slower(costs, factor), workload).undisturbed()
        if found.predict(found.native).seconds < workload.step:
            low = factor
        else:
            high = factor
    return found


def _slower(costs: Costs, factor: float) -> Costs:
    lines = {
        name: replace(each, line=Line(each.line.latency, factor * each.line.per_byte))
        for name, each in costs.reduce.items()
    }
    return replace(costs, reduce=lines)


Choices = tuple[Way | None, ...]  # by kind


class _Found:
    """The state of a search: predicted steps, by choices."""

    def __init__(self, search: Search, costs: Costs, workload: Workload) -> None:
        self._search, self._costs, self._workload = search, costs, workload
        self._why = {p.index: excluded(p, search.options) for p in search.params}
        decided = search.overrides.decisions
        free = [p for p in search.params if p.index not in decided and self._why[p.index] is None]
        bound = [(p,) for p in search.params if p not in set(free) and not p.sparse]
        self._kinds: list[Kind] = [*kinds(free), *bound]
        self._free = len(self._kinds) - len(bound)
        self._bound = tuple(_decided(decided.get(p.index)) for (p,) in bound)
        codecs, topology = search._all_codecs, search.topology
        self._least = {
            key: least_share(costs, codec, topology.world_size) for key, codec in codecs.items()
        }
        self._objective = Objective(
            self._kinds, codecs, topology, costs, workload, least=self._least
        )
        self._turning: Choices | None = None
        self._known: dict[Choices, Predicted] = {}
        self._around: dict[int, dict[Way | None, float]] = {}  # by kind: steps by way
        self.best = self.native

    def undisturbed(self) -> _Found:
        """The same search with a backward pass freed of the slow-down by the native all-reduce,
        with which the workload was watched."""
        work = self._workload
        if work.backward <= 0:
            return self
        share = work.backward / max(work.backward, self.predict(self.native).backward)
        buckets = tuple(Bucket(each.indices, share * each.ready) for each in work.buckets)
        less = replace(work, buckets=buckets, backward=share * work.backward)
        return _Found(self._search, self._costs, less)

    @property
    def native(self) -> Choices:
        """Choices without codecs, except those of rules."""
        return (None,) * self._free + self._bound

    def everywhere(self, way: Way) -> Choices:
        """Choices with this way for all kinds that it suits."""
        return tuple(way if self._suits(k, way) else None for k in range(self._free)) + self._bound

    def predict(self, choices: Choices) -> Predicted:
        """The predicted step with these choices."""
        if choices not in self._known:
            self._known[choices] = self._objective.step(choices)
        return self._known[choices]

    def weigh(self, choices: Choices) -> float:
        """The value to minimize: predicted seconds with a penalty, see Objective.weighed."""
        return self._objective.weighed(self.predict(choices), choices)

    def improve(self, ways: Sequence[Way]) -> None:
        """Start from the best so far, and change it kind by kind; see [Note: search]."""
        self.best = min(self._known, key=self.weigh, default=self.native)
        changed = True
        while changed and self._objective.steps < BUDGET:
            changed = False
            for kind in range(self._free):
                options = self._options(kind, ways)
                steps = {way: self.weigh(self._with(kind, way)) for way in options}
                self._around[kind] = steps
                first = min(steps, key=lambda way: steps[way])
                if steps[first] < (1 - WORTH) * steps[self.best[kind]]:
                    self.best, changed = self._with(kind, first), True
                if self._objective.steps >= BUDGET:
                    break

    def fuse(self) -> None:
        """Fuse neighbours in the best choices, if that is faster. Not if it would change a codec's
        result for a tensor, nor with states, whose owners would depend on DDP's buckets."""
        codecs = [self._search._all_codecs[way.codec] for way in self.best if way is not None]
        possible = all(cuttable(codec) and not codec.states for codec in codecs)
        if self._search.options.scope != "tensor" or not possible:
            return
        fused = tuple(way and replace(way, fused=True, cut=1) for way in self.best)
        if self.weigh(fused) < (1 - WORTH) * self.weigh(self.best):
            self.best, self._around = fused, {}

    def turn(self) -> None:
        """The same with a group of NCCL for each turn of a phase, if that is faster."""
        if not self._search.slots:
            return
        found = self._objective.turning().step(self.best)
        if found.seconds < (1 - WORTH) * self.predict(self.best).seconds:
            self._known[self.best], self._turning = found, self.best

    def _options(self, kind: int, ways: Sequence[Way]) -> list[Way | None]:
        """Candidates for a kind: its present way, none, others, or the present with more cuts."""
        now = self.best[kind]
        found: list[Way | None] = [now, None, *(w for w in ways if self._suits(kind, w))]
        if now is not None and cuttable(self._search._all_codecs[now.codec]):
            found += [replace(now, cut=cut) for cut in CUTS]
        return list(dict.fromkeys(found))

    def _with(self, kind: int, way: Way | None) -> Choices:
        return (*self.best[:kind], way, *self.best[kind + 1 :])

    def _suits(self, kind: int, way: Way) -> bool:
        return self._search.refuses(way.codec, self._kinds[kind][0]) is None

    def plans(self) -> tuple[Plan, ...]:
        """Plans for Search.plans: the best, and the best of each with one codec and strategy, which
        depend less on details of a prediction."""
        native = self._plan(self.native)
        plain = [each for each in self._known if len(self._ways(each)) == 1]
        by_ways: dict[frozenset[Way], Choices] = {}
        for choices in (self.best, *sorted(plain, key=self.weigh)):
            if self._mainly(choices) is not None:
                by_ways.setdefault(self._ways(choices), choices)
        least = min(map(self.weigh, self._known), default=math.inf)
        near = [each for each in by_ways.values() if self.weigh(each) <= FAR * least]
        tried = [
            replace(self._plan(each), why=self._told(each)) for each in self._varied(near)[:TRIED]
        ]
        why = f"a step is predicted to take {_ms(native.seconds)}"
        if not tried:
            why += ", and with no compressor nearly as little"
        return (*tried, replace(native, why=why))

    def _ways(self, choices: Choices) -> frozenset[Way]:
        """Codecs and strategies of tensors that no rule decides, whatever their cuts and fusion."""
        ways = choices[: self._free]
        return frozenset(replace(way, cut=1, fused=False) for way in ways if way is not None)

    def _varied(self, plans: Sequence[Choices]) -> list[Choices]:
        """At most ALIKE plans of one codec: an error in its prediction affects all of them."""
        codecs: Counter[str] = Counter()
        found = []
        for choices in plans:
            codec = self._mainly(choices)
            assert codec is not None  # others have been left out
            codecs[codec] += 1
            if codecs[codec] <= ALIKE:
                found.append(choices)
        return found

    def _mainly(self, choices: Choices) -> str | None:
        """The codec of most compressed elements; None if few are compressed."""
        elements: Counter[str] = Counter()
        for kind, way in zip(self._kinds[: self._free], choices, strict=False):
            if way is not None:
                elements[way.codec] += sum(param.numel for param in kind)
        total = sum(param.numel for kind in self._kinds[: self._free] for param in kind)
        few = elements.total() <= SHARE * total
        return None if few else max(elements, key=lambda codec: elements[codec])

    def _told(self, choices: Choices) -> str:
        own, other = self.predict(choices).seconds, self.predict(self.native).seconds
        return told(own, other)

    def _plan(self, choices: Choices) -> Plan:
        search, seconds = self._search, self.predict(choices).seconds
        decisions = {
            param.index: self._decision(number, param, way, choices)
            for number, (kind, way) in enumerate(zip(self._kinds, choices, strict=True))
            for param in kind
        }
        for param in search.params:
            if (why := self._why[param.index]) is not None:
                decisions[param.index] = raw(param, why)
        decisions |= search.overrides.decisions
        used = {decision.codec for decision in decisions.values()}
        known = {**search.codecs.every(search.params), **search.overrides.codecs}
        codecs = {key: codec for key, codec in known.items() if key in used}
        ordered = tuple(decisions[param.index] for param in search.params)
        fused = any(way is not None and way.fused for way in choices)
        least = self._least.get(self._mainly(choices) or "", LEAST_BYTES)
        return Plan(
            ordered, search.topology, codecs, seconds=seconds, fused=fused, least=least,
            turns=choices == self._turning,
        )  # fmt: skip

    def _decision(self, kind: int, param: Param, way: Way | None, choices: Choices) -> Decision:
        around = self._around.get(kind, {}) if choices == self.best else {}
        if way is None:
            decision = raw(param, self._why_raw(kind))
        elif (refusal := self._search.refuses(way.codec, param)) is not None:
            decision = raw(param, refusal)  # unlike the others of its kind
        else:
            key, codec = self._search.own(way.codec, param)
            cut = way.partitions(param.numel, codec, self._search.topology)
            why = "gains time" + self._search.loss_of(way.codec)
            decision = Decision(param.name, param.numel, key, way.strategy, cut, why)
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

    def _why_raw(self, kind: int) -> str:
        around = self._around.get(kind, {None: 0.0})
        return "no compressor would make the step faster" if len(around) > 1 else "too small"


def _decided(decision: Decision | None) -> Way | None:
    """The way of a rule's decision."""
    if decision is None or decision.codec is None:
        return None
    return Way(decision.codec, decision.strategy)


def told(own: float, native: float) -> str:
    """Text on a plan to try, by seconds of a step."""
    return f"a step is predicted to take {_ms(own)}, with DDP's own all-reduce {_ms(native)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
