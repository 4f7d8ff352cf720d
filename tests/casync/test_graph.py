"""Graphs of every strategy: they run through, count their bytes, print and parse back."""

import dataclasses

import networkx as nx
import pytest

from casync.errors import DeadlockError, GraphSyntaxError, PlanError
from casync.graph.dryrun import dry_run
from casync.graph.graph import Graph, build
from casync.graph.plan import Part
from casync.graph.tasks import Recv, Reduce, Send
from tests.casync.fakes import CODECS, PAIRS, SIZES, graph_of


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("strategy, codec", PAIRS)
def test_no_deadlock_and_round_trip(strategy, codec, world_size):
    graph = graph_of(SIZES, strategy, codec, world_size)
    report = dry_run(graph)
    assert sorted(report.order) == list(range(len(graph.tasks)))
    assert sum(report.bytes_sent) == sum(report.bytes_received)
    assert nx.is_directed_acyclic_graph(graph.dag)
    assert Graph.parse(graph.text()) == graph
    assert graph.dot().count("label=") == len(graph.tasks) + world_size


@pytest.mark.parametrize("strategy", ["ps", "ring"])
def test_bytes_are_those_of_theory(strategy):
    """2 (N-1)/N of the payload, per rank."""
    report = dry_run(graph_of([120000], strategy, "exact", 4))
    assert report.bytes_sent == (2 * 3 * 120000,) * 4


def test_native_reduce_counts_its_bytes():
    report = dry_run(graph_of([1000], "allreduce", None, 2))
    assert (report.bytes_sent, report.bytes_reduced) == ((0, 0), (4000, 4000))


def test_ps_push_slots_do_not_conflict():
    """In each slot every rank sends to one rank and receives from one."""
    graph = graph_of([40000], "ps", "exact", 4, partitions=1)
    pushes = [t for t in graph.tasks if isinstance(t, Send) and t.channel == 0]
    for slot in range(3):
        group = pushes[4 * slot : 4 * slot + 4]
        assert len({t.rank for t in group}) == len({t.peer for t in group}) == 4


def test_every_rank_encodes_a_part_once_in_a_ring():
    graph = graph_of(SIZES, "ring", "sign", 5)
    keys = [(t.rank, t.part) for t in graph.tasks if t.verb == "encode"]
    assert len(keys) == len(set(keys)) == 5 * len(graph.parts)


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
    text = "\n".join(
        [
            "casync graph 1",
            "world 2",
            'part 0 ["exact", "ps", 0, [[0, 1, 0, 0, 0]], 4]',
            "0: encode rank=0 part=0 payload=0 side=worker average=0 writeback=0",
            "1: encode rank=0 part=0 payload=1 side=worker average=0 writeback=0 after 6",
            "2: send rank=0 part=0 payload=1 peer=1 channel=0 after 1",
            "3: recv rank=1 part=0 payload=1 peer=0 channel=0 after 2",
            "4: send rank=0 part=0 payload=0 peer=1 channel=0 after 0",
            "5: recv rank=1 part=0 payload=0 peer=0 channel=0 after 4",
            "6: recv rank=0 part=0 payload=0 peer=1 channel=0 after 7",
            "7: send rank=1 part=0 payload=0 peer=0 channel=0 after 5",
        ]
    )
    with pytest.raises(DeadlockError, match=r"7 tasks cannot run: .*send rank=0") as caught:
        dry_run(Graph.parse(text))
    assert len(caught.value.stuck) == 7


def test_reduces_in_other_orders_are_named():
    graph = graph_of([10, 10], "allreduce", "exact", 2, batch_bytes=4)
    reduces = [i for i, t in enumerate(graph.tasks) if isinstance(t, Reduce) and t.rank == 1]
    tasks = list(graph.tasks)
    tasks[reduces[0]], tasks[reduces[1]] = tasks[reduces[1]], tasks[reduces[0]]
    with pytest.raises(DeadlockError, match="rank 1 reduces parts"):
        dry_run(dataclasses.replace(graph, tasks=tuple(tasks)))


@pytest.mark.parametrize(
    "change, message",
    [
        (("casync graph 1", "casync graph 2"), "line 2: expected 'casync graph 1'"),
        (("part 0", "part 1"), "line 3: expected part 0"),
        (("0: encode", "1: encode"), "expected task 0"),
        (("0: encode rank=1", "0: encode rank=9"), "out of range"),
        (("0: encode", "0: devour"), "unknown task 'devour'"),
        (("[[0,", "[[zero,"), "line 3: "),
        ((" after 0", " after x"), "invalid literal"),
        ((" after 0", " after 99"), "waits for task 99"),
    ],
)
def test_bad_text_names_its_line(change, message):
    text = graph_of([1000], "ps", "exact", 2, partitions=1).text().replace(*change, 1)
    with pytest.raises(GraphSyntaxError, match=message):
        Graph.parse(text)


def test_build_refuses_what_partition_would():
    rows = ((0, 5, 0, 0, 0),)
    with pytest.raises(PlanError, match="cannot encode twice"):
        build([Part(0, "once", "ps", 0, rows)], 2, CODECS)
    with pytest.raises(PlanError, match="unknown codec 'zip'"):
        build([Part(0, "zip", "ps", 0, rows)], 2, CODECS)
