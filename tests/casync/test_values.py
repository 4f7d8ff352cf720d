"""The dry run proves what buckets hold in the end, for every strategy."""

import dataclasses

import numpy as np
import pytest
import torch

from casync.building.parts import Choice
from casync.building.tasks import Decode, Encode, Merge, Send
from casync.errors import PlanError
from casync.graph.graph import Graph, build
from casync.graph.plan import partition
from casync.raw import RAW
from casync.strategies import load
from casync.topology import Topology
from tests.casync.fakes import (
    CODECS,
    PAIRS,
    SIZES,
    gradients,
    graph_of,
    jitter,
    meet,
    run,
    states_of,
    tensors_of,
    world,
)
from tests.casync.proofs.dry_run import dry_run

WORLDS = [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (5, 3), (7, 4), (8, 4)]


@pytest.mark.parametrize("strategy, codec", PAIRS)
def test_every_strategy_ends_as_it_says(strategy, codec):
    """In any legal order of tasks, with and without turns: raises nothing."""
    tensors = tensors_of((*SIZES, 40_000))
    for world_size, per_node in WORLDS:
        topology = Topology.even(world_size, per_node)
        choices = {t.name: Choice(codec, strategy, 2) for t in tensors}
        parts = partition(tensors, choices, topology, CODECS, least_bytes=4000)
        for rotates in (True, False):
            dry_run(build(parts, topology, CODECS, rotates=rotates), "rendezvous")


def with_tasks(graph: Graph, change) -> Graph:
    return dataclasses.replace(graph, tasks=tuple(map(change, graph.tasks)))


def merged_by_decodes(task):
    """Add what should replace, so that a rank's own values count once more."""
    if type(task) is Decode:
        return Merge(task.rank, task.part, task.payload, task.codec)
    return task


def not_divided(task):
    return dataclasses.replace(task, average=False) if isinstance(task, Encode) else task


def not_taken_over(task):
    return dataclasses.replace(task, writeback=False) if isinstance(task, Encode) else task


@pytest.mark.parametrize("strategy", ["ps", "ring", "exchange", "hierarchical", "gtopk"])
@pytest.mark.parametrize("change", [merged_by_decodes, not_divided])
def test_a_wrong_sum_is_named(strategy, change):
    graph = graph_of(SIZES, strategy, "exact", 4)
    with pytest.raises(PlanError, match=rf"part \d+ \({strategy}\).*rank \d ends with.*x 0.25"):
        dry_run(with_tasks(graph, change))


def test_an_owner_that_keeps_the_sum_is_named():
    graph = graph_of([1000], "ps", "exact", 2, partitions=1)
    told = r"rank 0 ends with ranks 0, 1 x 1, not with ranks 0, 1 x 0.5"
    with pytest.raises(PlanError, match=told):
        dry_run(with_tasks(graph, not_taken_over))


def test_a_missing_wait_is_named():
    """Two merges into one piece, of which the second does not wait for the first."""
    graph = graph_of([1000], "push", "exact", 3, partitions=1)
    merges = [i for i, t in enumerate(graph.tasks) if isinstance(t, Merge) and t.rank == 0]
    after = list(graph.after)
    after[merges[1]] = tuple(j for j in after[merges[1]] if j != merges[0])
    with pytest.raises(PlanError, match=r"`merge rank=0.*` may run before `merge rank=0"):
        dry_run(dataclasses.replace(graph, after=tuple(after)))


def rows(lengths) -> dict:
    """Rows of ranks, one behind the other, each a tensor that its rank owns."""
    return {t.name: ((0, rank),) for rank, t in enumerate(tensors_of(lengths))}


def halves(lengths, codec, strategy, nodes=None):
    """The graph of half an average, of a row for each rank."""
    tensors, topology = tensors_of(lengths), nodes or Topology.flat(len(lengths))
    choices = {t.name: Choice(codec, strategy) for t in tensors}
    parts = partition(tensors, choices, topology, CODECS, shares=rows(lengths))
    return build(parts, topology, CODECS)


@pytest.mark.parametrize("codec", ["exact", "sign", "once", RAW])
@pytest.mark.parametrize("lengths", [(33, 33), (5, 1000, 31), (7, 0, 333, 64)])
def test_push_sums_rows_at_their_owners_and_leaves_the_others(lengths, codec):
    n, total = len(lengths), sum(lengths)
    buckets = gradients(total, n, seed=n)
    before = [bucket.clone() for bucket in buckets]
    graph = halves(lengths, codec, "push")
    # no block straddles two rows, whatever their lengths
    assert {(part.owner, row[3], row[1]) for part in graph.parts for row in part.rows} == {
        (rank, 0, length) for rank, length in enumerate(lengths) if length
    }
    with world(n, delay=jitter(n)) as executors:
        run(executors, graph, buckets, [states_of(total) for _ in range(n)])
    for rank, (start, length) in enumerate(zip(np.cumsum((0, *lengths)), lengths, strict=False)):
        row = slice(start, start + length)
        for other in (each for each in range(n) if each != rank):
            assert torch.equal(buckets[other][row], before[other][row])
        if codec != "sign":
            torch.testing.assert_close(buckets[rank][row], torch.stack(before)[:, row].sum(0))


@pytest.mark.parametrize("codec", ["exact", "sign", "once", RAW])
def test_pull_gives_all_the_owners_rows_with_equal_bits(codec):
    lengths = (5, 1000, 31)
    buckets = gradients(sum(lengths), 3, seed=1)
    before = [bucket.clone() for bucket in buckets]
    with world(3, delay=jitter(2)) as executors:
        graph = halves(lengths, codec, "pull")
        run(executors, graph, buckets, [states_of(sum(lengths)) for _ in range(3)])
    assert torch.equal(buckets[0], buckets[1])
    assert torch.equal(buckets[1], buckets[2])
    if codec != "sign":
        rows = zip(before, np.cumsum((0, *lengths)), np.cumsum(lengths), strict=False)
        assert torch.equal(buckets[0], torch.cat([b[start:end] for b, start, end in rows]))


NODES = [Topology.even(4, 2), Topology.of([[0, 2], [1, 3]]), Topology.of([[0, 1, 2], [3]])]


def crossing(graph, topology):
    """Messages of a part between nodes."""
    sends = [task for task in graph.tasks if isinstance(task, Send)]
    return sum(topology.node_of[s.rank] != topology.node_of[s.peer] for s in sends) / 4


@pytest.mark.parametrize("nodes", NODES, ids=str)
@pytest.mark.parametrize("codec", ["exact", "sign"])
def test_halves_cross_between_nodes_once(nodes, codec):
    """A node is added up by the rank at the owner's place, in rank order, and that sum is encoded;
    an owner's payload is that of a flat exchange."""
    lengths = (5, 1000, 31, 64)
    push, pull = (halves(lengths, codec, f"hierarchical_{h}", nodes) for h in ("push", "pull"))
    for graph in (push, pull):
        assert crossing(graph, nodes) == 1
    before = gradients(sum(lengths), 4, seed=5)
    summed, given, flat = ([each.clone() for each in before] for _ in range(3))
    states = [[states_of(sum(lengths)) for _ in range(4)] for _ in range(3)]
    with world(4, delay=jitter(3)) as executors:
        run(executors, push, summed, states[0])
        run(executors, pull, given, states[1])
        run(executors, halves(lengths, codec, "pull"), flat, states[2])
    assert all(map(torch.equal, given, flat))
    ends = np.cumsum(lengths)
    for owner, end in enumerate(ends if codec == "exact" else ()):
        row, leaders = slice(end - lengths[owner], end), nodes.leaders(owner)
        sums = []
        for node, leader in zip(nodes.nodes, leaders, strict=True):
            order = [leader, *(rank for rank in node if rank != leader)]
            sums.append(sum((before[r][row] for r in order[1:]), before[leader][row]))
        mine = sums.pop(nodes.node_of[owner])
        assert torch.equal(summed[owner][row], sum(sums, mine))


@pytest.mark.parametrize("lengths", [(1000, 31, 500), (64, 64)])
def test_ps_is_push_then_pull(lengths):
    """With feedback on both sides, three steps: bits, residuals and payload bytes."""
    n, total = len(lengths), sum(lengths)
    whole, *two = (halves(lengths, "sign", strategy) for strategy in ("ps", "push", "pull"))
    sent = [dry_run(graph).bytes_sent for graph in (whole, *two)]
    assert sent[0] == tuple(map(sum, zip(*sent[1:], strict=True)))
    states = [[states_of(total) for _ in range(n)] for _ in range(2)]
    with world(n) as executors:
        for step in range(3):
            one, other = (gradients(total, n, seed=step) for _ in range(2))
            run(executors, whole, one, states[0], step)
            run(executors, two[0], other, states[1], step)
            for rank, bucket in enumerate(other):
                begin = sum(lengths[:rank])
                bucket[begin : begin + lengths[rank]] *= np.float32(1 / n)
            run(executors, two[1], other, states[1], step)
            assert all(map(torch.equal, one, other))
    for mine, others in zip(*states, strict=True):
        for key, state in mine.items():
            assert np.array_equal(state["residual"], others[key]["residual"])


@pytest.mark.parametrize("strategy", ["push", "pull"])
def test_halves_run_without_tags(strategy):
    graph = halves((70, 1000, 31), "sign", strategy)
    buckets, others = (gradients(1101, 3, seed=3) for _ in range(2))
    meet(graph, buckets, [states_of(1101) for _ in range(3)])
    with world(3) as executors:
        run(executors, graph, others, [states_of(1101) for _ in range(3)])
    assert all(map(torch.equal, buckets, others))


def test_the_old_name_of_exchange_is_accepted_and_told():
    load.cache_clear()
    with pytest.warns(FutureWarning, match="'allgather' is called 'exchange' now"):
        assert load("allgather") is load("exchange")


def test_a_result_is_that_of_each_part():
    """Parts of several strategies in one graph."""
    tensors, topology = tensors_of([100] * 4), Topology.flat(3)
    names = ("ps", "push", "pull", "exchange")
    choices = {t.name: Choice("exact", s) for t, s in zip(tensors, names, strict=True)}
    dry_run(build(partition(tensors, choices, topology, CODECS), topology, CODECS))
