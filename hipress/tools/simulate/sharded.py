"""Predicted steps of a model of FSDP2, by PyTorch's own collectives and by `hipress.shard`.

Its shards are on all ranks (`fsdp2`), or on those of a node, and replicas on the nodes (`hsdp`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import ceil, prod

from casync.codec import FLOAT_BYTES, Codec
from casync.cost import Costs
from casync.predict.timeline import native, stages_of
from casync.stages import INSIDE, WIRE, Item, Stage
from casync.topology import Topology
from hipress import options
from hipress.choose import evidence
from hipress.choose.plan import Decision
from hipress.errors import ConfigError, unknown
from hipress.model.devices import ON_HOST
from hipress.model.params import Param
from hipress.sharding.collectives import (
    ALL_GATHER,
    REDUCE_SCATTER,
    REPLICAS,
    Collective,
    collectives_of,
)
from hipress.tools.models.own import Description
from hipress.tools.simulate import compared
from hipress.tools.simulate import costs as cost_tables
from hipress.tools.simulate.cluster import FSDP2, HSDP, Cluster
from hipress.tools.simulate.compared import BASELINE, FP32, Method
from hipress.tools.simulate.course import ROOT, Collectives, Part, predict_step
from hipress.tools.simulate.predictions import Row
from hipress.tools.simulate.simulation import PAYS, STATES, Simulation

__all__ = [
    "DEFAULTS",
    "LOSSES",
    "ShardMethod",
    "ShardSimulation",
    "parse",
    "simulation",
]

#: of MixedPrecisionPolicy: gradients reduced in float32, weights gathered in bfloat16
MIXED = f"{FP32}+{BASELINE}"
#: bytes of an element of gradients and of weights in FSDP2's own collectives
_WIDTHS = {FP32: (FLOAT_BYTES, FLOAT_BYTES), MIXED: (FLOAT_BYTES, 2), BASELINE: (2, 2)}
DEFAULTS = {
    FSDP2: (FP32, MIXED, BASELINE, "int4_group+int8_group"),
    HSDP: (FP32, MIXED, BASELINE, "int4_group", "onebit_group"),
}
#: measured losses of trainings by AdamW, as shares of float32's: docs/measurements/losses.md
LOSSES = {"int4_group+int8_group": (0.0008, 0.0028), "int8_group+int8_group": (-0.0003,)}
_WEIGHTS = "int8_group"  # of weights, by default
_IN_FLIGHT = 2  # default of hipress.shard
_OPTIONS = options.make("none", exclude=("@1d",))


@dataclass(frozen=True)
class ShardMethod(Method):
    """Compressors of gradients (`codec`) and weights; without one, FSDP2's own collective. With
    `hsdp` a compressor is that of averages between replicas."""

    sharding: str = FSDP2
    weights: Codec | None = None
    #: bytes of an element of gradients and of weights in FSDP2's own collectives
    widths: tuple[int, int] = _WIDTHS[FP32]

    @property
    def halves(self) -> Mapping[str, tuple[str, Codec | None]]:
        """Texts and codecs by argument of `hipress.shard`."""
        if self.sharding == HSDP:
            return {REPLICAS: (self.text, self.codec)}
        gradients, _, weights = self.text.partition("+")
        return {
            REDUCE_SCATTER: (gradients, self.codec),
            ALL_GATHER: (weights or _WEIGHTS, self.weights),
        }

    @property
    def codecs(self) -> Mapping[str, Codec]:
        """Codecs by text, to find their costs."""
        return {text: codec for text, codec in self.halves.values() if codec is not None}

    def ways(self, topology: Topology) -> tuple[str, ...]:
        """The only way, that of the sharding."""
        return (self.sharding,)

    def loss(self, optimizer: str | None) -> str:
        """The largest measured change of the loss, after 200 or 1000 steps of a small GPT; averages
        between replicas are those of any data-parallel training."""
        if self.text in _WIDTHS:  # of the gradients: devices compute in bfloat16 anyway
            return compared.parse(self.text.partition("+")[0]).loss(optimizer)
        if self.sharding == HSDP:
            return super().loss(optimizer)
        losses = LOSSES.get("+".join(text for text, _ in self.halves.values()), ())
        if not losses or optimizer not in (None, "adam"):
            return "not measured"
        return f"{max(losses):+.1%} on gpt"


def parse(text: str, sharding: str = FSDP2) -> ShardMethod:
    """Parse fp32, fp32+bf16, bf16, or compressors: with hsdp one of replicas, else
    GRADIENTS+WEIGHTS such as int4_group+int8_group, either of them `none` for FSDP2's own
    collective. Raises ConfigError."""
    if text in _WIDTHS:
        return ShardMethod(text, sharding=sharding, widths=_WIDTHS[text])
    if sharding == HSDP:
        return ShardMethod(text, _codec(text), sharding=HSDP)
    gradients, _, weights = text.partition("+")
    return ShardMethod(text, _codec(gradients), weights=_codec(weights or _WEIGHTS))


def _codec(text: str) -> Codec | None:
    if text == "none":
        return None
    method = compared.parse(text)
    if method.strategy != options.AUTO or method.codec is None:
        raise ConfigError(
            f"{text}: with --sharding a method is {', '.join(_WIDTHS)}, or compressors of "
            "gradients and weights without a strategy, such as int4_group+int8_group"
        )
    return method.codec


def simulation(
    sharding: str,
    cluster: Cluster,
    description: Description,
    texts: Sequence[str] = (),
    step: float | None = None,
    micro_batches: int = 1,
) -> ShardSimulation:
    """The simulation of a sharding's methods, by default DEFAULTS. Raises ConfigError."""
    if sharding not in DEFAULTS:
        raise unknown("sharding", sharding, (*DEFAULTS,))
    methods = [parse(each, sharding) for each in texts or DEFAULTS[sharding]]
    return ShardSimulation(cluster, description, methods, step, micro_batches)


def faster_by_replicas(simulation: ShardSimulation, best: Row, optimizer: str | None) -> str:
    """A sentence if replicas on the nodes would be PAYS times as fast as the best method of shards
    on all ranks, and fit into the device's memory, as far as that is known; else ""."""
    cluster, device = simulation.cluster, simulation.cluster.device
    if simulation.hybrid or 1 in (cluster.nodes, cluster.ranks_per_node):
        return ""
    hybrid = simulation.by_replicas()
    first = next(each for each in hybrid.outcomes() if not hybrid.loses(each.method, optimizer))
    memory = hybrid.memory(first.method, optimizer)
    times = best.outcome.step / first.step
    if times < PAYS or 0 < device.holds < memory:
        return ""
    return (
        f"--sharding {HSDP} is {times:.2f} times as fast as {best.outcome.method}: "
        f"{1e3 * first.step:,.1f} ms a step by {first.method}. It takes {memory / 1e9:,.3g} GB a "
        f"rank, and {device.name} is assumed to have "
        f"{f'{device.holds / 1e9:.0f}' if device.holds else 'enough'}."
    )


class ShardSimulation(Simulation):
    """A sharded model's step by several methods. Each numbered module, such as `h.11`, is a group
    of parameters, and the root has the others."""

    def __init__(
        self,
        cluster: Cluster,
        description: Description,
        methods: Sequence[ShardMethod],
        step: float | None = None,
        micro_batches: int = 1,
    ) -> None:
        """Raise ConfigError for a world of one, host compression, and codecs of no shards."""
        if cluster.ranks < 2:
            raise ConfigError(
                f"--sharding {FSDP2} is among two ranks at least, and the cluster has one: raise "
                "`nodes` or `ranks_per_node`"
            )
        if cluster.pcie is not None:
            raise ConfigError(
                "hipress.shard compresses where the model is: leave `pcie` out of the cluster file"
            )
        self.hybrid = methods[0].sharding == HSDP
        if self.hybrid and 1 in (cluster.nodes, cluster.ranks_per_node):
            raise ConfigError(
                f"--sharding {HSDP} shards over the ranks of a node and averages between nodes: it "
                "takes two of each at least"
            )
        super().__init__(cluster, description, methods, step, micro_batches)
        self._ranks = cluster.ranks_per_node if self.hybrid else cluster.ranks
        self._shards = {
            each.name: _shard(replace(each, index=number), self._ranks)
            for number, each in enumerate(description.backwards)
        }
        shards = [*self._shards.values()]
        nodes = dict.fromkeys((REDUCE_SCATTER, ALL_GATHER), cluster.topology)
        nodes[REPLICAS] = Topology.flat(cluster.nodes)
        self._by_text = {each.text: each for each in methods}
        self._ways: dict[str, Mapping[str, Collective]] = {}
        for each in methods:
            compressors = {argument: codec for argument, (_, codec) in each.halves.items()}
            self._ways[each.text] = collectives_of(compressors, shards, _OPTIONS, ON_HOST, nodes)

    def loses(self, method: str, optimizer: str | None) -> bool:
        """True if the averages of replicas by this method lost in measurements."""
        codec = self._by_text[method].codec
        return codec is not None and evidence.worst(codec, optimizer) is not None

    def by_replicas(self) -> ShardSimulation:
        """The same step with shards on a node's ranks, by the methods of HSDP."""
        step = self.alone.step if self._step_given else None
        methods = [parse(each, HSDP) for each in DEFAULTS[HSDP]]
        return ShardSimulation(self.cluster, self._description, methods, step, self.micro_batches)

    def decisions(self, method: str) -> Mapping[str, Sequence[Decision]]:
        """Choices of a method for each parameter, by argument of `hipress.shard`."""
        return {argument: way.decisions for argument, way in self._ways[method].items()}

    @property
    def assumed(self) -> tuple[str, ...]:
        """Texts on assumptions, the groups of parameters among them."""
        text = (
            f"groups of parameters: {len(self._groups) - 1} by numbered modules, and the root, "
            "whose weights are gathered once a step; casts to bfloat16 take no time"
        )
        return (*super().assumed, text)

    def memory(self, method: str, optimizer: str | None) -> float:
        """Bytes that a rank holds: shards of weights, gradients and the optimizer's states (Adam's
        by default); whole weights of the root and of two groups, and gradients under way, or
        all of them between micro-batches; no activations."""
        shard_method, sizes = self._by_text[method], [sum(p.numel for p in g) for g in self._groups]
        floats = (2 + STATES.get(optimizer or "adam", 2)) * FLOAT_BYTES
        largest = max(sizes[1:], default=0)
        of_gradients, of_weights = shard_method.widths
        sums = self._in_flight(method, least=1) * largest
        under_way = of_weights * (sizes[ROOT] + 2 * largest) + of_gradients * sums
        if self.micro_batches > 1:
            under_way += FLOAT_BYTES * sum(sizes)
        states = FLOAT_BYTES * shard_method.state_elements([*self._shards.values()])
        return floats * sum(sizes) + states + self._ranks * under_way

    def _predict(self, method: str, way: str, cluster: Cluster) -> tuple[float, float]:
        collectives = self._collectives(method, cluster)
        adding_up = replace(collectives, scatters=[()] * len(self._groups))
        before = predict_step(self._parts, adding_up)[0] if self.micro_batches > 1 else 0.0
        seconds, backward = predict_step(self._parts, collectives)
        return (self.micro_batches - 1) * before + seconds, backward

    def _stages(self, method: str, way: str, cluster: Cluster) -> list[Stage]:
        collectives = self._collectives(method, cluster)
        gathers = [*collectives.gathers, *collectives.gathers[ROOT + 1 :]]
        chains = (*self.micro_batches * gathers, *collectives.scatters)
        return [stage for chain in chains for stage in chain]

    def _collectives(self, method: str, cluster: Cluster) -> Collectives:
        """[Note: on the host] gloo's own collectives block the host; those of hipress.shard do not,
        but FSDP2 prefetches in the backward pass alone. See docs/use/shard.md."""
        shards, groups = replace(cluster, nodes=1) if self.hybrid else cluster, self._groups
        costs, host = cost_tables.costs(shards, self._costs), cluster.device.host
        ours = ALL_GATHER in self._ways[method]
        averages = self._averages(method, cluster) if self.hybrid else [()] * len(groups)
        return Collectives(
            [self._chain(method, ALL_GATHER, each, costs) for each in groups],
            [
                (*self._chain(method, REDUCE_SCATTER, each, costs), *average)
                for each, average in zip(groups, averages, strict=True)
            ],
            (not host, ours or not host),
            self._in_flight(method),
        )

    def _in_flight(self, method: str, least: int = 0) -> int:
        if self._ways[method].keys() & {REDUCE_SCATTER, REPLICAS}:
            return _IN_FLIGHT
        return max(least, not self.cluster.device.host)

    def _averages(self, method: str, cluster: Cluster) -> list[tuple[Stage, ...]]:
        """Averages of each group's shards between nodes, whose ranks share the link."""
        one = replace(cluster, ranks_per_node=1)
        one = one.with_bandwidth(cluster.bandwidth / cluster.ranks_per_node)
        costs, shard_method = cost_tables.costs(one, self._costs), self._by_text[method]
        return [
            self._compressed_stages(method, REPLICAS, each, 1, one.topology, costs)
            or native(shard_method.widths[0] * sum(p.numel for p in each), costs)
            for each in self._groups
        ]

    def _chain(
        self, method: str, argument: str, shards: Sequence[Param], costs: Costs
    ) -> tuple[Stage, ...]:
        """A gather or scatter among the ranks that hold the shards."""
        width = self._by_text[method].widths[argument == ALL_GATHER]
        size = width * self._ranks * sum(each.numel for each in shards)
        topology = self.cluster.topology
        packed = self._compressed_stages(method, argument, shards, self._ranks, topology, costs)
        return packed or self._native(argument, size, costs)

    def _compressed_stages(
        self,
        method: str,
        argument: str,
        shards: Sequence[Param],
        n: int,
        topology: Topology,
        costs: Costs,
    ) -> tuple[Stage, ...]:
        """A compressed collective of n ranks' shards; empty if it compresses nothing."""
        way = self._ways[method].get(argument)
        codecs = [way.codecs[each.index] for each in shards] if way is not None else []
        if way is None or all(each is None for each in codecs):
            return ()
        packed = [p.numel for p, codec in zip(shards, codecs, strict=True) if codec is not None]
        payload = sum(
            FLOAT_BYTES * p.numel if codec is None else codec.payload_bytes(p.numel)
            for p, codec in zip(shards, codecs, strict=True)
        )
        item = Item(FLOAT_BYTES * n * sum(packed), n * payload, n * len(packed))
        cost = costs.codecs[self._by_text[method].halves[argument][0]]
        return stages_of(way.strategy, item, cost, topology, costs)

    def _native(self, argument: str, size: int, costs: Costs) -> tuple[Stage, ...]:
        """An all-reduce is a reduce-scatter and an all-gather, so each takes half. gloo's
        reduce-scatter is an all-reduce."""
        if not size:
            return ()
        lane = INSIDE if self.hybrid else WIRE
        share = 1.0 if argument == REDUCE_SCATTER and self.cluster.device.host else 0.5
        return tuple(
            replace(stage, lane=lane, seconds=share * stage.seconds, delay=share * stage.delay)
            for stage in native(size, costs)
        )

    @cached_property
    def _layers(self) -> dict[str, int]:
        """Numbers of the groups by name of a module; that of the root is first."""
        names = dict.fromkeys(["", *map(_module, self._shards)])
        return {name: number for number, name in enumerate(names)}

    @cached_property
    def _groups(self) -> list[list[Param]]:
        """A rank's shards by group."""
        groups: list[list[Param]] = [[] for _ in self._layers]
        for name, shard in self._shards.items():
            groups[self._layers[_module(name)]].append(shard)
        return groups

    @cached_property
    def _parts(self) -> list[Part]:
        """Operators of the slowest rank, for which the others wait."""
        return [*self._found_parts()]

    def _found_parts(self) -> Iterator[Part]:
        ready = self.alone.ready
        slower, before = 1 + self.cluster.straggling, 0.0
        forward = self.alone.forward / self.alone.backward if self.alone.backward > 0 else 0.0
        timed = zip((_module(g.name) for g in self.model.gradients), ready, strict=True)
        for module, some in groupby(timed, lambda each: each[0]):
            *_, (_, end) = some
            seconds, before = slower * (end - before), end
            yield Part(self._layers.get(module, ROOT), forward * seconds, seconds)


def _module(name: str) -> str:
    """The numbered module to which a parameter belongs: `h.11` of `h.11.attn.weight`; else ''."""
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def _shard(param: Param, ranks: int) -> Param:
    """A rank's shard, by rows, padded as FSDP2 does."""
    first, *others = param.shape or (1,)
    shape = (ceil(first / ranks), *others)
    return replace(param, shape=shape, numel=prod(shape))
