"""A short look at the link and the codecs, so that "auto" plans from measurements.

Every rank measures at the same time, as in a training step, and the slowest rank counts: its
median for a codec, its best time for the link. A busy machine makes a fast link look slow, but
never a slow one fast, and a link that looks slow would invite compression where it does not pay.
The numbers are exchanged, so all ranks plan from the same ones. Takes well under two seconds:
fewer repetitions on a slow link, and all ranks agree on how many.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from casync.predict.cost import CodecCost, Costs, Line, fit
from casync.topology import Topology
from hipress.ranks.link import all_reduce_max

if TYPE_CHECKING:
    from casync.codec import Codec

SMALL, LARGE, HUGE = 4 << 10, 1 << 20, 4 << 20  # bytes on the link
QUICK, SLOW = 0.005, 0.03  # seconds: below, HUGE is measured too; above, nothing is repeated
ELEMENTS = (1 << 16, 1 << 20)  # what codecs are timed on
REPEATS = 7
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
        _time_codec(codec, 64, 1)
    start = time.perf_counter()
    needed = {"float32"} | {c.additive for c in codecs.values() if c.additive is not None}
    link = _link(group, needed, topology)
    costs = replace(link, codecs={name: _codec_cost(c, group) for name, c in codecs.items()})
    return Probe(costs, all_reduce_max([time.perf_counter() - start], group)[0])


def measure_link(group: dist.ProcessGroup, before: Costs, topology: Topology) -> Costs:
    """As `before`, but for the link, which is measured anew. Every rank must call it."""
    return replace(_link(group, before.reduce, topology), codecs=before.codecs)


def message_seconds(group: dist.ProcessGroup, topology: Topology) -> float:
    """How long a message takes now. Every rank must call it."""
    return _best(_exchange(group, _across(topology))(MESSAGE), MESSAGES, group)


def _link(group: dist.ProcessGroup, types: Iterable[str], topology: Topology) -> Costs:
    reduces = {name: _curve(_reduce(group, DTYPES[name]), group) for name in sorted(types)}
    exchange = fit(_curve(_exchange(group, _across(topology)), group))
    inside = Line(0.0, 0.0)
    if topology.nested:
        inside = fit(_curve(_exchange(group, _around(topology.nodes)), group))
    return Costs(exchange, _fit_reduces(reduces), {}, inside)


def _across(topology: Topology) -> list[int]:
    """By rank, to whom it sends: a rank of another node, so that all its ranks share its link."""
    order = [rank for node in topology.nodes for rank in node]
    step = topology.largest if topology.nested else 1
    return [order[(order.index(rank) + step) % len(order)] for rank in topology.ranks]


def _around(nodes: Sequence[Sequence[int]]) -> list[int]:
    """By rank, to whom it sends: the next one of its node; itself where it is alone."""
    pairs = {r: node[(i + 1) % len(node)] for node in nodes for i, r in enumerate(node)}
    return [pairs[rank] for rank in sorted(pairs)]


def _fit_reduces(curves: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, Line]:
    """Lines of the native all-reduce by number type.

    As many bytes of float32 are no more work than of 16-bit numbers: where they took longer, the
    moment was to blame, and would invite compression where it does not pay.
    """
    least: dict[float, float] = {}
    for size, seconds in (point for curve in curves.values() for point in curve):
        least[size] = min(seconds, least.get(size, seconds))
    return {name: fit(curve) for name, curve in curves.items()} | {"float32": fit([*least.items()])}


Operation = Callable[[int], Callable[[], None]]  # bytes -> something to time


def _exchange(group: dist.ProcessGroup, targets: Sequence[int]) -> Operation:
    """Send to one rank and receive from one, at the same time. `targets`: by rank, to whom."""
    rank = group.rank()
    target, source = targets[rank], targets.index(rank)

    def prepare(count: int) -> Callable[[], None]:
        out, into = torch.zeros(count, dtype=torch.uint8), torch.empty(count, dtype=torch.uint8)

        def run() -> None:
            if target == rank:
                return
            for work in group.recv([into], source, 0), group.send([out], target, 0):
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


def _curve(operation: Operation, group: dist.ProcessGroup) -> list[tuple[float, float]]:
    """(bytes, seconds) of two or three sizes; what is repeated depends on agreed numbers only."""
    points = [(float(SMALL), _best(operation(SMALL), REPEATS, group))]
    first = _best(operation(LARGE), 1, group)
    again = first if first > SLOW else _best(operation(LARGE), REPEATS, group)
    points.append((float(LARGE), again))
    if again < QUICK:
        points.append((float(HUGE), _best(operation(HUGE), REPEATS, group)))
    return points


def _codec_cost(codec: Codec, group: dist.ProcessGroup) -> CodecCost:
    points = []
    for elements in ELEMENTS:
        group.barrier().wait()
        points.append(all_reduce_max(_time_codec(codec, elements, REPEATS), group))
    sizes = [4.0 * elements for elements in ELEMENTS]
    encode = fit([(size, times[0]) for size, times in zip(sizes, points, strict=True)])
    decode = fit([(size, times[1]) for size, times in zip(sizes, points, strict=True)])
    return CodecCost(encode, decode, codec.payload_bytes(ELEMENTS[-1]) / sizes[-1])


def _time_codec(codec: Codec, elements: int, repeats: int) -> list[float]:
    """Median seconds to encode and to decode-and-add, with state if it keeps any."""
    gradient = np.random.default_rng(0).standard_normal(elements, np.float32)
    table = np.array([[0, elements, 0, 0, 0]], np.int64)
    out, at = np.zeros(codec.payload_bytes(elements), np.uint8), np.zeros(1, np.int64)
    state = codec.init_state(elements) if codec.stateful else None
    encodes, decodes, total = [], [], np.zeros(elements, np.float32)
    for step in range(repeats + 1):
        start = time.perf_counter()
        used = codec.encode_batch(gradient, table, out, at, state=state, step=step)
        middle = time.perf_counter()
        codec.decode_batch(out, table, at, used, total, add=True, step=step)
        encodes.append(middle - start)
        decodes.append(time.perf_counter() - middle)
    return [statistics.median(encodes[1:]), statistics.median(decodes[1:])]


def _best(run: Callable[[], None], repeats: int, group: dist.ProcessGroup) -> float:
    """Best time on the slowest rank."""
    times = []
    group.barrier().wait()
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return all_reduce_max([min(times)], group)[0]
