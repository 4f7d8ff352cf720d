"""Transports without tags: slots keep every strategy from deadlock, and the proof finds faults.

Threads on such a transport confirm the results of the dry run.
"""

import dataclasses
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from casync.building.parts import Choice
from casync.building.tasks import Recv, Reduce, Send
from casync.errors import DeadlockError
from casync.graph.graph import build, build_program
from casync.graph.plan import partition
from casync.raw import RAW
from casync.topology import Topology
from casync.transports import Member
from tests.casync.fakes import (
    CODECS,
    MANY,
    PAIRS,
    SIZES,
    attend,
    gradients,
    graph_of,
    in_worlds,
    meet,
    planned,
    run,
    slices,
    states_of,
    tensors_of,
    world,
)
from tests.casync.proofs.dry_run import dry_run
from tests.casync.rendezvous import Meeting

WORLDS = [(3, 2), (2, 1), (4, 2), (5, 3), (6, 3), (7, 4), (8, 4)]
SMALL = (7, 31, 40000)


@pytest.mark.parametrize(
    "strategy, codec, world_size, per_node", in_worlds(PAIRS, PAIRS, [(5, 2), (1, 1), *WORLDS])
)
def test_every_strategy_gets_through(strategy, codec, world_size, per_node):
    graph = graph_of(SIZES, strategy, codec, world_size, per_node=per_node)
    report = dry_run(graph, semantics="rendezvous")
    assert sorted(report.order) == list(range(len(graph.tasks)))
    assert report.bytes_sent == dry_run(graph).bytes_sent


@pytest.mark.parametrize("strategy, codec", PAIRS)
def test_every_strategy_gets_through_where_turns_share_a_slot(strategy, codec):
    """Programs for NCCL run; each rank builds the same slice by itself."""
    tensors, topology = tensors_of(SIZES), Topology.even(5, 2)
    choices = {t.name: Choice(codec, strategy, 2) for t in tensors}
    parts = partition(tensors, choices, topology, CODECS, least_bytes=4000)
    graph = build(parts, topology, CODECS, rotates=False)
    assert len(dry_run(graph, semantics="rendezvous").order) == len(graph.tasks)
    slots, turns = (
        {task.slot for task in each.tasks if isinstance(task, Send)}
        for each in (graph, build(parts, topology, CODECS))
    )
    assert len(slots) <= len(turns)
    own = build_program(parts, topology, CODECS, 3, rotates=False)
    assert own.tasks == graph.slice(3).tasks


def test_strategies_get_through_together():
    tensors = tensors_of([70000] * len(PAIRS))
    pairs = zip(tensors, PAIRS, strict=True)
    choices = {t.name: Choice(codec, strategy) for t, (strategy, codec) in pairs}
    dry_run(planned(tensors, choices, 4, CODECS), semantics="rendezvous")


def transfers(graph, rank):
    """Positions and tasks of a rank's transfers."""
    kinds = Send | Recv | Reduce
    return [(i, t) for i, t in enumerate(graph.tasks) if isinstance(t, kinds) and t.rank == rank]


def with_tasks(graph, changed):
    tasks = tuple(changed.get(i, task) for i, task in enumerate(graph.tasks))
    return dataclasses.replace(graph, tasks=tasks)


#: strategies among 3 ranks in which no two slots can be exchanged; allreduce has only one slot
SEVERAL = sorted({strategy for strategy, _ in PAIRS} - {"allreduce", "vote"})


def exchanged(strategy):
    """A graph in which rank 0's first two slots have exchanged numbers."""
    graph = graph_of(SMALL, strategy, "exact", 3, least_bytes=4000)
    mine = transfers(graph, 0)
    first, second = sorted({t.slot for _, t in mine})[:2]
    other = {first: second, second: first}
    changed = {i: dataclasses.replace(t, slot=other[t.slot]) for i, t in mine if t.slot in other}
    return with_tasks(graph, changed)


@pytest.mark.parametrize("strategy", SEVERAL)
def test_exchanged_slots_are_caught(strategy):
    """On one rank only: it waits for data that its peers send after they have its own."""
    graph = exchanged(strategy)
    dry_run(graph)  # gloo has tags
    with pytest.raises(DeadlockError):
        dry_run(graph, semantics="rendezvous")


@pytest.mark.parametrize("strategy", SEVERAL)
def test_exchanged_slots_block_all_ranks_who_are_told(strategy):
    with pytest.raises(DeadlockError) as caught:
        meet(exchanged(strategy), gradients(sum(SMALL), 3, seed=0))
    text = str(caught.value)
    if "cannot send" in text:
        assert re.search(r"rank 0 is at slot \d+ and cannot send `send rank=0", text)
    else:
        assert "no rank can go on" in text
        for rank in range(3):
            assert re.search(rf"rank {rank} is (blocked in `\w+ rank={rank}|gone|at its end)", text)


@pytest.mark.parametrize("strategy, codec, world_size, per_node", in_worlds(PAIRS, MANY, WORLDS))
def test_threads_get_through_with_the_bits_of_the_executor(strategy, codec, world_size, per_node):
    """Two steps; on every link both sides counted the bytes of the dry run."""
    graph = graph_of(SMALL, strategy, codec, world_size, per_node=per_node, least_bytes=4000)
    total = sum(SMALL)
    states, others = ([states_of(total) for _ in range(world_size)] for _ in range(2))
    programs = slices(graph)
    with world(world_size) as executors:
        for step in range(2):
            buckets = gradients(total, world_size, seed=step)
            wanted = [bucket.clone() for bucket in buckets]
            run(executors, programs, wanted, others, step)
            meeting = meet(graph, buckets, states, step)
            assert all(map(torch.equal, buckets, wanted))
    sent = Counter()
    for (source, _), size in meeting.bytes.items():
        sent[source] += size
    assert [sent[r] for r in range(world_size)] == list(dry_run(graph).bytes_sent)


def test_a_rank_that_has_left_is_told():
    meeting = Meeting(2)
    meeting.leave(1)
    with pytest.raises(DeadlockError, match=r"rank 0 is blocked in `hello`; rank 1 is at its end"):
        meeting.exchange(0, [Member("send", (1,), torch.zeros(1), "hello")])


def test_sizes_must_agree():
    """Both sides must give equal sizes, as on transports whose messages have no length."""
    graph = graph_of([1000], "ps", "exact", 2, partitions=1)
    longer = dataclasses.replace(graph.parts[0], rows=((0, 1001, 0, 0, 0),))
    other = dataclasses.replace(graph, parts=(longer,))
    buckets = [torch.zeros(1001) for _ in range(2)]

    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(attend, each.slice(end.rank), end, buckets[end.rank])
            for end, each in zip(Meeting(2).endpoints(), (graph, other), strict=True)
        ]
    for future in futures:
        with pytest.raises(DeadlockError, match=r"sizes differ: `send .* of 400\d bytes; `recv"):
            future.result()


def test_a_send_that_is_not_ready_blocks_the_stream():
    """A group that needs data of a later group."""
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
    """Two messages in one slot to one peer, listed in another order at the receiver."""
    graph = graph_of([100000], "ps", "exact", 2, partitions=4, least_bytes=4000)
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
