"""Transports without tags: slots keep every strategy from deadlock, and the proof finds faults."""

import dataclasses

import pytest

from casync.errors import DeadlockError
from casync.graph.dryrun import dry_run
from casync.graph.plan import Choice
from casync.graph.tasks import Recv, Reduce, Send
from casync.raw import RAW
from tests.casync.fakes import CODECS, PAIRS, SIZES, graph_of, planned, tensors_of


@pytest.mark.parametrize("world_size, per_node", [(1, 1), (2, 1), (3, 2), (5, 2), (8, 4)])
@pytest.mark.parametrize("strategy, codec", PAIRS)
def test_every_strategy_gets_through(strategy, codec, world_size, per_node):
    graph = graph_of(SIZES, strategy, codec, world_size, per_node=per_node)
    report = dry_run(graph, semantics="rendezvous")
    assert sorted(report.order) == list(range(len(graph.tasks)))
    assert report.bytes_sent == dry_run(graph).bytes_sent


def test_strategies_get_through_together():
    tensors = tensors_of([70000] * len(PAIRS))
    pairs = zip(tensors, PAIRS, strict=True)
    choices = {t.name: Choice(codec, strategy) for t, (strategy, codec) in pairs}
    dry_run(planned(tensors, choices, 4, CODECS), semantics="rendezvous")


def transfers(graph, rank):
    """Of a rank: position and task of what travels."""
    kinds = Send | Recv | Reduce
    return [(i, t) for i, t in enumerate(graph.tasks) if isinstance(t, kinds) and t.rank == rank]


def with_tasks(graph, changed):
    tasks = tuple(changed.get(i, task) for i, task in enumerate(graph.tasks))
    return dataclasses.replace(graph, tasks=tasks)


@pytest.mark.parametrize("strategy", ["ps", "ring", "allgather"])
def test_exchanged_slots_are_caught(strategy):
    """On one rank only: it waits for what its peers send when they have what it has not sent."""
    graph = graph_of(SIZES, strategy, "exact", 3)
    mine = transfers(graph, 0)
    first, second = sorted({t.slot for _, t in mine})[:2]
    other = {first: second, second: first}
    changed = {i: dataclasses.replace(t, slot=other[t.slot]) for i, t in mine if t.slot in other}
    dry_run(with_tasks(graph, changed))  # gloo has tags
    with pytest.raises(DeadlockError):
        dry_run(with_tasks(graph, changed), semantics="rendezvous")


def test_a_send_that_is_not_ready_blocks_the_stream():
    """A group that needs what only a later group brings."""
    graph = graph_of([70000], "ring", "exact", 3, partitions=1)
    rank, last = 0, max(t.slot for t in graph.tasks if isinstance(t, Send))
    changed = {
        i: dataclasses.replace(t, slot=last + 1)
        for i, t in enumerate(graph.tasks)
        if isinstance(t, Send | Recv) and t.slot == 0
    }
    assert any(t.rank == rank for t in changed.values())
    with pytest.raises(DeadlockError, match="cannot run"):
        dry_run(with_tasks(graph, changed), semantics="rendezvous")


def test_messages_match_by_their_order_alone():
    """Two messages of one slot to one peer, listed otherwise at the receiver."""
    graph = graph_of([100000], "ps", "exact", 2, partitions=4, whole_bytes=4000)
    recvs = [(i, t) for i, t in transfers(graph, 0) if isinstance(t, Recv) and t.slot == 0]
    (i, one), (j, other) = recvs[:2]
    with pytest.raises(DeadlockError, match="meets"):
        dry_run(with_tasks(graph, {i: other, j: one}), semantics="rendezvous")


def test_a_reduce_that_a_rank_leaves_out_is_told():
    graph = graph_of([70000], "allreduce", RAW, 3)
    at = next(i for i, t in enumerate(graph.tasks) if isinstance(t, Reduce) and t.rank == 2)
    keep = [i for i in range(len(graph.tasks)) if i < at]
    cut = dataclasses.replace(
        graph, tasks=tuple(graph.tasks[i] for i in keep), after=tuple(graph.after[i] for i in keep)
    )
    with pytest.raises(DeadlockError, match="has no counterpart"):
        dry_run(cut, semantics="rendezvous")
