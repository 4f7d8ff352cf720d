"""Published systems: chains of stages for a gradient, on lanes of one representative node.

Sizes are bytes of gradient in a node; every GPU holds the same number. Lanes are those of
casync.stages, `pcie`, and `cpu` (a node's cores). The planner's own engine simulates steps.
Horovod's collectives are separate: each one takes the gradients that are ready when the one before
ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from casync.predict.timeline import Load, simulate_step
from casync.stages import INSIDE, WIRE, WORK, Stage
from hipress.tools.models.known import Model
from hipress.tools.models.work import Speed
from hipress.tools.simulate.cluster import Cluster

__all__ = ["Features", "Kernels", "Stack", "Training", "byteps", "hipress", "inline", "ring"]

V100 = Speed(13e12, 720e9)  # as devices.py has it; here only shares of a step follow from it
SLOT = 4 << 20  # bytes at which HiPress closes a message of its bulk communication
BATCH = 8  # small gradients whose kernels it starts together
LEAST = 1 << 20  # bytes: smaller gradients stay raw, by the threshold of HiPress's scripts


@dataclass(frozen=True)
class Training:
    """A model's step on one GPU, in seconds."""

    sizes: tuple[float, ...]  # bytes, in the order of the backward pass
    ready: tuple[float, ...]  # seconds of the backward pass
    forward: float
    backward: float

    @classmethod
    def of(cls, model: Model, step: float) -> Training:
        """The training of a model with this step time; its shares are those of the roofline."""
        alone = model.timed(V100).scaled(step)
        sizes = tuple(4.0 * each.numel for each in model.gradients)
        return cls(sizes, alone.ready, alone.forward, alone.backward)

    @property
    def step(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Kernels:
    """A codec of one of these systems, in seconds per byte of gradient."""

    rate: float  # payload bytes
    encode: float
    decode: float  # and add
    launch: float = 3e-5  # seconds of a call


@dataclass(frozen=True)
class Stack:
    """A communication library's costs besides its link's."""

    server: float = 2e10  # bytes a second that a node's cores add
    most: float = float(64 << 20)  # bytes of a fused collective
    cycle: float = 1e-3  # seconds between looks at the ready gradients
    partition: float = float(4 << 20)  # bytes of a message
    crosses: bool = False  # whether the next forward pass begins before all are averaged


def ring(work: Training, cluster: Cluster, stack: Stack, width: float = 1.0) -> float:
    """Seconds of a step by all-reduces of fused gradients, each `width` times as many bytes; the
    link's `collective` is the time of each of the 2(N-1) hops besides its bytes."""
    n, link = cluster.ranks, cluster.inside if cluster.nodes == 1 else cluster.between

    def seconds(size: float, _: int) -> float:
        return 2 * (n - 1) * (cluster.between.collective + width * size / n / link.speed)

    done, over = collectives(work, seconds, stack, cluster.device.slows)
    return _finished(work, done, over, cluster, stack.crosses)


def collectives(
    work: Training, seconds: Callable[[float, int], float], stack: Stack, slows: float
) -> tuple[list[float], float]:
    """Each collective takes all gradients that are ready when the one before ends, up to a limit.

    seconds: time of a collective, from its bytes and number of tensors. Returns the times at which
    gradients are averaged, and the end of the backward pass, which is slower during a collective.
    """
    done, clock = [0.0] * len(work.sizes), _Clock(work.backward, slows)
    first = 0
    while first < len(work.sizes):
        clock.wait(work.ready[first] - clock.progress)
        clock.wait(stack.cycle / 2)
        end = _taken(work, first, clock.progress, stack.most)
        clock.send(seconds(sum(work.sizes[first:end]), end - first))
        done[first:end] = [clock.now] * (end - first)
        first = end
    clock.wait(work.backward - clock.progress)
    return done, clock.over


def _taken(work: Training, first: int, progress: float, most: float) -> int:
    """End of a group that is sent together: at least one tensor."""
    end, size = first + 1, work.sizes[first]
    while end < len(work.sizes) and work.ready[end] <= progress + 1e-12:
        size += work.sizes[end]
        if size > most:
            break
        end += 1
    return end


class _Clock:
    """The time, and the progress of the backward pass."""

    def __init__(self, backward: float, slows: float) -> None:
        self.backward, self.slows = backward, slows
        self.now = self.progress = self.over = 0.0

    def wait(self, seconds: float) -> None:
        self._pass(max(0.0, seconds), 1.0)

    def send(self, seconds: float) -> None:
        self._pass(seconds, 1.0 - self.slows)

    def _pass(self, seconds: float, speed: float) -> None:
        left = self.backward - self.progress
        if 0 < left <= seconds * speed:
            self.over = self.now + left / speed
        self.progress = min(self.backward, self.progress + seconds * speed)
        self.now += seconds


def byteps(work: Training, cluster: Cluster, stack: Stack, kernels: Kernels | None = None) -> float:
    """Seconds of a step by servers on the nodes' CPUs, which compress if anything does; layers that
    the next forward pass needs first are sent first."""
    loads = [
        Load(
            ready,
            tuple(_served(size, cluster, stack, kernels)),
            _cut(size, stack.partition),
            -ready,
        )
        for size, ready in zip(work.sizes, work.ready, strict=True)
    ]
    step = simulate_step(loads, work.backward, 0.0)
    return _finished(work, step.done, step.backward, cluster, stack.crosses)


def _served(
    size: float, cluster: Cluster, stack: Stack, kernels: Kernels | None
) -> Iterator[Stage]:
    """Reduce-scatter inside, to the host, to servers, and back; with one node, inside alone."""
    m, local = cluster.nodes, _inside(size, cluster)
    if m == 1:
        yield from (local, local)
        return
    host = Stage("pcie", size / (cluster.pcie or math.inf))
    messages = _cut(size, stack.partition) * cluster.between.collective
    rate = 1.0 if kernels is None else kernels.rate
    sent = _wire(cluster, size * (m - 1) / m * rate, messages)
    yield from (local, host)
    if kernels is None:
        yield from (sent, Stage("cpu", size / stack.server), sent)
    else:
        served = kernels.decode * size + kernels.encode * size / m
        yield from (Stage("cpu", kernels.encode * size), sent, Stage("cpu", served))
        yield from (sent, Stage("cpu", kernels.decode * size))
    yield from (host, local)


def _inside(size: float, cluster: Cluster) -> Stage:
    """A reduce-scatter, or all-gather, within a node."""
    g, link = cluster.ranks_per_node, cluster.inside
    return Stage(INSIDE, size * (g - 1) / g / link.speed + link.latency * (g > 1))


def _wire(cluster: Cluster, size: float, besides: float = 0.0, latencies: float = 1) -> Stage:
    link = cluster.between
    seconds = size / link.speed + besides
    return Stage(WIRE, seconds, link.latency * latencies, slows=cluster.device.slows)


def _cut(size: float, most: float) -> int:
    return max(1, math.ceil(size / most))


@dataclass(frozen=True)
class Features:
    """Parts of HiPress, in the order in which they are switched on."""

    gpu: bool = True  # kernels on the GPU, else on the CPU
    pipeline: bool = True  # operators and transfers overlap
    bulk: bool = True  # a slot's messages, and small kernels, go together
    planned: bool = True  # SeCoPa cuts gradients


def hipress(
    work: Training,
    cluster: Cluster,
    stack: Stack,
    kernels: Kernels,
    strategy: str = "ps",
    features: Features = Features(),
    overlap: float = 0.0,
) -> float:
    """Seconds of a step: raw inside a node, compressed between one GPU of each. strategy: "ps" or
    "ring"; the link's `collective` is the fixed cost of a message."""
    loads = []
    for size, ready in zip(work.sizes, work.ready, strict=True):
        packed = size >= LEAST
        compressed = _Compressed(size, cluster, kernels, features)
        chain = compressed.chain(strategy) if packed else compressed.raw()
        pieces = compressed.cuts if packed else 1
        if not features.pipeline:
            total = sum(stage.seconds + stage.delay for stage in chain)
            chain, pieces = (Stage(WIRE, total, slows=cluster.device.slows),), 1
        loads.append(Load(ready, chain, pieces))
    made_step = simulate_step(loads, work.backward, overlap)
    return _finished(work, made_step.done, made_step.backward, cluster, stack.crosses)


@dataclass(frozen=True)
class _Compressed:
    """A gradient on its way through HiPress."""

    size: float
    cluster: Cluster
    kernels: Kernels
    features: Features

    @property
    def cuts(self) -> int:
        """Number of partitions."""
        return min(self.cluster.nodes, _cut(self.size, SLOT)) if self.features.planned else 1

    def raw(self) -> tuple[Stage, ...]:
        """Stages of uncompressed gradients, several in a message."""
        m, local = self.cluster.nodes, _inside(self.size, self.cluster)
        sent = _wire(self.cluster, self.size * (m - 1) / m)
        return (local, sent, sent, local)

    def chain(self, strategy: str) -> tuple[Stage, ...]:
        """Stages: inside, encode, between nodes, decode, inside."""
        local = _inside(self.size, self.cluster)
        encode = self.work(self.kernels.encode * self.size, self.cuts)
        decode = self.work(self.kernels.decode * self.size, self.cuts)
        middle = self.served() if strategy == "ps" else self.hops()
        return (local, encode, *middle, decode, local)

    def work(self, seconds: float, calls: float) -> Stage:
        """Kernels, launched together if that feature is on."""
        calls = max(1.0, calls / BATCH) if self.features.bulk else calls
        return Stage(WORK if self.features.gpu else "cpu", seconds + self.kernels.launch * calls)

    @property
    def messages(self) -> float:
        """Messages to a peer: a share of a slot's message if they are joined."""
        payload = self.kernels.rate * self.size
        return payload / SLOT if self.features.bulk else float(self.cuts)

    def served(self) -> Iterator[Stage]:
        """Stages to owners and back; an uncut gradient has one owner, for whom all wait."""
        m, k, kernels = self.cluster.nodes, self.cuts, self.kernels
        share = (m - 1) / m
        spread = max(1.0, m / k) ** (0.5 if self.features.bulk else 1.0)
        cost = self.cluster.between.collective * share * (1 if self.features.bulk else m)
        sent = _wire(self.cluster, kernels.rate * self.size * share * spread, self.messages * cost)
        merged = (kernels.decode * share + kernels.encode / m) * self.size * spread
        yield from (sent, self.work(merged, k * share + k / m), sent)

    def hops(self) -> Iterator[Stage]:
        """Stages around: M-1 hops that decode, add and encode, and M-1 that only pass on."""
        m, k, kernels = self.cluster.nodes, self.cuts, self.kernels
        share, idle = (m - 1) / m, max(1.0, m / k)
        if self.features.pipeline:
            idle = min(2.0, idle)
        cost = (m - 1) * max(self.messages, k / m) * self.cluster.between.collective
        size = kernels.rate * self.size * share * idle
        hop = self.work((kernels.decode + kernels.encode) * self.size * share, 2 * k * share)
        yield from (_wire(self.cluster, size, cost, m - 1), hop)
        yield _wire(self.cluster, size, cost, 0)


def inline(
    work: Training, cluster: Cluster, stack: Stack, kernels: Kernels, calls: float, launch: float
) -> float:
    """Seconds of a step if the framework's own stream compresses.

    The backward pass then waits for it, and all ranks gather and decode all payloads. calls:
    kernels per gradient.
    """
    stop, ready = 0.0, []
    for size, at in zip(work.sizes, work.ready, strict=True):
        stop += kernels.encode * size + calls * launch
        ready.append(at + stop)
    n, link = cluster.ranks, cluster.inside if cluster.nodes == 1 else cluster.between

    def seconds(size: float, _: int) -> float:
        payload = (n - 1) * kernels.rate * size
        hops = (n - 1) * cluster.between.collective  # half of an all-reduce's
        return hops + payload / link.speed + kernels.decode * size * n

    slower = Training(work.sizes, tuple(ready), work.forward, work.backward + stop)
    done, over = collectives(slower, seconds, stack, cluster.device.slows)
    tail = calls / 2 * launch * len(work.sizes)
    return _finished(work, done, over, cluster, False) + tail


def _finished(
    work: Training, done: Sequence[float], over: float, cluster: Cluster, crosses: bool
) -> float:
    """Seconds of a step. crosses: a layer of the next forward pass waits for its own only."""
    extra = cluster.straggling * work.step
    if not crosses:
        return extra + work.forward + max(over, *done)
    now, last = over, work.backward
    for at, ready in sorted(zip(done, work.ready, strict=True), key=lambda each: -each[1]):
        now = max(now, at) + work.forward * (last - ready) / work.backward
        last = ready
    return extra + now + work.forward * last / work.backward
