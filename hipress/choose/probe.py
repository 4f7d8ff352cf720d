"""A short measurement of link and codecs, from which "auto" plans.

A setup gives the memory of codecs and the transport of payloads. On a device
codecs are timed by events, not by the return of calls, and copies between it and the host are
timed, too.

All ranks measure at the same time, as in a training step, and the slowest rank counts: its median
for a codec, its best time for the link. A busy machine makes a fast link look slow, but never a
slow one fast, and a link that looks slow would invite compression that does not pay. The numbers
are exchanged, so all ranks plan from the same ones. The link takes well under a second: a slow one
has fewer repetitions, whose number all ranks agree on. Codecs are measured when they are compiled,
together with the gain of a second thread.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from casync.codec import Codec, one_piece
from casync.cost import FREE, CodecCost, Copies, Costs, Transfer, fit
from casync.memory import Event, Memory, Moment, Stream
from casync.memory.host import HostMemory
from casync.rounds import as_rounds
from casync.topology import Topology
from casync.transports import Member, SlotTransport
from hipress.codecs import state_of
from hipress.ranks.groups import all_reduce_max

__all__ = ["HOST", "ProbeSetup"]

SMALL, LARGE, HUGE = 4 << 10, 1 << 20, 4 << 20  # bytes on the link
QUICK, SLOW = 0.005, 0.03  # seconds: below, HUGE is measured too; above, nothing is repeated
MESSAGE, MESSAGES = 1 << 18, 3  # bytes, and number, of messages timed to detect a changed link
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ELEMENTS = (1 << 16, 1 << 20)  # sizes for the timing of codecs
REPEATS = 7
SENDS = 16  # transfers during which a backward pass is timed
BURST = 0.01  # seconds for the timing of two threads, apart and together
#: a small backward pass, on a device and on the host: side of a matrix; elements of codec work
SIDES, WORKED = (2048, 192), (1 << 24, 1 << 15)
Received = Sequence[tuple[torch.Tensor, int]]  # buffers, and the ranks that they come from


class Wire(Protocol):
    """A link between ranks; calls return when the bytes have been moved."""

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros in the memory from which the wire sends."""
        ...

    def swap(self, out: torch.Tensor, targets: Sequence[int], into: Received) -> None:
        """Send `out` to each target, and receive at the same time."""
        ...

    def reduce(self, data: torch.Tensor) -> None:
        """All-reduce `data` in place."""
        ...


@dataclass(frozen=True)
class _ByGroup:
    group: dist.ProcessGroup

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device="cpu")

    def swap(self, out: torch.Tensor, targets: Sequence[int], into: Received) -> None:
        works = [self.group.recv([data], source, 0) for data, source in into]
        works += [self.group.send([out], target, 0) for target in targets]
        for work in works:
            work.wait()

    def reduce(self, data: torch.Tensor) -> None:
        self.group.allreduce([data], dist.AllreduceOptions()).wait()


@dataclass(frozen=True)
class _BySlots:
    transport: SlotTransport
    memory: Memory

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory.zeros(count, dtype)

    def swap(self, out: torch.Tensor, targets: Sequence[int], into: Received) -> None:
        name = "a message of the probe"
        received = [Member("recv", (source,), data, name) for data, source in into]
        self._exchange([*received, *(Member("send", (to,), out, name) for to in targets)])

    def reduce(self, data: torch.Tensor) -> None:
        ranks = tuple(range(self.transport.world_size))
        self._exchange([Member("reduce", ranks, data, "an all-reduce of the probe")])

    def _exchange(self, transfers: Sequence[Member]) -> None:
        stream = TimedStream(self.memory.caller(), self.memory.event())
        stream.run(lambda: self.transport.exchange(transfers))


@dataclass(frozen=True)
class TimedStream:
    """A stream for whose work the host waits."""

    stream: Stream
    done: Event

    @classmethod
    def of(cls, memory: Memory) -> TimedStream:
        """A new stream."""
        return cls(memory.stream(), memory.event())

    def run(self, work: Callable[[], object], count: int = 1) -> None:
        """Run the work `count` times, and wait for it."""
        for _ in range(count):
            self.stream.run(work)
        self.stream.record(self.done)
        self.done.wait()


@dataclass(frozen=True)
class ProbeSetup:
    """Memories of the backward pass and of codecs. `slots`: transport of payloads; None: gloo."""

    memory: Memory  # memory of codecs
    backward: Memory  # memory of the backward pass
    slots: SlotTransport | None = None

    def wire(self, group: dist.ProcessGroup) -> Wire:
        """The wire of this setup between the ranks of a gloo group."""
        return _ByGroup(group) if self.slots is None else _BySlots(self.slots, self.memory)

    @property
    def copies(self) -> bool:
        """True if gradients or payloads are copied between a device and the host."""
        return self.slots is None and not self.backward.host

    def abort(self) -> None:
        """Disconnect at once: nobody waits for a peer that is gone."""
        if self.slots is not None:
            self.slots.abort()

    def close(self) -> None:
        """Disconnect after current operations are done."""
        if self.slots is not None:
            self.slots.close()


HOST = ProbeSetup(HostMemory(), HostMemory())


@dataclass(frozen=True)
class Probe:
    """Measured costs, and the seconds that measuring took."""

    costs: Costs
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON: seconds, and seconds per byte."""
        return {"seconds": self.seconds, **asdict(self.costs)}


def measure_link(
    group: dist.ProcessGroup,
    codecs: Mapping[str, Codec],
    topology: Topology,
    setup: ProbeSetup = HOST,
) -> Costs:
    """Measure the link, and all-reduces of the number types of codecs. group: a gloo group, for
    agreement. Every rank must call this."""
    types = {"float32"} | {c.additive for c in codecs.values() if c.additive is not None}
    wire = setup.wire(group)
    with setup.memory.current():
        # a device's transfers take no cores
        share = _contention(group) if setup.memory.host else 0.0
        reduces = {name: _curve(_reduce(wire, DTYPES[name]), group) for name in sorted(types)}
        inside = Transfer(FREE)
        if topology.nested:
            around = _exchange(wire, group.rank(), [_around(topology.nodes)])
            inside = _transfer(_curve(around, group), share)
        exchange = {
            peers: _transfer(_curve(_exchange(wire, group.rank(), targets), group), share)
            for peers, targets in _rounds(topology).items()
        }
        slows = slows_of(group, setup, _reduce(wire, DTYPES["float32"])(MESSAGE))
    costs = Costs(exchange, _fit_reduces(reduces, share), {}, inside, copies=_copies(group, setup))
    return costs if slows == 0 else _slowing(costs, slows)


def _slowing(costs: Costs, slows: float) -> Costs:
    """Costs whose transfers slow a device's backward pass."""
    return replace(
        costs,
        exchange={peers: replace(each, slows=slows) for peers, each in costs.exchange.items()},
        reduce={name: replace(each, slows=slows) for name, each in costs.reduce.items()},
        inside=replace(costs.inside, slows=slows),
    )


def measure_codecs(
    group: dist.ProcessGroup, codecs: Mapping[str, Codec], link: Costs, setup: ProbeSetup = HOST
) -> Costs:
    """The link's costs with those of compiled codecs. Every rank must call this."""
    with setup.memory.current():
        costs = {name: codec_cost(codec, group, setup.memory) for name, codec in codecs.items()}
        return replace(link, codecs=costs, overlap=overlap_of(group, setup))


def message_seconds(
    group: dist.ProcessGroup, topology: Topology, setup: ProbeSetup = HOST
) -> float:
    """Seconds of a message now. Every rank must call this."""
    with setup.memory.current():
        message = _exchange(setup.wire(group), group.rank(), _rounds(topology)[1])(MESSAGE)
        return _best(message, MESSAGES, group)[0]


def _rounds(topology: Topology) -> dict[int, list[list[int]]]:
    """Targets of sends: by number of peers, and for each peer by rank. They are ranks of other
    nodes, so that all ranks of a node share its link."""
    order = [rank for node in topology.nodes for rank in node]
    step, n = topology.largest if topology.nested else 1, len(order)
    most = max(1, (n - 1) // step)
    each = [
        [order[(order.index(r) + step * k) % n] for r in topology.ranks] for k in range(1, most + 1)
    ]
    return {peers: each[:peers] for peers in sorted({1, most})}


def _around(nodes: Sequence[Sequence[int]]) -> list[int]:
    """Target of each rank: the next rank of its node; itself if it is alone."""
    pairs = {r: node[(i + 1) % len(node)] for node in nodes for i, r in enumerate(node)}
    return [pairs[rank] for rank in sorted(pairs)]


def _fit_reduces(curves: Mapping[str, _Curve], share: float) -> dict[str, Transfer]:
    """The native all-reduce by number type.

    Equally many bytes of float32 are no more work than of 16-bit numbers: if they took longer, the
    machine was busy, and their cost would invite compression that does not pay.
    """
    least: dict[float, float] = {}
    for size, seconds in (point for curve in curves.values() for point in curve.points):
        least[size] = min(seconds, least.get(size, seconds))
    transfers = {name: _transfer(curve, share) for name, curve in curves.items()}
    return transfers | {"float32": replace(transfers["float32"], line=fit([*least.items()]))}


@dataclass(frozen=True)
class _Curve:
    points: Sequence[tuple[float, float]]  # bytes, seconds
    cores: float  # busy with the largest size, in CPU seconds per second


def _transfer(curve: _Curve, share: float) -> Transfer:
    return Transfer(fit(curve.points), curve.cores * share)


def _contention(group: dist.ProcessGroup) -> float:
    """Seconds for a second of a core while all ranks want one."""
    group.barrier().wait()
    start, cpu = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start < BURST:
        sum(range(1000))
    used = max(time.thread_time() - cpu, 1e-3 * BURST)
    return max(1.0, all_reduce_max([(time.perf_counter() - start) / used], group)[0])


Operation = Callable[[int], Callable[[], None]]  # bytes -> something to time


def _exchange(wire: Wire, rank: int, rounds: Sequence[Sequence[int]]) -> Operation:
    """Send an equal share of the bytes to each of some ranks, and receive as much, all at once.
    rounds: for each peer, the target by rank."""
    pairs = [(targets[rank], targets.index(rank)) for targets in rounds if targets[rank] != rank]

    def prepare(count: int) -> Callable[[], None]:
        share = max(1, count // max(1, len(pairs)))
        out = wire.zeros(share, torch.uint8)
        into = [(wire.zeros(share, torch.uint8), source) for _, source in pairs]
        return partial(wire.swap, out, [target for target, _ in pairs], into)

    return prepare


def _reduce(wire: Wire, dtype: torch.dtype) -> Operation:
    return lambda count: partial(wire.reduce, wire.zeros(count // dtype.itemsize, dtype))


def _copies(group: dist.ProcessGroup, setup: ProbeSetup) -> Copies | None:
    """Copies between a device and pinned memory, each way."""
    if not setup.copies:
        return None
    memory = setup.backward
    with memory.current():
        stream = TimedStream.of(memory)

        def way(leaves: bool) -> Operation:
            def prepare(count: int) -> Callable[[], None]:
                host, device = memory.staging(count), memory.zeros(count, torch.uint8)
                ends = (host, device) if leaves else (device, host)
                return partial(stream.run, partial(memory.copy, *ends))

            return prepare

        leave, enter = (fit(_curve(way(leaves), group).points) for leaves in (True, False))
    return Copies(leave, enter, setup.memory.host)


def _curve(operation: Operation, group: dist.ProcessGroup) -> _Curve:
    """Times of two or three sizes; repetitions depend only on agreed numbers."""
    points = [(float(SMALL), _best(operation(SMALL), REPEATS, group)[0])]
    first, cores = _best(operation(LARGE), 1, group)
    again = first
    if first <= SLOW:
        again, cores = _best(operation(LARGE), REPEATS, group)
    points.append((float(LARGE), again))
    if again < QUICK:
        seconds, cores = _best(operation(HUGE), REPEATS, group)
        points.append((float(HUGE), seconds))
    return _Curve(points, cores)


def _best(run: Callable[[], None], repeats: int, group: dist.ProcessGroup) -> tuple[float, float]:
    """Best time on the slowest rank, and the busy cores on the busiest rank."""
    times = []
    group.barrier().wait()
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    cores = (time.process_time() - cpu) / (time.perf_counter() - start)
    best, busiest = all_reduce_max([min(times), cores], group)
    return best, busiest


def codec_cost(codec: Codec, group: dist.ProcessGroup, memory: Memory) -> CodecCost:
    """Costs of a compiled codec. Every rank must call this."""
    points = []
    for elements in ELEMENTS:
        if codec.rounds:
            run = _in_rounds(codec, elements, group.size(), memory)
        else:
            run = _calls(codec, elements, memory)
        group.barrier().wait()
        points.append(all_reduce_max(_medians(run, REPEATS), group))
    sizes = [4.0 * elements for elements in ELEMENTS]
    lines = [fit([*zip(sizes, times, strict=True)]) for times in zip(*points, strict=True)]
    return CodecCost(*lines)


def overlap_of(group: dist.ProcessGroup, setup: ProbeSetup) -> float:
    """Gain of a thread or stream beside the backward pass: 1 if each has a core or device of its
    own, 0 if they take turns. The least over the ranks, each of which must call this."""
    side, elements = SIDES[setup.backward.host], WORKED[setup.memory.host]
    matrix = setup.backward.zeros(side * side, torch.float32).view(side, side)
    product = setup.backward.zeros(side * side, torch.float32).view(side, side)
    numbers = setup.memory.zeros(elements, torch.float32)
    passing = _Loop(setup.backward, lambda: product.addmm_(matrix, matrix))
    working = _Loop(setup.memory, numbers.sqrt_)
    group.barrier().wait()
    rounds = [each.rounds_in(BURST) for each in (passing, working)]
    group.barrier().wait()
    alone = [each.run(count) for each, count in zip((passing, working), rounds, strict=True)]
    group.barrier().wait()
    other = threading.Thread(target=working.run, args=(rounds[1],))
    start = time.perf_counter()
    other.start()
    passing.run(rounds[0])
    other.join()
    both = time.perf_counter() - start
    gain = sum(alone) / both - 1
    return 1.0 - all_reduce_max([1.0 - min(1.0, max(0.0, gain))], group)[0]


def slows_of(group: dist.ProcessGroup, setup: ProbeSetup, send: Callable[[], None]) -> float:
    """Share of its speed that a device's backward pass loses while links are busy, on the slowest
    rank. send: a transfer of all ranks. Every rank must call this; 0 on a host, where transfers
    take cores instead."""
    if setup.backward.host:
        return 0.0
    side, sent = SIDES[False], [0.0]
    matrix = setup.backward.zeros(side * side, torch.float32).view(side, side)
    product = setup.backward.zeros(side * side, torch.float32).view(side, side)
    passing = _Loop(setup.backward, lambda: product.addmm_(matrix, matrix))

    def sending() -> None:
        start = time.perf_counter()
        with setup.memory.current():
            for _ in range(SENDS):
                send()
        sent[0] = time.perf_counter() - start

    rounds = passing.rounds_in(BURST)
    group.barrier().wait()
    alone = passing.run(rounds)
    group.barrier().wait()
    other = threading.Thread(target=sending)
    other.start()
    both = passing.run(rounds)
    other.join()
    lost = (both - alone) / max(1e-9, min(both, sent[0]))
    return all_reduce_max([min(1.0, max(0.0, lost))], group)[0]


class _Loop:
    """A call that is repeated on a stream of its own."""

    def __init__(self, memory: Memory, call: Callable[[], object]) -> None:
        self._memory, self._call, self._stream = memory, call, TimedStream.of(memory)

    def run(self, count: int) -> float:
        """Run `count` calls; return the seconds."""
        start = time.perf_counter()
        with self._memory.current():
            self._stream.run(self._call, count)
        return time.perf_counter() - start

    def rounds_in(self, seconds: float) -> int:
        """Number of calls that take about `seconds`."""
        count = 1
        while self.run(count) < seconds:
            count *= 2
        return count


def _medians(run: Callable[[int], Sequence[Moment]], repeats: int) -> list[float]:
    """Median seconds between the moments of a run, which takes the step; the first is a warm-up."""
    times = [run(step) for step in range(repeats + 1)][1:]
    durations = [[end.since(start) for start, end in pairwise(each)] for each in times]
    return [statistics.median(each) for each in zip(*durations, strict=True)]


def _in_rounds(
    codec: Codec, elements: int, workers: int, memory: Memory
) -> Callable[[int], Sequence[Moment]]:
    """A run that encodes all rounds, as if all ranks had the same, and decodes; without a hop."""
    rounds, gradient = as_rounds(codec), _normal(elements, memory)
    x, whole = memory.array(gradient), gradient.clone()
    table, at = one_piece(elements)
    state = state_of(codec, memory, elements)

    def run(step: int) -> Sequence[Moment]:
        gradient.copy_(whole)
        sums: list[tuple[Any, Any]] = []
        begun = memory.moment()
        for number, each in enumerate(codec.rounds):
            out = memory.array(memory.zeros(each.payload_bytes(elements), torch.uint8))
            rounds.encode_round(
                number, x, table, out, at, sums, workers=workers, state=state, step=step
            )
            sums.append((out, at))
        encoded = memory.moment()
        rounds.decode_rounds(x, table, sums, workers=workers, state=state, step=step)
        decoded = memory.moment()
        return begun, encoded, decoded, decoded

    return run


def _normal(elements: int, memory: Memory) -> torch.Tensor:
    values = np.random.default_rng(0).standard_normal(elements, np.float32)
    return memory.zeros(elements, torch.float32).copy_(torch.from_numpy(values))


def _calls(codec: Codec, elements: int, memory: Memory) -> Callable[[int], Sequence[Moment]]:
    """A run that encodes, decodes and adds, and does both and encodes; with the codec's state."""
    x = memory.array(_normal(elements, memory))
    sums = memory.array(memory.zeros(elements, torch.float32))
    table, at = one_piece(elements)
    out, again = (
        memory.array(memory.zeros(codec.payload_bytes(elements), torch.uint8)) for _ in range(2)
    )
    state = state_of(codec, memory, elements) or None

    def run(step: int) -> Sequence[Moment]:
        begun = memory.moment()
        used = codec.encode_batch(x, table, out, at, state=state, step=step)
        encoded = memory.moment()
        codec.decode_batch(out, table, at, used, sums, add=True, step=step)
        decoded = memory.moment()
        if codec.reencodes:
            _hop(codec, sums, table, again, at, (out, at, used), state, step)
        return begun, encoded, decoded, memory.moment()

    return run


def _hop(
    codec: Codec, total: Any, table: Any, out: Any, at: Any, incoming: Any, state: Any, step: int
) -> None:
    """Decode, add and encode; in one kernel if the codec fuses them."""
    if codec.fuses:
        codec.encode_batch(
            total, table, out, at, state=state, step=step, writeback=True, incoming=incoming
        )
        return
    payload, at_, used = incoming
    codec.decode_batch(payload, table, at_, used, total, add=True, step=step)
    codec.encode_batch(total, table, out, at, state=state, step=step, writeback=True)
