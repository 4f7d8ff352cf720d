"""Codecs that aggregate in rounds: graphs, the executor over memory, refusals."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from casync.building.parts import Choice
from casync.building.tasks import ReduceRound
from casync.codec import StateField
from casync.errors import DeadlockError, PayloadError, PlanError
from casync.graph.plan import partition
from casync.strategies import list_strategies
from casync.topology import Topology
from tests.casync.fakes import (
    SIZES,
    Fake,
    gradients,
    jitter,
    planned,
    run,
    slices,
    tensors_of,
    world,
)
from tests.casync.proofs.dry_run import dry_run

TOTAL = sum(SIZES)


class Twice(Fake):
    """Round 0: the sum. Round 1: twice the rest of the mean, in float16; checks its input."""

    name = "twice"
    states = (StateField("steps", fate="same"),)
    reencodes = False
    rounds = (
        SimpleNamespace(dtype="float32", op="sum", payload_bytes=lambda n: 4 * n),
        SimpleNamespace(dtype="float16", op="sum", payload_bytes=lambda n: 2 * n),
    )

    def refuses_workers(self, workers):
        return None

    def payload_bytes(self, n):
        return 6 * n

    def mean(self, sums, row, piece, workers):
        payload, at = sums[0]
        start = at[piece]
        return payload[start : start + 4 * row[1]].view(np.float32) / np.float32(workers)

    def encode_round(
        self, number, x, table, out, at, before=(), *, workers, state=None, seed=0, step=0
    ):
        assert len(before) == number
        for i, row in enumerate(table.tolist()):
            value = x[row[0] : row[0] + row[1]]
            if number:
                value = (2 * (value - self.mean(before, row, i, workers))).astype(np.float16)
            data = value.view(np.uint8)
            out[at[i] : at[i] + len(data)] = data
        return np.array([self.rounds[number].payload_bytes(int(n)) for n in table[:, 1]], np.int64)

    def decode_rounds(self, x, table, sums, *, workers, state=None, seed=0, step=0):
        for i, row in enumerate(table.tolist()):
            payload, at = sums[1]
            left = payload[at[i] : at[i] + 2 * row[1]].view(np.float16)
            assert np.abs(left).max(initial=0) < 0.1  # deviations from the mean add up to zero
            x[row[0] : row[0] + row[1]] = self.mean(sums, row, i, workers)
            state["steps"][row[4] : row[4] + row[1]] += step


CODECS = {"twice": Twice()}


def graph_of(size, lengths=SIZES):
    tensors = tensors_of(lengths)
    choices = {t.name: Choice("twice", "allreduce", 2) for t in tensors}
    return planned(tensors, choices, size, CODECS)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_the_mean(size):
    graph = graph_of(size)
    programs = slices(graph)
    states = [{("twice", "worker"): CODECS["twice"].init_state(TOTAL)} for _ in range(size)]
    with world(size, codecs=CODECS, delay=jitter(size)) as executors:
        for step in range(3):
            given = gradients(TOTAL, size, seed=step)
            buckets = [x.clone() for x in given]
            run(executors, programs, buckets, states, step)
            assert all(torch.equal(b, buckets[0]) for b in buckets)
            assert torch.allclose(buckets[0], sum(given) / size, atol=1e-6)
        counters = executors[0].counters
        assert counters.bytes_reduced == 3 * dry_run(graph).bytes_reduced[0]
        assert counters.reduces == 3 * sum(isinstance(t, ReduceRound) for t in programs[0].tasks)
    for state in states:
        assert (state["twice", "worker"]["steps"] == 3).all()


def test_every_round_is_counted():
    graph = graph_of(2, [1000])  # whole, since smaller tensors are not cut
    assert [part.rounds for part in graph.parts] == [("sum", "sum")]
    assert graph.round_bytes == ((4000, 2000),)
    assert graph.message_bytes == ({"twice": 6000},)
    assert dry_run(graph).bytes_reduced == (6000, 6000)


class Largest(Twice):
    """Round 0: the largest magnitude. Round 1: bytes in units of it, which add up."""

    name = "largest"
    rounds = (
        SimpleNamespace(dtype="float32", op="max", payload_bytes=lambda n: 4 * (n > 0)),
        SimpleNamespace(dtype="uint8", op="sum", payload_bytes=lambda n: n),
    )

    def refuses_workers(self, workers):
        return None if workers <= 4 else f"{workers} ranks, at most 4"

    def encode_round(
        self, number, x, table, out, at, before=(), *, workers, state=None, seed=0, step=0
    ):
        for i, row in enumerate(table.tolist()):
            value = np.abs(x[row[0] : row[0] + row[1]])
            if number == 0:
                data = value[value.argmax() :][:1].view(np.uint8) if row[1] else out[:0]
            else:
                payload, start = before[0][0], before[0][1][i]
                top = payload[start : start + 4].view(np.float32)
                data = (value / np.maximum(np.repeat(top, row[1]), 1e-30) * 60).astype(np.uint8)
            out[at[i] : at[i] + len(data)] = data
        return np.array([self.rounds[number].payload_bytes(int(n)) for n in table[:, 1]], np.int64)

    def decode_rounds(self, x, table, sums, *, workers, state=None, seed=0, step=0):
        (tops, first), (codes, second) = sums
        for i, (start, length, *_) in enumerate(table.tolist()):
            top = tops[first[i] : first[i] + 4 * (length > 0)].view(np.float32)
            code = codes[second[i] : second[i] + length].astype(np.float32)
            x[start : start + length] = code / 60 / workers * np.repeat(top, length)


@pytest.mark.parametrize("size", [2, 4])
def test_a_maximum_and_bytes_that_add(size):
    codecs = {"largest": Largest()}
    tensors = tensors_of([1, 7, 1000])
    choices = {t.name: Choice("largest", "allreduce", 1) for t in tensors}
    graph = planned(tensors, choices, size, codecs)
    assert {t.op for t in graph.tasks if isinstance(t, ReduceRound)} == {"max", "sum"}
    with world(size, codecs=codecs, delay=jitter(size)) as executors:
        given = gradients(1008, size, seed=0)
        buckets = [x.clone() for x in given]
        run(executors, graph, buckets)
    assert all(torch.equal(b, buckets[0]) for b in buckets)
    for start, end in ((0, 1), (1, 8), (8, 1008)):
        pieces = [x[start:end].abs() for x in given]
        top = max(float(p.max()) for p in pieces)
        assert torch.allclose(buckets[0][start:end], sum(pieces) / size, atol=top / 60)


def test_a_world_that_is_too_large_is_refused():
    tensors, codecs = tensors_of([7]), {"largest": Largest()}
    choices = {"t0": Choice("largest", "allreduce", 1)}
    with pytest.raises(PlanError, match="codec 'largest': 5 ranks, at most 4"):
        partition(tensors, choices, Topology.flat(5), codecs)
    assert partition(tensors, choices, Topology.flat(4), codecs)


def test_rounds_in_another_order_are_found():
    graph = graph_of(2, [7])
    tasks = [
        dataclasses.replace(t, round=1 - t.round) if isinstance(t, ReduceRound) and t.rank else t
        for t in graph.tasks
    ]
    with pytest.raises(DeadlockError, match="rank 1 reduces"):
        dry_run(dataclasses.replace(graph, tasks=tuple(tasks)))


@pytest.mark.parametrize("strategy", sorted(set(list_strategies()) - {"allreduce"}))
def test_other_strategies_refuse(strategy):
    tensors = tensors_of([7])
    with pytest.raises(PlanError, match="use strategy 'allreduce'"):
        partition(tensors, {"t0": Choice("twice", strategy)}, Topology.flat(2), CODECS)


def test_a_round_of_a_wrong_length_ends_all():
    class Short(Twice):
        def encode_round(self, number, *args, **kwargs):
            return super().encode_round(number, *args, **kwargs) - number

    graph, codecs = graph_of(2, [33]), {"twice": Short()}
    with world(2, codecs=codecs) as executors:
        futures = [e.submit(graph.slice(r), torch.ones(33), {}, 0) for r, e in enumerate(executors)]
        with pytest.raises(PayloadError, match=r"encode_round .*used lengths \[65\]"):
            futures[0].wait()
