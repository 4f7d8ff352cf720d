"""What the planner minimizes: the predicted seconds of a step in which each tensor goes its way.

[Note: joined buckets] A simulated step takes as long as it has chains, so neighbouring buckets are
joined, and large ones cut. When the first one is ready decides when the link begins to work, and
how much is left after the last what a step waits for: so they are joined in the middle, and remain
as they are at both ends. Parts are those of the buckets as they are, of the first and the last in a
chain where there are many; buckets of equal lengths, as of layers that repeat, are cut alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from casync import strategies
from casync.codec import FLOAT_BYTES
from casync.cost import Costs
from casync.graph.parts import Choice, Tensor
from casync.graph.plan import partition
from casync.graph.shares import share_out
from casync.predict.stages import native, stages
from casync.predict.timeline import Load, Step, simulate_step
from casync.stages import Item, Stage
from casync.topology import Topology
from hipress.model import Param
from hipress.plan.rules import partitions
from hipress.plan.workload import Bucket, Workload

if TYPE_CHECKING:
    from casync.codec import Codec
    from casync.graph.parts import Part

LOADS = 12  # chains in a simulated step: see [Note: joined buckets]
PIECES = 4  # of a bucket, at most
SAMPLED = 2  # buckets of a chain of which parts are counted
ONCE = 0.1  # of the time that a step waits: what one quantization instead of two is worth

Kind = tuple[Param, ...]  # what gets one choice
_Key = tuple[int, "Way | None", tuple[int, ...]]  # chain, way, kinds


@dataclass(frozen=True)
class Way:
    """How a tensor travels compressed."""

    codec: str  # its key in a plan
    strategy: str
    cut: int = 1  # times the usual partitions
    fused: bool = False  # with its neighbours in the bucket, before it is compressed

    @property
    def label(self) -> str:
        """Such as `int4_group (ps)`."""
        return f"{self.codec} ({self.strategy}{', fused' * self.fused})"

    def partitions(self, numel: int, codec: Codec, topology: Topology) -> int:
        """Of a tensor of this length; a codec that must not be cut is not."""
        usual = partitions(numel, codec, self.strategy, topology.world_size)
        return usual * self.cut if cuttable(codec) else usual


def cuttable(codec: Codec) -> bool:
    """Whether what a codec makes of a tensor does not depend on how it is partitioned."""
    return codec.align > 1 or codec.additive is not None


@dataclass(frozen=True)
class Predicted:
    """A step. Seconds."""

    seconds: float  # the whole step
    waiting: float  # of it, what the backward pass does not hide
    backward: float  # until the backward pass is over, from the first bucket on


class Objective:
    """Predicts steps of one model on one cluster; counts them. None as a way is no codec."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        codecs: Mapping[str, Codec],
        topology: Topology,
        costs: Costs,
        workload: Workload,
        loads: int = LOADS,
    ) -> None:
        """`kinds`: of all parameters; a choice for each is what is predicted. `loads`: chains."""
        self.steps = 0
        self._kinds, self._codecs, self._topology = kinds, codecs, topology
        self._costs, self._workload = costs, workload
        owner = {param.index: number for number, kind in enumerate(kinds) for param in kind}
        params = {param.index: param for kind in kinds for param in kind}
        order = sorted(params)
        mine = share_out([params[index].numel for index in order], topology.world_size)
        self._shares = {params[i].name: each for i, each in zip(order, mine, strict=True)}
        self._buckets = [
            (some[-1].ready, [_members(bucket, owner, params) for bucket in some])
            for some in joined(workload.buckets, loads)
        ]
        self._pieces = min(PIECES, max(1, loads // max(1, len(self._buckets))))
        self._known: dict[_Key, Load] = {}
        self._items: dict[_Key, Item] = {}
        self._cut: dict[tuple[object, tuple[int, ...]], tuple[float, float]] = {}

    def costing(self, costs: Costs) -> Objective:
        """The same on another cluster of this topology; parts need not be counted again."""
        made = copy(self)
        made.steps, made._costs, made._known = 0, costs, {}
        return made

    def step(self, choices: Sequence[Way | None]) -> Predicted:
        """The step in which each kind goes its way."""
        made = self.simulated(choices)
        waiting = max(0.0, made.seconds - self._workload.backward)
        return Predicted(made.seconds + self._workload.rest, waiting, made.backward)

    def simulated(self, choices: Sequence[Way | None], events: bool = False) -> Step:
        """Its backward pass and what is synchronized, from the first bucket on."""
        self.steps += 1
        loads = self.loads(choices)
        return simulate_step(loads, self._workload.backward, self._costs.overlap, events)

    def loads(self, choices: Sequence[Way | None]) -> list[Load]:
        """What is simulated beside the backward pass."""
        return list(self._loads(choices))

    def weighed(self, predicted: Predicted, choices: Sequence[Way | None]) -> float:
        """What is compared: seconds, and a little for what is quantized once more by owners."""
        sizes = [sum(param.numel for param in kind) for kind in self._kinds]
        again = [
            size
            for size, way in zip(sizes, choices, strict=True)
            if way is not None and strategies.load(way.strategy).SPREADS
        ]
        return predicted.seconds + ONCE * predicted.waiting * sum(again) / max(1, sum(sizes))

    def _loads(self, choices: Sequence[Way | None]) -> Iterator[Load]:
        for number, (_, buckets) in enumerate(self._buckets):
            members = dict.fromkeys(kind for bucket in buckets for kind in bucket)
            by_way: dict[Way | None, list[int]] = {}
            for kind in members:
                by_way.setdefault(choices[kind], []).append(kind)
            for way, taken in by_way.items():
                key = (number, way, tuple(taken))
                if key not in self._known:
                    self._known[key] = self._load(*key)
                yield self._known[key]

    def _load(self, number: int, way: Way | None, taken: tuple[int, ...]) -> Load:
        ready, buckets = self._buckets[number]
        some = [[p for kind in taken for p in bucket.get(kind, ())] for bucket in buckets]
        if way is None:
            size = sum(param.numel * param.dtype.itemsize for params in some for param in params)
            return Load(ready, native(size, self._costs))
        key = (number, way, taken)
        if key not in self._items:
            self._items[key] = self._item([params for params in some if params], way)
        item = self._items[key]
        pieces = min(self._pieces, max(1, round(item.parts)))
        return Load(ready, self._stages(item, way), pieces)

    def _stages(self, item: Item, way: Way) -> tuple[Stage, ...]:
        cost = self._costs.codecs.get(way.codec)
        if cost is None:  # of a rule: nothing is known but how long its payloads may be
            return native(item.payload, self._costs)
        return stages(way.strategy, item, cost, self._topology, self._costs)

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
            1.0 + (busiest - 1.0) / count,  # of the next bucket it is another one
        )

    def _counted(self, params: Sequence[Param], way: Way) -> tuple[float, float]:
        """Parts of a bucket, and what one rank owns of it at most, over the mean."""
        codec, spread = self._codecs[way.codec], strategies.load(way.strategy).SPREADS
        alike = (spread, codec.align, cuttable(codec), way.cut, way.fused)
        key = (alike, tuple(p.numel for p in params))
        if key not in self._cut:
            owned, parts = Counter[int](), self._parts(params, way)
            for part in parts:
                owned[part.owner] += part.elements
            mean = max(1, sum(p.numel for p in params)) / self._topology.world_size
            self._cut[key] = float(len(parts)), max(1.0, max(owned.values(), default=0) / mean)
        return self._cut[key]

    def _parts(self, params: Sequence[Param], way: Way) -> Sequence[Part]:
        codec = self._codecs[way.codec]
        lengths = [(p.name, p.numel) for p in params]
        if way.fused:
            lengths = [(lengths[0][0], sum(n for _, n in lengths))]
        starts = accumulate((n for _, n in lengths), initial=0)
        tensors = [
            Tensor(name, i, start, n, start)
            for i, ((name, n), start) in enumerate(zip(lengths, starts, strict=False))
        ]
        choices = {
            name: Choice(way.codec, way.strategy, way.partitions(n, codec, self._topology))
            for name, n in lengths
        }
        shares = {} if way.fused else self._shares
        return partition(tensors, choices, self._topology, self._codecs, shares=shares)

    def _payload(self, param: Param, key: str) -> float:
        measured = self._workload.payloads.get((key, param.index))
        if measured is not None:
            return measured * FLOAT_BYTES * param.numel
        return self._codecs[key].payload_bytes(param.numel)


def _members(
    bucket: Bucket, owner: Mapping[int, int], params: Mapping[int, Param]
) -> dict[int, list[Param]]:
    """By kind, what lies in a bucket."""
    found: dict[int, list[Param]] = {}
    for index in bucket.indices:
        if index in owner:  # not one that is sparse
            found.setdefault(owner[index], []).append(params[index])
    return found


def joined(buckets: Sequence[Bucket], most: int) -> Iterator[Sequence[Bucket]]:
    """At most so many runs of neighbours, which are ready with the last; see [Note: joined
    buckets]."""
    n = len(buckets)
    share = [(1 - math.cos(math.pi * i / most)) / 2 for i in range(most + 1)]
    ends = sorted({round(n * each) for each in share} | {n}) if n > most else range(n + 1)
    for first, end in pairwise(ends):
        yield buckets[first:end]
