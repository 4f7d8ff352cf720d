"""Times of codecs on the host or on a device, and the share that a backward pass hides."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from casync.codec import Codec, one_piece
from casync.cost import CodecCost, fit
from casync.memory import Memory, Moment
from casync.rounds import as_rounds
from hipress.choose.probe_setup import ProbeSetup, TimedStream
from hipress.codecs import state_of
from hipress.ranks.link import all_reduce_max

__all__ = ["BURST", "REPEATS", "codec_cost", "overlap_of", "slows_of"]

ELEMENTS = (1 << 16, 1 << 20)  # sizes for the timing of codecs
REPEATS = 7
SENDS = 16  # transfers during which a backward pass is timed
BURST = 0.01  # seconds for the timing of two threads, apart and together
#: a small backward pass, on a device and on the host: side of a matrix; elements of codec work
SIDES, WORKED = (2048, 192), (1 << 24, 1 << 15)


def codec_cost(codec: Codec, group: dist.ProcessGroup, memory: Memory) -> CodecCost:
    """Costs of a compiled codec. Every rank must call this."""
    points = []
    for elements in ELEMENTS:
        if codec.rounds:
            run = _rounds(codec, elements, group.size(), memory)
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


def _rounds(
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
