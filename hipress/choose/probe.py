"""A short measurement of link and codecs, from which "auto" plans.

A setup gives the memory of codecs and the transport of payloads (probe_setup.py). On a device
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

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from casync.codec import Codec
from casync.cost import FREE, Copies, Costs, Transfer, fit
from casync.topology import Topology
from hipress.choose.probe_setup import HOST, ProbeSetup, TimedStream, Wire
from hipress.choose.timing import BURST, REPEATS, codec_cost, overlap_of, slows_of
from hipress.ranks.link import all_reduce_max

SMALL, LARGE, HUGE = 4 << 10, 1 << 20, 4 << 20  # bytes on the link
QUICK, SLOW = 0.005, 0.03  # seconds: below, HUGE is measured too; above, nothing is repeated
MESSAGE, MESSAGES = 1 << 18, 3  # bytes, and number, of messages timed to detect a changed link
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
