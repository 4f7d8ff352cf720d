"""Tasks that share calls: the same bits in few calls, and errors that name the sender."""

import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from casync.building.parts import Choice
from casync.building.tasks import Encode, Joined, Merge, Recv, Send, members
from casync.codec import StateField
from casync.errors import PayloadError
from casync.graph.graph import build, build_program
from casync.graph.joining import Bulk, join_tasks
from casync.graph.plan import partition
from casync.graph.shares import share_out
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.topology import Topology
from tests.casync.fakes import (
    CODECS,
    EVERY,
    PAIRS,
    Exact,
    gradients,
    graph_of,
    run,
    run_apart,
    slices,
    states_of,
    tensors_of,
    world,
)
from tests.casync.rendezvous import Endpoint, Meeting
from tests.casync.test_executor import EACH_ONCE
from tests.patience import HANG

SIZES = (7, 31, 1000, 33, 10003)
DEVICE = Bulk(math.inf, at_once=True)


def averages(graph, size, bulk):
    """Averages of two steps, and the states after them."""
    total = max(row[0] + row[1] for part in graph.parts for row in part.rows)
    states, found = [states_of(total) for _ in range(size)], []
    programs = slices(graph)
    with world(size, bulk=bulk) as executors:
        for step in range(2):
            found += run(executors, programs, gradients(total, size, seed=step), states, step)
    kept = [torch.from_numpy(v) for own in states for side in own.values() for v in side.values()]
    return found + kept


@pytest.mark.parametrize("strategy, codec", EACH_ONCE)
def test_bits_are_those_without_shared_calls(strategy, codec):
    graph = graph_of(SIZES, strategy, codec, 5, least_bytes=400)
    for one, other in zip(averages(graph, 5, True), averages(graph, 5, False), strict=True):
        assert torch.equal(one, other)


def met(graph, size, bulk):
    """The same over a transport without tags."""
    total = max(row[0] + row[1] for part in graph.parts for row in part.rows)
    states, found = [states_of(total) for _ in range(size)], []
    ends = Meeting(size, HANG).endpoints()
    executors = [Executor(end, CODECS, RunOptions(timeout=HANG, bulk=bulk)) for end in ends]
    programs = slices(graph)
    with ThreadPoolExecutor(size) as pool:
        for step in range(2):
            buckets = gradients(total, size, seed=step)
            assert run_apart(executors, programs, buckets, states, step, pool) == [None] * size
            found += buckets
    for executor in executors:
        executor.close()
    kept = [torch.from_numpy(v) for own in states for side in own.values() for v in side.values()]
    return found + kept


@pytest.mark.parametrize("strategy, codec", EVERY)
def test_bits_are_those_without_shared_messages(strategy, codec):
    """Without tags, a slot's payloads lie side by side on both sides."""
    sizes = [300 + 37 * i for i in range(9)]
    tensors, topology = tensors_of(sizes), Topology.even(6, 2)
    choices = {t.name: Choice(codec, strategy, 2) for t in tensors}
    shares = dict(zip([t.name for t in tensors], share_out(sizes, 6, least_bytes=400), strict=True))
    parts = partition(tensors, choices, topology, CODECS, shares=shares, least_bytes=400)
    graph = build(parts, topology, CODECS, rotates=False)
    one, other = met(graph, 6, True), met(graph, 6, False)
    assert all(map(torch.equal, one, other))
    assert all(torch.equal(one[0], each) for each in one[:6]) or "push" in strategy


@pytest.mark.slow
@pytest.mark.parametrize("strategy, codec", EVERY)
def test_bits_of_32_ranks_and_300_tensors(strategy, codec):
    sizes = [1 + 37 * i % 400 for i in range(300)]
    tensors, topology = tensors_of(sizes), Topology.even(32, 4)
    choices = {t.name: Choice(codec, strategy) for t in tensors}
    shares = share_out(sizes, 32, least_bytes=1000)
    named = {t.name: mine for t, mine in zip(tensors, shares, strict=True)}
    parts = partition(tensors, choices, topology, CODECS, shares=named)
    graph = build(parts, topology, CODECS)
    for one, other in zip(averages(graph, 32, True), averages(graph, 32, False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("strategy, codec", PAIRS)
def test_every_task_is_there_once_and_after_what_it_waits_for(strategy, codec):
    graph = graph_of(SIZES, strategy, codec, 5, least_bytes=400)
    for program in map(graph.slice, range(5)):
        for bulk in (DEVICE, Bulk(1000.0), Bulk(math.inf, apart=True)):
            shared = join_tasks(program, CODECS, bulk)
            tasks = [each.text() for task in shared.tasks for each in members(task)]
            assert Counter(tasks) == Counter(task.text() for task in program.tasks)
            assert all(j > i for i, after in enumerate(shared.unlocks) for j in after)
            assert sum(shared.waits) == sum(map(len, shared.unlocks))


def test_sums_inside_nodes_are_one_reduce_scatter_of_a_bucket():
    """Its shares are the parts that each rank leads, and cover all summed elements."""
    topology, codec = Topology.even(6, 3), "exact"
    tensors = tensors_of([600] * 12)
    choices = {t.name: Choice(codec, "hierarchical") for t in tensors}
    parts = partition(tensors, choices, topology, CODECS, least_bytes=400)
    graph, moved = build(parts, topology, CODECS, rotates=False), {}

    class Recording(Endpoint):
        def exchange(self, transfers):
            moved.setdefault(self.rank, []).append(transfers)
            super().exchange(transfers)

    meeting = Meeting(6, HANG)
    executors = [
        Executor(Recording(meeting, rank), CODECS, RunOptions(timeout=HANG)) for rank in range(6)
    ]
    found = gradients(12 * 600, 6, seed=0)
    wanted = torch.stack(found).mean(0)
    with ThreadPoolExecutor(6) as pool:
        assert run_apart(executors, slices(graph), found, [{}] * 6, 0, pool) == [None] * 6
    for executor in executors:
        executor.close()
    assert all(torch.equal(found[0], each) for each in found)
    torch.testing.assert_close(found[0], wanted)
    for rank, groups in moved.items():
        (scatter,) = [each for group in groups for each in group if each.kind == "reduce"]
        node = topology.nodes[topology.node_of[rank]]
        assert scatter.ranks == node
        assert sum(scatter.shares) == scatter.data.numel() == 12 * 600
        led = Counter()
        for part in parts:
            led[node[part.owner % 3]] += part.elements
        assert scatter.shares == tuple(led[each] for each in node)


def program_of(n, rank=0, codecs=CODECS, codec="exact"):
    tensors, topology = tensors_of([64 * n] * 20), Topology.flat(n)
    choices = {t.name: Choice(codec, "ps") for t in tensors}
    parts = partition(tensors, choices, topology, codecs, least_bytes=4)
    return build_program(parts, topology, codecs, rank)


@pytest.mark.parametrize("n", [2, 3, 4, 8, 33, 128])
def test_calls_grow_with_the_logarithm_of_ranks(n):
    """Merges and decodes of payloads that arrive one by one; one encode for all owners."""
    program = join_tasks(program_of(n), CODECS, Bulk(math.inf))
    calls = [task for task in program.tasks if not isinstance(task, Send | Recv)]
    most = (n - 1).bit_length() + 1
    kinds = Counter(type(members(task)[0]).__name__ for task in calls)
    assert kinds["Encode"] == 2
    assert kinds["Merge"] <= most
    assert kinds["Decode"] <= most


def test_payloads_of_a_slot_are_decoded_by_one_call():
    topology = Topology.flat(8)
    parts = program_of(8).parts
    program = join_tasks(build_program(parts, topology, CODECS, 3, rotates=False), CODECS, DEVICE)
    calls = [task for task in program.tasks if not isinstance(task, Send | Recv)]
    assert [len(members(task)) for task in calls] == [7, 7, 1, 7]
    assert len({t.slot for t in program.tasks if isinstance(t, Send | Recv)}) == 2


def test_a_call_for_several_owners_is_bounded():
    """The first encoded payloads travel while more are encoded."""
    program = join_tasks(program_of(8), CODECS, Bulk(4 * 64 * 20 * 3.0))
    encodes = [task for task in program.tasks if isinstance(members(task)[0], Encode)]
    assert sorted(len(members(task)) for task in encodes) == [1, 1, 3, 3]


def test_codecs_with_a_state_of_a_tensor_keep_calls_of_their_own():
    class Scalar(Exact):
        states = (StateField("level", per="tensor", fate="mean"),)

    codecs = CODECS | {"scalar": Scalar()}
    program = join_tasks(program_of(8, codecs=codecs, codec="scalar"), codecs, DEVICE)
    assert not any(isinstance(t, Joined) and isinstance(t.tasks[0], Encode) for t in program.tasks)


def test_the_bad_payload_of_a_call_is_named():
    class Picky(Exact):
        """Refuses payloads of rank 3."""

        name = "picky"

        def decode_batch(self, payload, table, at, used, out, **options):
            for first, size in zip(at, used, strict=True):
                if (self.unpack(payload[first : first + size], size // 4) == 3.0).all():
                    raise ValueError("three")
            super().decode_batch(payload, table, at, used, out, **options)

    codecs = CODECS | {"picky": Picky()}
    programs = [program_of(8, rank, codecs, "picky") for rank in range(8)]
    buckets = [torch.zeros(20 * 64 * 8) for _ in programs]
    for part in programs[0].parts:
        for start, length, *_ in part.rows if part.owner == 0 else ():
            buckets[3][start : start + length] = 3.0
    with world(8, codecs=codecs) as executors:
        futures = [
            executor.submit(program, bucket, {}, 0)
            for executor, program, bucket in zip(executors, programs, buckets, strict=True)
        ]
        with pytest.raises(PayloadError, match=r"rank 0, peer 3, task `merge .*three"):
            futures[0].wait()


def test_merges_of_one_call_are_in_rank_order():
    """Merges of each piece are in rank order, whatever other tasks the call has."""
    program = join_tasks(program_of(8), CODECS, Bulk(math.inf))
    first = next(t for t in program.tasks if isinstance(members(t)[0], Merge))
    assert [task.payload % 8 for task in members(first)] == [1, 2, 3, 4]
