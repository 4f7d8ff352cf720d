"""Predicted seconds of a step with a codec and strategy for each tensor, by a timeline.

[Note: joined buckets] The time to simulate a step grows with its chains, so neighbouring buckets
are joined, and large ones cut. The first bucket decides when the link starts, and the last how much
remains after it; so buckets are joined in the middle and kept at both ends. Parts are counted for
the original buckets, but only for the first and the last of a long chain; buckets of equal lengths,
such as those of repeated layers, have equal cuts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise

from casync import strategies
from casync.building.parts import Choice, Part, Tensor
from casync.codec import FLOAT_BYTES, Codec
from casync.cost import Costs
from casync.graph.plan import partition
from casync.graph.shares import LEAST_BYTES, Shares, share_out
from casync.predict.timeline import Load, PredictedStep, native, simulate_step, stages_of
from casync.stages import Item, Stage
from casync.topology import Topology
from hipress.choose.search import Way
from hipress.choose.workload import TimedBucket, Workload
from hipress.codecs import partitions
from hipress.model.params import Param

LOADS = 12  # chains in a simulated step: see [Note: joined buckets]
PIECES = 4  # most pieces of a bucket
SAMPLED = 2  # buckets of a chain whose parts are counted

Kind = tuple[Param, ...]  # parameters that share a choice
_Key = tuple[int, "Way | None", tuple[int, ...]]  # chain, way, kinds


@dataclass(frozen=True)
class Predicted:
    """A predicted step. Seconds."""

    seconds: float  # the whole step
    waiting: float  # part that the backward pass does not hide
    backward: float  # until the backward pass is over, from the first bucket on


class Objective:
    """Predicts steps of one model on one cluster. None as a way is no codec."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        codecs: Mapping[str, Codec],
        topology: Topology,
        costs: Costs,
        workload: Workload,
        loads: int = LOADS,
        least: Mapping[str, int] | None = None,
    ) -> None:
        """kinds: of all parameters; a prediction takes a choice for each. loads: chains. least:
        bytes of gradient in an owner's share, by codec; LEAST_BYTES by default."""
        self.least = least or {}
        self._kinds, self._codecs, self._topology = kinds, codecs, topology
        self._costs, self._workload = costs, workload
        kind_of = {param.index: number for number, kind in enumerate(kinds) for param in kind}
        params = {param.index: param for kind in kinds for param in kind}
        self._lengths = {params[index].name: params[index].numel for index in sorted(params)}
        self._shares: dict[int, Mapping[str, Shares]] = {}
        self._buckets = [
            (some[-1].ready, [_members(bucket, kind_of, params) for bucket in some])
            for some in joined(workload.buckets, loads)
        ]
        self._pieces = min(PIECES, max(1, loads // max(1, len(self._buckets))))
        self._known: dict[_Key, Load] = {}
        self._items: dict[_Key, Item] = {}
        self._counts: dict[tuple[object, tuple[int, ...]], tuple[float, float]] = {}

    def costing(self, costs: Costs) -> Objective:
        """The same objective with costs of another cluster of this topology; parts stay counted."""
        other = copy(self)
        other._costs, other._known = costs, {}
        return other

    def step(self, choices: Sequence[Way | None]) -> Predicted:
        """The predicted step with these ways of the kinds."""
        simulated = self.simulated(choices)
        waiting = max(0.0, simulated.seconds - self._workload.backward)
        return Predicted(simulated.seconds + self._workload.rest, waiting, simulated.backward)

    def simulated(self, choices: Sequence[Way | None], events: bool = False) -> PredictedStep:
        """The simulated backward pass and synchronization, from the first bucket on."""
        loads = self.loads(choices)
        return simulate_step(loads, self._workload.backward, self._costs.overlap, events)

    def loads(self, choices: Sequence[Way | None]) -> list[Load]:
        """Chains of stages beside the backward pass."""
        return list(self._loads(choices))

    def _loads(self, choices: Sequence[Way | None]) -> Iterator[Load]:
        for number, (_, buckets) in enumerate(self._buckets):
            members = dict.fromkeys(kind for bucket in buckets for kind in bucket)
            by_way: dict[Way | None, list[int]] = {}
            for kind in members:
                by_way.setdefault(choices[kind], []).append(kind)
            for way, some in by_way.items():
                key = (number, way, tuple(some))
                if key not in self._known:
                    self._known[key] = self._load(*key)
                yield self._known[key]

    def _load(self, number: int, way: Way | None, kinds: tuple[int, ...]) -> Load:
        ready, buckets = self._buckets[number]
        members = [[p for kind in kinds for p in bucket.get(kind, ())] for bucket in buckets]
        if way is None:
            size = sum(param.nbytes for params in members for param in params)
            return Load(ready, native(size, self._costs))
        key = (number, way, kinds)
        if key not in self._items:
            self._items[key] = self._item([params for params in members if params], way)
        item = self._items[key]
        pieces = min(self._pieces, max(1, round(item.parts)))
        return Load(ready, self._stages(item, way), pieces)

    def _stages(self, item: Item, way: Way) -> tuple[Stage, ...]:
        cost = self._costs.codecs.get(way.codec)
        if cost is None:  # codec of a rule, without measured costs
            return native(item.payload, self._costs)
        return stages_of(way.strategy, item, cost, self._topology, self._costs)

    def _item(self, buckets: Sequence[Sequence[Param]], way: Way) -> Item:
        codec, count = self._codecs[way.codec], len(buckets)
        sampled = buckets if count <= SAMPLED else (buckets[0], buckets[-1])
        counted = [self._counted(params, way) for params in sampled]
        parts, busiest = (sum(each) / len(sampled) for each in zip(*counted, strict=True))
        elements = sum(p.numel for params in buckets for p in params)
        payload = sum(self._payload(p, way.codec) for params in buckets for p in params)
        return Item(
            FLOAT_BYTES * elements,
            payload,
            parts * count,
            codec.additive or "float32",
            max(1, len(codec.rounds)),
            1.0 + (busiest - 1.0) / count,  # another owner is busiest in the next bucket
        )

    def _counted(self, params: Sequence[Param], way: Way) -> tuple[float, float]:
        """Number of parts of a bucket, and the largest share of an owner over the mean share."""
        codec, spread = self._codecs[way.codec], strategies.load(way.strategy).SPREADS
        nodes = strategies.over_nodes(way.strategy)
        alike = (spread, nodes, codec.align, codec.additive is None)
        key = (alike, tuple(p.numel for p in params))
        if key not in self._counts:
            owned, parts = Counter[int](), self._parts(params, way)
            for part in parts:
                owned[part.owner] += part.elements
            mean = max(1, sum(p.numel for p in params)) / self._topology.world_size
            self._counts[key] = float(len(parts)), max(1.0, max(owned.values(), default=0) / mean)
        return self._counts[key]

    def _parts(self, params: Sequence[Param], way: Way) -> Sequence[Part]:
        codec, ranks = self._codecs[way.codec], self._topology.world_size
        lengths = [(p.name, p.numel) for p in params]
        starts = accumulate((n for _, n in lengths), initial=0)
        tensors = [
            Tensor(name, i, start, n, start)
            for i, ((name, n), start) in enumerate(zip(lengths, starts, strict=False))
        ]
        choices = {
            name: Choice(way.codec, way.strategy, partitions(n, codec, way.strategy, ranks))
            for name, n in lengths
        }
        shares = self._shared(self.least.get(way.codec, LEAST_BYTES))
        return partition(tensors, choices, self._topology, self._codecs, shares=shares)

    def _shared(self, least: int) -> Mapping[str, Shares]:
        """Shares of each tensor."""
        if least not in self._shares:
            shares = share_out([*self._lengths.values()], self._topology.world_size, least)
            self._shares[least] = dict(zip(self._lengths, shares, strict=True))
        return self._shares[least]

    def _payload(self, param: Param, key: str) -> float:
        measured = self._workload.payloads.get((key, param.index))
        if measured is not None:
            return measured * FLOAT_BYTES * param.numel
        return self._codecs[key].for_shape(param.shape).payload_bytes(param.numel)


def _members(
    bucket: TimedBucket, kind_of: Mapping[int, int], params: Mapping[int, Param]
) -> dict[int, list[Param]]:
    """Parameters of a bucket by kind."""
    members: dict[int, list[Param]] = {}
    for index in bucket.indices:
        if index in kind_of:  # sparse ones have no kind
            members.setdefault(kind_of[index], []).append(params[index])
    return members


def joined(buckets: Sequence[TimedBucket], most: int) -> Iterator[Sequence[TimedBucket]]:
    """At most `most` runs of neighbouring buckets, each ready with its last; see
    [Note: joined buckets]."""
    n = len(buckets)
    share = [(1 - math.cos(math.pi * i / most)) / 2 for i in range(most + 1)]
    ends = sorted({round(n * each) for each in share} | {n}) if n > most else range(n + 1)
    for first, end in pairwise(ends):
        yield buckets[first:end]
