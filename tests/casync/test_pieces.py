"""Buckets of 16 bits: the results are those of float32 copies, which are never made."""

import tracemalloc

import numpy as np
import pytest
import torch

import compll
from casync.building.parts import Choice
from casync.errors import PlanError
from casync.graph.graph import build
from casync.graph.plan import partition
from casync.memory.host import HostMemory
from casync.runtime.pieces import pieces_of
from casync.topology import Topology
from tests.casync.fakes import (
    CODECS,
    MANY,
    PAIRS,
    SIZES,
    gradients,
    graph_of,
    in_worlds,
    jitter,
    run,
    slices,
    states_of,
    tensors_of,
    world,
)

TOTAL = sum(SIZES)


def compared(graph, dtype, codecs, made, steps=2):
    """Results of buckets of 16 bits, and those of float32 copies that are rounded at the end."""
    size = graph.world_size
    total = max(row[0] + row[1] for part in graph.parts for row in part.rows)
    ours, theirs = ([made() for _ in range(size)] for _ in range(2))
    options = {"codecs": codecs, "delay": jitter(size)}
    programs = slices(graph), slices(graph)
    with world(size, **options) as here, world(size, **options) as there:
        for step in range(steps):
            given = [x.to(dtype) for x in gradients(total, size, seed=step)]
            copies = [x.float() for x in given]
            run(here, programs[0], given, ours, step)
            run(there, programs[1], copies, theirs, step)
            for bucket, copy in zip(given, copies, strict=True):
                assert torch.equal(bucket.view(torch.int16), copy.to(dtype).view(torch.int16))
    for mine, other in zip(ours, theirs, strict=True):
        for key, arrays in mine.items():
            assert all(np.array_equal(array, other[key][name]) for name, array in arrays.items())


@pytest.mark.parametrize(
    "strategy, codec, size, dtype",
    in_worlds(PAIRS, MANY, [(4, torch.bfloat16), (3, torch.float16)]),
)
def test_averages_and_states_are_those_of_a_float32_copy(strategy, codec, size, dtype):
    graph = graph_of((1, 33, 1000, 9001), strategy, codec, size)
    compared(graph, dtype, CODECS, lambda: states_of(TOTAL))


COMPILED = [
    ("ring", "onebit_group"),
    ("ring", "topk"),
    ("allreduce", "powersgd"),
    ("vote", "signsgd"),
]


@pytest.mark.parametrize("strategy, name", COMPILED)
def test_compiled_codecs(strategy, name):
    """Some include merges in their encodes; one has rounds."""
    codecs, lengths = {"codec": compll.compile(name)}, (33, 1200, 1024)
    topology, tensors = Topology.flat(3), tensors_of(lengths)
    choices = {t.name: Choice("codec", strategy) for t in tensors}
    graph = build(partition(tensors, choices, topology, codecs, least_bytes=4000), topology, codecs)

    def states():
        made = codecs["codec"].init_state(sum(lengths), len(lengths))
        sides = ("worker", "aggregator")
        return {("codec", s): {n: a.copy() for n, a in made.items()} for s in sides}

    compared(graph, torch.bfloat16, codecs, states, steps=3)


def test_there_is_memory_for_sums_alone():
    """For 4 ranks they take less than 2 copies of a bucket in float32."""
    size, length = 4, 1 << 20
    programs = slices(graph_of([length], "ps", "half", size, partitions=8))
    buckets = [torch.zeros(length, dtype=torch.bfloat16) for _ in range(size)]
    with world(size) as executors:
        run(executors, programs, buckets)
        tracemalloc.start()
        try:
            run(executors, programs, buckets, step=1)
            assert tracemalloc.get_traced_memory()[1] < 2 * 4 * length
        finally:
            tracemalloc.stop()


class Counting(HostMemory):
    """A device whose kernels take 16 bits. made: number of elements."""

    host, made = False, 0

    def zeros(self, count, dtype):
        self.made += count
        return super().zeros(count, dtype)


@pytest.mark.parametrize("strategy", ["ps", "exchange"])
def test_a_device_keeps_the_sums_that_a_rank_makes(strategy):
    """With "ps" the sums that it owns, otherwise all; allocated before the first step only."""
    graph = graph_of([1 << 20, 40], strategy, "half", 4, partitions=8)
    for program in slices(graph):
        memory = Counting()
        pieces_of(program, memory, halves=True)
        mine = [p.elements for p in graph.parts if strategy != "ps" or p.owner == program.rank]
        assert memory.made == sum(mine)
        pieces_of(program, memory, halves=False)
        assert memory.made == sum(mine)


def test_a_program_keeps_to_its_dtype():
    program = graph_of([100], "ps", "exact", 2).slice(0)
    with world(2) as executors:
        executors[0].prepare(program, torch.bfloat16)
        with pytest.raises(PlanError, match=r"bfloat16 tensor on cpu.*not torch.float16"):
            executors[0].submit(program, torch.zeros(100, dtype=torch.float16), {}, 0)
