"""Merges that an encode includes: the same results, with fewer walks over the bucket."""

import pytest
import torch

from casync.building.parts import Choice
from casync.graph.fusion import fused_merges, in_place
from casync.raw import RAW
from tests.casync.fakes import (
    CODECS,
    SIZES,
    Sign,
    gradients,
    graph_of,
    planned,
    run,
    slices,
    states_of,
    tensors_of,
    world,
)


class Fusing(Sign):
    """A codec that counts the payloads that its encodes included."""

    fuses = True

    def __init__(self):
        self.taken = 0

    def encode_batch(self, x, table, out, at, *, incoming=None, writeback=False, **options):
        if incoming is None:
            return super().encode_batch(x, table, out, at, writeback=writeback, **options)
        self.taken += 1
        payload, begins, used = incoming
        self.decode_batch(payload, table, begins, used, x, add=True)
        used = super().encode_batch(x, table, out, at, writeback=writeback, **options)
        if not writeback:
            for start, length, *_ in table.tolist():
                x[start : start + length] = float("nan")  # useless values
        return used


def synchronized(codec, strategy, world_size):
    codecs = CODECS | {"sign": codec}
    tensors = tensors_of(SIZES)
    choices = {t.name: Choice("sign", strategy, 2) for t in tensors}
    graph = planned(tensors, choices, world_size, codecs)
    buckets = gradients(sum(SIZES), world_size, seed=1)
    states = [states_of(sum(SIZES)) for _ in buckets]
    programs = slices(graph)
    with world(world_size, codecs=codecs) as executors:
        for step in range(2):
            run(executors, programs, buckets, states, step)
    return graph, buckets


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["ps", "ring"])
def test_the_results_are_the_same(strategy, world_size):
    fusing = Fusing()
    graph, merged = synchronized(fusing, strategy, world_size)
    _, plain = synchronized(Sign(), strategy, world_size)
    for one, other in zip(merged, plain, strict=True):
        assert torch.equal(one, other)
    owners = sum(len(fused_merges(graph.slice(r), {"sign": fusing})) for r in range(world_size))
    assert fusing.taken == 2 * owners > 0


def test_payloads_of_another_codec_are_not_taken_in():
    codecs = CODECS | {"sign": Fusing()}
    for up, down in (("exact", "sign"), ("sign", "exact")):
        graph = graph_of(SIZES, "ps", up, 3, down=down)
        assert not any(fused_merges(graph.slice(rank), codecs) for rank in range(3))


def test_raw_runs_are_summed_where_they_lie():
    tensors = tensors_of([5, 9000])
    choices = {t.name: Choice(RAW, "allreduce") for t in tensors}
    program = planned(tensors, choices, 2, CODECS).slice(0)
    assert in_place(program) == {task.payload for task in program.tasks}
    for strategy in ("ps", "hierarchical", "exchange"):
        assert not in_place(graph_of(SIZES, strategy, RAW, 3).slice(0))


def test_the_sum_of_an_all_gather_is_not_taken_in():
    fusing = Fusing()
    synchronized(fusing, "exchange", 3)
    assert fusing.taken == 0
