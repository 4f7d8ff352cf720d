"""Graphs of every strategy: they complete, count their bytes, print and parse back."""

import dataclasses
import tracemalloc

import networkx as nx
import pytest

from casync.building.parts import Choice, Part
from casync.building.tasks import Encode, Recv, Reduce, Send
from casync.errors import DeadlockError, PlanError
from casync.graph.graph import Graph, build, build_program
from casync.graph.plan import partition
from casync.raw import RAW
from casync.strategies import load, owns_mean
from casync.topology import Topology
from tests.casync.fakes import CODECS, PAIRS, SIZES, graph_of, tensors_of
from tests.casync.proofs.dry_run import dry_run


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("strategy, codec", PAIRS)
def test_no_deadlock(strategy, codec, world_size):
    graph = graph_of(SIZES, strategy, codec, world_size)
    report = dry_run(graph)
    assert sorted(report.order) == list(range(len(graph.tasks)))
    assert sum(report.bytes_sent) == sum(report.bytes_received)
    assert nx.is_directed_acyclic_graph(graph.dag)


@pytest.mark.parametrize("strategy", ["ps", "ring"])
def test_bytes_are_those_of_theory(strategy):
    """2 (N-1)/N of the payload, per rank."""
    report = dry_run(graph_of([120000], strategy, "exact", 4, least_bytes=4000))
    assert report.bytes_sent == (2 * 3 * 120000,) * 4


def test_native_reduce_counts_its_bytes():
    report = dry_run(graph_of([1000], "allreduce", RAW, 2))
    assert (report.bytes_sent, report.bytes_reduced) == ((0, 0), (4000, 4000))


def test_ps_push_slots_do_not_conflict():
    """In each slot every rank sends to one rank and receives from one."""
    graph = graph_of([40000], "ps", "exact", 4, partitions=1, least_bytes=4000)
    pushes = [t for t in graph.tasks if isinstance(t, Send) and t.channel == 0]
    for slot in range(3):
        group = pushes[4 * slot : 4 * slot + 4]
        assert len({t.rank for t in group}) == len({t.peer for t in group}) == 4


@pytest.mark.parametrize("strategy", ["ring", "gtopk"])
def test_every_rank_encodes_a_part_once(strategy):
    graph = graph_of(SIZES, strategy, "sign", 5)
    keys = [(t.rank, t.part) for t in graph.tasks if t.verb == "encode"]
    assert len(keys) == len(set(keys)) == 5 * len(graph.parts)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 8])
def test_a_tree_is_as_deep_as_a_logarithm(world_size):
    """Each rank but the owner sends one message up and receives one down, over few levels."""
    graph = graph_of([120000], "gtopk", "exact", world_size, partitions=1, least_bytes=4000)
    levels = (world_size - 1).bit_length()
    report = dry_run(graph)
    assert len(graph.parts) == 1
    assert sum(report.messages) == 2 * (world_size - 1)
    assert max(report.bytes_received) <= 4 * 120000 * levels
    sends = [t for t in graph.tasks if isinstance(t, Send)]
    assert len({t.slot for t in sends}) == 2 * levels


def test_slices_hold_every_task_once():
    graph = graph_of(SIZES, "ps", "sign", 3)
    programs = [graph.slice(rank) for rank in range(3)]
    assert sorted(t.text() for p in programs for t in p.tasks) == sorted(
        t.text() for t in graph.tasks
    )
    for program in programs:
        assert sum(program.waits) == sum(map(len, program.unlocks))
        assert all(j > i for i, after in enumerate(program.unlocks) for j in after)
        decodes = [
            u for t, u in zip(program.tasks, program.urgent, strict=True) if t.verb == "send"
        ]
        assert all(decodes)


def ring_of_two():
    return graph_of([1000], "ring", "exact", 2, partitions=1)


def test_a_send_without_recv_is_named():
    graph = ring_of_two()
    last = max(i for i, t in enumerate(graph.tasks) if isinstance(t, Recv))
    keep = [i for i in range(len(graph.tasks)) if i != last]
    cut = dataclasses.replace(
        graph, tasks=tuple(graph.tasks[i] for i in keep), after=((),) * len(keep)
    )
    with pytest.raises(DeadlockError, match=r"`send rank=.*` has no counterpart"):
        dry_run(cut)


def test_a_cycle_is_named():
    graph = ring_of_two()
    after = list(graph.after)
    after[0] = (len(after) - 1,)
    after[-1] = (0,)
    with pytest.raises(DeadlockError, match=r"wait for each other: .*encode.*") as caught:
        dry_run(dataclasses.replace(graph, after=tuple(after)))
    assert caught.value.stuck


def test_mismatched_orders_are_named():
    graph = graph_of([100000], "ps", "exact", 2, partitions=2)
    recvs = [i for i, t in enumerate(graph.tasks) if isinstance(t, Recv) and t.channel == 0]
    same = [i for i in recvs if graph.tasks[i].rank == graph.tasks[recvs[0]].rank]
    tasks = list(graph.tasks)
    tasks[same[0]], tasks[same[1]] = tasks[same[1]], tasks[same[0]]
    with pytest.raises(DeadlockError, match="meets"):
        dry_run(dataclasses.replace(graph, tasks=tuple(tasks)))


def test_a_send_stuck_behind_another_is_named():
    """FIFO: the first message waits for the answer to the second."""
    first, other = ((0, number, "exact") for number in (0, 1))
    tasks = (
        Encode(0, *first, "worker", False, False),
        Encode(0, *other, "worker", False, False),  # after the answer
        Send(0, *other, 1, 0, 0), Recv(1, *other, 0, 0, 0),
        Send(0, *first, 1, 0, 1), Recv(1, *first, 0, 0, 1),
        Recv(0, *first, 1, 0, 2), Send(1, *first, 0, 0, 2),
    )  # fmt: skip
    part = Part(0, "exact", "ps", 0, ((0, 1, 0, 0, 0),))
    after = ((), (6,), (1,), (2,), (0,), (4,), (7,), (5,))
    graph = Graph(Topology.flat(2), (part,), ({"exact": 4},), tasks, after, ((),))
    with pytest.raises(DeadlockError, match=r"7 tasks cannot run: .*send rank=0") as caught:
        dry_run(graph)
    assert len(caught.value.stuck) == 7


def test_reduces_in_other_orders_are_named():
    graph = graph_of([10, 10], "allreduce", "exact", 2, batch_bytes=4)
    reduces = [i for i, t in enumerate(graph.tasks) if isinstance(t, Reduce) and t.rank == 1]
    tasks = list(graph.tasks)
    tasks[reduces[0]], tasks[reduces[1]] = tasks[reduces[1]], tasks[reduces[0]]
    with pytest.raises(DeadlockError, match="rank 1 reduces parts"):
        dry_run(dataclasses.replace(graph, tasks=tuple(tasks)))


def test_build_refuses_what_partition_would():
    rows = ((0, 5, 0, 0, 0),)
    with pytest.raises(PlanError, match="cannot encode twice"):
        build([Part(0, "once", "ps", 0, rows)], Topology.flat(2), CODECS)
    with pytest.raises(PlanError, match="unknown codec 'zip'"):
        build([Part(0, "zip", "ps", 0, rows)], Topology.flat(2), CODECS)


@pytest.mark.parametrize("world_size, per_node", [(2, 1), (3, 2), (5, 2), (8, 4), (8, 3)])
@pytest.mark.parametrize("strategy, codec", PAIRS)
def test_a_rank_builds_its_slice_of_the_whole_graph(strategy, codec, world_size, per_node):
    """Task for task, with the same payload numbers, slots and waits. See [Note: own slice]."""
    graph = graph_of(SIZES, strategy, codec, world_size, per_node=per_node)
    for rank in range(world_size):
        whole, own = graph.slice(rank), build_program(graph.parts, graph.topology, CODECS, rank)
        assert dataclasses.asdict(own) == dataclasses.asdict(whole)


@pytest.mark.parametrize("world_size, per_node", [(2, 1), (3, 2), (5, 1), (8, 4)])
@pytest.mark.parametrize("strategy, codec", PAIRS)
def test_owners_are_the_ranks_that_encode_means(strategy, codec, world_size, per_node):
    graph = graph_of([40_000, *SIZES], strategy, codec, world_size, per_node=per_node)
    means = {(t.part, t.rank) for t in graph.tasks if t.verb == "encode" and t.side == "aggregator"}
    told = {
        (part.id, rank)
        for part in graph.parts
        for rank in range(world_size)
        if owns_mean(part, rank)
    }
    assert told == (means if load(strategy).TWO_WAY else set())


def slice_of_a_large_world(strategy):
    """A program of 1024 ranks and 100 tensors of a million elements."""
    topology, tensors = Topology.even(1024, 8), tensors_of([10**6] * 100)
    choices = {t.name: Choice("sign", strategy) for t in tensors}
    return build_program(partition(tensors, choices, topology, CODECS), topology, CODECS, 17)


@pytest.mark.parametrize("strategy", ["ps", "ring", "hierarchical", "gtopk"])
def test_a_slice_of_a_large_world_has_few_tasks(strategy):
    assert len(slice_of_a_large_world(strategy).tasks) < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ps", "ring", "hierarchical"])
def test_a_slice_of_a_large_world_takes_little_memory(strategy):
    tracemalloc.start()
    slice_of_a_large_world(strategy)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("per_node", [1, 2, 3])
def test_between_nodes_travels_what_nodes_without_insides_would_send(nodes, per_node):
    """2 (M-1)/M payloads per node, whatever the number of its ranks."""
    n = nodes * per_node
    graph = graph_of([9600 * n], "hierarchical", "exact", n, per_node=per_node, least_bytes=4000)
    payload = 4 * 9600 * n
    for sent in dry_run(graph).bytes_between:
        assert sent == 2 * (nodes - 1) * payload // nodes


@pytest.mark.parametrize("sizes", [(3, 1), (1, 2, 4), (2, 2, 1)])
def test_nodes_of_other_sizes_send_no_more(sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    nodes = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    topology, tensors = Topology.of(nodes), tensors_of([48 * 9600])
    choices = {t.name: Choice("exact", "hierarchical") for t in tensors}
    parts = partition(tensors, choices, topology, CODECS, least_bytes=4000)
    count = len(sizes)
    for sent in dry_run(build(parts, topology, CODECS)).bytes_between:
        assert sent <= 2 * (count - 1) / count * 4 * 48 * 9600
