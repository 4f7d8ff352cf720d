"""A short look at the link and the codecs, so that "auto" plans from measurements.

Every rank measures at the same time, as in a training step, and the slowest rank counts: its
median for a codec, its best time for the link. A busy machine makes a fast link look slow, but
never a slow one fast, and a link that looks slow would invite compression where it does not pay.
The numbers are exchanged, so all ranks plan from the same ones. The link takes well under a second:
fewer repetitions on a slow one, and all ranks agree on how many. Codecs are measured when they are
compiled, and with them what a thread gains that works beside another one.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from casync.predict.cost import FREE, CodecCost, Costs, Transfer, fit
from casync.topology import Topology
from hipress.ranks.link import all_reduce_max

if TYPE_CHECKING:
    from casync.codec import Codec, Floats

SMALL, LARGE, HUGE = 4 << 10, 1 << 20, 4 << 20  # bytes on the link
QUICK, SLOW = 0.005, 0.03  # seconds: below, HUGE is measured too; above, nothing is repeated
ELEMENTS = (1 << 16, 1 << 20)  # what codecs are timed on
REPEATS = 7
BURST = 0.01  # seconds for which two threads are timed, apart and together
MESSAGE, MESSAGES = 1 << 18, 3  # bytes; how many are timed to notice that the link has changed
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Probe:
    """What was measured, and how long that took."""

    costs: Costs
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers: seconds, and seconds per byte."""
        return {"seconds": self.seconds, **asdict(self.costs)}


def measure(group: dist.ProcessGroup, codecs: Mapping[str, Codec], topology: Topology) -> Probe:
    """Measure the link of `group` and the speed of `codecs`. Every rank must call it."""
    for codec in codecs.values():  # compiling is not part of the measurement
        codec.prepare()
    return timed(lambda: measure_codecs(group, codecs, measure_link(group, codecs, topology)))


def timed(measure: Callable[[], Costs]) -> Probe:
    """What was measured, and how long that took here."""
    start = time.perf_counter()
    return Probe(measure(), time.perf_counter() - start)


def measure_link(
    group: dist.ProcessGroup, codecs: Mapping[str, Codec], topology: Topology
) -> Costs:
    """The link alone, and all-reduces of what the codecs send. Every rank must call it."""
    types = {"float32"} | {c.additive for c in codecs.values() if c.additive is not None}
    share = _contention(group)
    reduces = {name: _curve(_reduce(group, DTYPES[name]), group) for name in sorted(types)}
    inside = Transfer(FREE)
    if topology.nested:
        inside = _transfer(_curve(_exchange(group, [_around(topology.nodes)]), group), share)
    exchange = {
        peers: _transfer(_curve(_exchange(group, targets), group), share)
        for peers, targets in _rounds(topology).items()
    }
    return Costs(exchange, _fit_reduces(reduces, share), {}, inside)


def measure_codecs(group: dist.ProcessGroup, codecs: Mapping[str, Codec], link: Costs) -> Costs:
    """The link's costs with those of codecs, which are compiled. Every rank must call it."""
    costs = {name: _codec_cost(codec, group) for name, codec in codecs.items() if not codec.rounds}
    return replace(link, codecs=costs, overlap=_overlap(group))


def message_seconds(group: dist.ProcessGroup, topology: Topology) -> float:
    """How long a message takes now. Every rank must call it."""
    return _best(_exchange(group, _rounds(topology)[1])(MESSAGE), MESSAGES, group)[0]


def _rounds(topology: Topology) -> dict[int, list[list[int]]]:
    """By number of peers, and for each peer by rank, to whom a rank sends: ranks of other nodes, so
    that all ranks of a node share its link."""
    order = [rank for node in topology.nodes for rank in node]
    step, n = topology.largest if topology.nested else 1, len(order)
    most = max(1, (n - 1) // step)
    each = [
        [order[(order.index(r) + step * k) % n] for r in topology.ranks] for k in range(1, most + 1)
    ]
    return {peers: each[:peers] for peers in sorted({1, most})}


def _around(nodes: Sequence[Sequence[int]]) -> list[int]:
    """By rank, to whom it sends: the next one of its node; itself where it is alone."""
    pairs = {r: node[(i + 1) % len(node)] for node in nodes for i, r in enumerate(node)}
    return [pairs[rank] for rank in sorted(pairs)]


def _fit_reduces(curves: Mapping[str, _Curve], share: float) -> dict[str, Transfer]:
    """The native all-reduce by number type.

    As many bytes of float32 are no more work than of 16-bit numbers: where they took longer, the
    moment was to blame, and would invite compression where it does not pay.
    """
    least: dict[float, float] = {}
    for size, seconds in (point for curve in curves.values() for point in curve.points):
        least[size] = min(seconds, least.get(size, seconds))
    found = {name: _transfer(curve, share) for name, curve in curves.items()}
    return found | {"float32": replace(found["float32"], line=fit([*least.items()]))}


@dataclass(frozen=True)
class _Curve:
    points: Sequence[tuple[float, float]]  # bytes, seconds
    cores: float  # that were busy with the largest, in CPU seconds a second


def _transfer(curve: _Curve, share: float) -> Transfer:
    return Transfer(fit(curve.points), curve.cores * share)


def _contention(group: dist.ProcessGroup) -> float:
    """How many seconds a second of a core takes while all ranks want one."""
    group.barrier().wait()
    start, cpu = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start < BURST:
        sum(range(1000))
    used = max(time.thread_time() - cpu, 1e-3 * BURST)
    return max(1.0, all_reduce_max([(time.perf_counter() - start) / used], group)[0])


Operation = Callable[[int], Callable[[], None]]  # bytes -> something to time


def _exchange(group: dist.ProcessGroup, rounds: Sequence[Sequence[int]]) -> Operation:
    """Send a share of the bytes to each of some ranks, and receive as much, all at the same time.
    `rounds`: for each, by rank, to whom."""
    rank = group.rank()
    pairs = [(targets[rank], targets.index(rank)) for targets in rounds if targets[rank] != rank]

    def prepare(count: int) -> Callable[[], None]:
        share = max(1, count // max(1, len(pairs)))
        out = torch.zeros(share, dtype=torch.uint8)
        into = [torch.empty(share, dtype=torch.uint8) for _ in pairs]

        def run() -> None:
            works = [group.recv([b], p[1], 0) for b, p in zip(into, pairs, strict=True)]
            works += [group.send([out], target, 0) for target, _ in pairs]
            for work in works:
                work.wait()

        return run

    return prepare


def _reduce(group: dist.ProcessGroup, dtype: torch.dtype) -> Operation:
    def prepare(count: int) -> Callable[[], None]:
        data = torch.zeros(count // dtype.itemsize, dtype=dtype)

        def run() -> None:
            group.allreduce([data], dist.AllreduceOptions()).wait()

        return run

    return prepare


def _curve(operation: Operation, group: dist.ProcessGroup) -> _Curve:
    """Two or three sizes; what is repeated depends on agreed numbers only."""
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


def _codec_cost(codec: Codec, group: dist.ProcessGroup) -> CodecCost:
    points = []
    for elements in ELEMENTS:
        group.barrier().wait()
        points.append(all_reduce_max(_time_codec(codec, elements, REPEATS), group))
    sizes = [4.0 * elements for elements in ELEMENTS]
    lines = [fit([*zip(sizes, times, strict=True)]) for times in zip(*points, strict=True)]
    return CodecCost(*lines)


def _overlap(group: dist.ProcessGroup) -> float:
    """What a thread gains that works beside the backward pass: 1 where each has a core of its own,
    0 where they take turns. The least of all ranks."""
    matrix = torch.ones(192, 192)
    numbers = np.ones(1 << 15, np.float32)

    def passing() -> object:
        return matrix @ matrix

    def working() -> object:
        return np.sqrt(numbers)

    group.barrier().wait()
    rounds = [_rounds_in(BURST, each) for each in (passing, working)]
    group.barrier().wait()
    alone = [_seconds(each, count) for each, count in zip((passing, working), rounds, strict=True)]
    group.barrier().wait()
    other = threading.Thread(target=_seconds, args=(working, rounds[1]))
    start = time.perf_counter()
    other.start()
    _seconds(passing, rounds[0])
    other.join()
    both = time.perf_counter() - start
    gain = sum(alone) / both - 1
    return 1.0 - all_reduce_max([1.0 - min(1.0, max(0.0, gain))], group)[0]


def _rounds_in(seconds: float, call: Callable[[], object]) -> int:
    """How many calls that takes."""
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or count == 0:
        call()
        count += 1
    return count


def _seconds(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start


def _time_codec(codec: Codec, elements: int, repeats: int) -> list[float]:
    """Median seconds to encode, to decode and add, and to do both with an encode after it, with
    state if it keeps any."""
    gradient = np.random.default_rng(0).standard_normal(elements, np.float32)
    table = np.array([[0, elements, 0, 0, 0]], np.int64)
    out, at = np.zeros(codec.payload_bytes(elements), np.uint8), np.zeros(1, np.int64)
    again = np.zeros_like(out)
    state = codec.init_state(elements) if codec.stateful else None
    times: list[list[float]] = [[], [], []]
    total = np.zeros(elements, np.float32)
    for step in range(repeats + 1):
        begin = [time.perf_counter()]
        used = codec.encode_batch(gradient, table, out, at, state=state, step=step)
        begin.append(time.perf_counter())
        codec.decode_batch(out, table, at, used, total, add=True, step=step)
        begin.append(time.perf_counter())
        if codec.reencodes:
            _hop(codec, total, table, again, at, (out, at, used), state, step)
        begin.append(time.perf_counter())
        for series, first, last in zip(times, begin, begin[1:], strict=False):
            series.append(last - first)
    return [statistics.median(each[1:]) for each in times]


def _hop(
    codec: Codec,
    total: Floats,
    table: Any,
    out: Any,
    at: Any,
    incoming: Any,
    state: Any,
    step: int,
) -> None:
    """Decode, add and encode, in one kernel where there is one."""
    if codec.fuses:
        codec.encode_batch(
            total, table, out, at, state=state, step=step, writeback=True, incoming=incoming
        )
        return
    payload, at_, used = incoming
    codec.decode_batch(payload, table, at_, used, total, add=True, step=step)
    codec.encode_batch(total, table, out, at, state=state, step=step, writeback=True)


def _best(run: Callable[[], None], repeats: int, group: dist.ProcessGroup) -> tuple[float, float]:
    """Best time on the slowest rank, and the cores that this kept busy on the busiest."""
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
