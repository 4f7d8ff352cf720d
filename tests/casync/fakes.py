"""Small codecs and a world of ranks in memory, for the tests of casync."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from casync.building.parts import Choice, Tensor
from casync.codec import CodecDefaults, StateField
from casync.graph.graph import Graph, Program, build
from casync.graph.plan import partition
from casync.raw import RAW, with_raw
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.strategies import list_strategies, load, refuses
from casync.testing import Hub
from casync.topology import Topology
from tests.casync.rendezvous import Endpoint, Meeting
from tests.patience import HANG

SIZES = (0, 1, 7, 31, 33, 1000, 100003)


class Fake(CodecDefaults):
    """A codec made of `pack(x) -> bytes` and `unpack(bytes, n) -> x`; feedback if it has states."""

    name = "fake"
    fixed = True
    reencodes = True

    @property
    def digest(self):
        return f"digest of {self.name}"

    def payload_bytes(self, n):
        raise NotImplementedError

    def pack(self, x):
        raise NotImplementedError

    def unpack(self, data, n):
        raise NotImplementedError

    def encode_batch(
        self, x, table, out, at, *, state=None, seed=0, step=0, scale=1.0, writeback=False
    ):
        used = np.zeros(len(table), np.int64)
        for i, (start, length, _, _, first) in enumerate(table.tolist()):
            piece = x[start : start + length] * np.float32(scale)
            if state is not None:
                piece += state["residual"][first : first + length]
            data = np.frombuffer(self.pack(piece), np.uint8)
            used[i] = len(data)
            out[at[i] : at[i] + len(data)] = data
            result = self.unpack(data, length)
            if state is not None:
                state["residual"][first : first + length] = piece - result
            if writeback:
                x[start : start + length] = result
        return used

    def decode_batch(self, payload, table, at, used, out, *, add=False, step=0):
        for i, (start, length, *_) in enumerate(table.tolist()):
            result = self.unpack(payload[at[i] : at[i] + used[i]], length)
            if add:
                out[start : start + length] += result
            else:
                out[start : start + length] = result


class Exact(Fake):
    """float32, unchanged."""

    name = "exact"
    additive = "float32"

    def payload_bytes(self, n):
        return 4 * n

    def pack(self, x):
        return x.tobytes()

    def unpack(self, data, n):
        return np.frombuffer(data.tobytes(), np.float32)


class Half(Fake):
    """float16; payloads add up."""

    name = "half"
    additive = "float16"

    def payload_bytes(self, n):
        return 2 * n

    def pack(self, x):
        return x.astype(np.float16).tobytes()

    def unpack(self, data, n):
        return np.frombuffer(data.tobytes(), np.float16).astype(np.float32)


class Sign(Fake):
    """Mean magnitude and signs, with error feedback."""

    name = "sign"
    align = 32
    states = (StateField("residual"),)

    def payload_bytes(self, n):
        return 4 + (n + 7) // 8

    def pack(self, x):
        return np.float32(np.abs(x).mean()).tobytes() + np.packbits(x < 0).tobytes()

    def unpack(self, data, n):
        scale = np.frombuffer(data[:4].tobytes(), np.float32)[0]
        return np.where(np.unpackbits(data[4:])[:n], -scale, scale).astype(np.float32)


class Sparse(Fake):
    """Indices and values of the nonzero elements: exact, of varying length."""

    name = "sparse"
    fixed = False

    def payload_bytes(self, n):
        return 8 * n

    def pack(self, x):
        index = np.flatnonzero(x).astype(np.int32)
        return index.tobytes() + x[index].tobytes()

    def unpack(self, data, n):
        if len(data) % 8:
            raise ValueError("payload is not pairs")
        k = len(data) // 8
        index = np.frombuffer(data[: 4 * k].tobytes(), np.int32)
        if k and (index.min() < 0 or index.max() >= n):
            raise ValueError("index out of range")
        out = np.zeros(n, np.float32)
        out[index] = np.frombuffer(data[4 * k :].tobytes(), np.float32)
        return out


class Once(Sparse):
    """A codec that may encode a tensor only once."""

    name = "once"
    vote = False
    reencodes = False


CODECS = with_raw({c.name: c for c in (Exact(), Half(), Sign(), Sparse(), Once())})
PAIRS = [
    (strategy, codec)
    for strategy in list_strategies()
    for codec in CODECS
    if refuses(strategy, CODECS[codec]) is None
]

#: of these, every strategy, and every codec: by ps, but for one that cannot encode twice
MANY = [(s, c) for s, c in PAIRS if s == "ps" or c in ("sign", RAW) or (s, c) == ("push", "once")]

#: those that leave the mean on all ranks
MEANS = [pair for pair in PAIRS if load(pair[0]).RESULT == "mean"]


def each_strategy(pairs):
    """Every strategy once, with feedback if it has a pair with that."""
    return sorted(dict(sorted(pairs, key=lambda pair: (pair[1] == "sign", pair))).items())


EVERY = each_strategy(PAIRS)


def in_worlds(pairs, fast, worlds):
    """Parameters (strategy, codec, *world): all pairs in the first world, where those of `fast` are
    fast tests; of the others, slow, every strategy once in each world."""
    first, *others = worlds
    wanted = [(pair, first, pair in fast) for pair in pairs]
    wanted += [(pair, world, False) for pair in each_strategy(pairs) for world in others]
    return [
        pytest.param(*pair, *world, marks=() if quick else pytest.mark.slow)
        for pair, world, quick in wanted
    ]


def tensors_of(lengths: Sequence[int], first: int = 0) -> list[Tensor]:
    """Tensors one behind the other. first: index in the model and place in the arenas."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        Tensor(f"t{first + i}", first + i, start, length, 1000003 * first + start)
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]


def planned(tensors, choices, world_size, codecs) -> Graph:
    """The graph of tensors on ranks with one node each."""
    flat = Topology.flat(world_size)
    return build(partition(tensors, choices, flat, codecs), flat, codecs)


def graph_of(
    lengths,
    strategy,
    codec,
    world_size,
    partitions=2,
    per_node=2,
    down=None,
    codecs=CODECS,
    **options,
) -> Graph:
    """The graph of tensors with the same choice for each."""
    topology = Topology.even(world_size, per_node)
    tensors = tensors_of(lengths)
    choices = {t.name: Choice(codec, strategy, partitions, down) for t in tensors}
    return build(partition(tensors, choices, topology, codecs, **options), topology, codecs)


def gradients(length: int, world_size: int, seed: int) -> list[torch.Tensor]:
    """A bucket per rank, two thirds zeros."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(world_size, length, generator=generator)
    dense *= torch.rand(world_size, length, generator=generator) > 0.66
    return [dense[rank].clone() for rank in range(world_size)]


def slices(graph: Graph) -> list[Program]:
    """The programs of all ranks."""
    return [graph.slice(rank) for rank in range(graph.world_size)]


def run(executors, graph, buckets, states=None, step=0):
    """Synchronize one bucket per rank, and wait for all. With slices of a graph, made once, the
    next step uses buffers again."""
    programs = graph if isinstance(graph, list) else slices(graph)
    states = states or [{} for _ in executors]
    given = zip(executors, programs, buckets, states, strict=True)
    futures = [executor.submit(*own, step) for executor, *own in given]
    return [future.wait() for future in futures]


def assert_identical(buckets):
    for bucket in buckets[1:]:
        assert torch.equal(bucket.view(torch.int32), buckets[0].view(torch.int32))


def run_apart(executors, programs, buckets, states, step, pool):
    """A step of ranks that submit by threads of their own, as they must without tags; errors, or
    None, by rank."""
    given = zip(executors, programs, buckets, states, strict=True)
    posted = [pool.submit(lambda e, *own: e.submit(*own, step).wait(), *each) for each in given]
    return [future.exception(HANG) for future in posted]


def states_of(length: int):
    """Arenas of the stateful codec, on both sides."""
    sides = ("worker", "aggregator")
    return {("sign", side): CODECS["sign"].init_state(length) for side in sides}


@contextmanager
def world(
    size: int, *, codecs=CODECS, timeout=HANG, trace=None, ranks=None, **options
) -> Iterator[list[Executor]]:
    """Executors of all ranks over the memory transport."""
    made = RunOptions(timeout=timeout, **options)
    executors = [
        Executor(end, codecs, made, trace=trace, ranks=ranks) for end in Hub(size).endpoints()
    ]
    try:
        yield executors
    finally:
        for executor in executors:
            executor.close()


def replay(program, end, codecs, bucket, states=None, step: int = 0) -> None:
    """Run a rank's program without tags, at this endpoint."""
    with Executor(end, codecs, RunOptions(timeout=HANG)) as executor:
        executor.submit(program, bucket, states or {}, step).wait()


def attend(program, end: Endpoint, *given) -> None:
    """Run it as `replay` does; then leave the meeting."""
    replay(program, end, CODECS, *given)
    end.close()


def meet(graph: Graph, buckets: Sequence[torch.Tensor], states=None, step: int = 0) -> Meeting:
    """Run a graph without tags, with a thread per rank; raises the first error in rank order."""
    meeting = Meeting(graph.world_size, HANG)
    with ThreadPoolExecutor(graph.world_size) as pool:
        futures = [
            pool.submit(attend, graph.slice(r), end, buckets[r], states and states[r], step)
            for r, end in enumerate(meeting.endpoints())
        ]
    for future in futures:
        future.result()
    return meeting


def jitter(seed: int):
    """A delay hook: up to a millisecond, sometimes."""
    source = random.Random(seed)

    def delay(text: str) -> None:
        if source.random() < 0.5:
            time.sleep(source.random() * 1e-3)

    return delay
