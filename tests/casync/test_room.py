"""Varying lengths that both sides must know: room follows need, and nothing is lost."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from casync.codec import StateField
from casync.graph.layout import Layout, positions
from casync.memory.capacity import Room
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from tests.casync.fakes import Sparse, graph_of, run_apart, slices
from tests.casync.rendezvous import Meeting
from tests.patience import HANG

LENGTHS = (40, 30000, 9000)
TOTAL = sum(LENGTHS)


class Large(Sparse):
    """Indices and values of the first elements of at least 1 that fit; the others stay."""

    name = "large"
    states = (StateField("residual"),)
    cuts = True

    def encode_batch(
        self, x, table, out, at, *, state=None, capacity=None, scale=1.0, writeback=False, **_
    ):
        used = np.zeros(len(table), np.int64)
        for i, (start, n, _, _, first) in enumerate(table.tolist()):
            piece, residual = x[start : start + n], state["residual"][first : first + n]
            residual += piece * np.float32(scale)
            room = 8 * n if capacity is None else int(capacity[i])
            index = np.flatnonzero(np.abs(residual) >= 1)[: room // 8]
            sent = np.zeros(n, np.float32)
            sent[index] = residual[index]
            residual -= sent
            data = np.frombuffer(self.pack(sent), np.uint8)
            out[at[i] : at[i] + len(data)], used[i] = data, len(data)
            if writeback:
                piece[:] = sent
        return used


LARGE = Large()


class World:
    """Ranks over a transport without tags, with their programs and states."""

    def __init__(self, strategy, size, codec=LARGE, **options):
        codecs = {codec.name: codec}
        graph = graph_of(LENGTHS, strategy, codec.name, size, codecs=codecs, least_bytes=4000)
        ends, options = Meeting(size, HANG).endpoints(), RunOptions(timeout=HANG, **options)
        self.programs = slices(graph)
        self.executors = [Executor(end, codecs, options) for end in ends]
        sides = ("worker", "aggregator") if codec.states else ()
        self.states = [{(codec.name, s): codec.init_state(TOTAL) for s in sides} for _ in ends]
        self.pool = ThreadPoolExecutor(size)

    def step(self, number, share):
        """The average of gradients whose share `share` is large, the same on all ranks."""
        buckets = [gradient(share, number, rank) for rank in range(len(self.executors))]
        assert self.run(buckets, number) == [None] * len(buckets)
        assert all(torch.equal(bucket, buckets[0]) for bucket in buckets)
        return buckets[0]

    def run(self, buckets, number):
        """Errors, or None, by rank."""
        return run_apart(self.executors, self.programs, buckets, self.states, number, self.pool)

    def close(self):
        for executor in self.executors:
            executor.close()
        self.pool.shutdown()

    @property
    def sent(self):
        return sum(executor.counters.bytes_sent for executor in self.executors)

    @property
    def unused(self):
        return sum(executor.counters.bytes_unused["large"] for executor in self.executors)


@pytest.fixture
def start():
    """A function that makes worlds."""
    made = []

    def make(*given, **options):
        made.append(World(*given, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


def gradient(share, number, rank):
    """Whole numbers, of which a share is nonzero: sums are exact."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    values = torch.randint(1, 5, (TOTAL,), generator=generator).float()
    return values * (torch.rand(TOTAL, generator=generator) < share)


@pytest.mark.parametrize("strategy, share", [("ps", 4), ("exchange", 1)])
def test_room_follows_need_and_nothing_is_lost(strategy, share, start):
    """Steps with few large elements, two with many, then none.

    share: divisor of workers' residuals: the number of ranks, or 1 if the gradients that they are
    of were divided by it already.
    """
    world, size = start(strategy, 4), 4
    shares = [0.01] * 3 + [0.5] * 2 + [0.01] * 2 + [0.0] * 12
    got, took = torch.zeros(TOTAL), []
    for number, part in enumerate(shares):
        before = world.sent
        got += world.step(number, part)
        took.append(world.sent - before)
    given = [gradient(part, n, r) for n, part in enumerate(shares) for r in range(size)]
    left = sum(
        torch.from_numpy(state["residual"]) / (share if side == "worker" else 1)
        for states in world.states
        for (_, side), state in states.items()
    )
    torch.testing.assert_close(got + left, sum(given) / size, rtol=1e-6, atol=1e-4)
    assert took[1] < took[0] / 4  # the first step has room for all
    assert took[5] > 2 * took[2]  # room grew with need
    assert took[-1] < took[5] / 2  # and shrank again


@pytest.mark.parametrize("strategy", ["ring", "hierarchical", "gtopk"])
def test_ranks_agree_while_room_changes(strategy, start):
    world, took = start(strategy, 4), []
    for number, part in enumerate([0.01, 0.01, 0.5, 0.5, 0.01]):
        before = world.sent
        world.step(number, part)
        took.append(world.sent - before)
    assert took[1] < took[0]
    assert took[3] > took[2]


def test_room_that_is_left_is_counted(start):
    world = start("ps", 2)
    world.step(0, 0.0)
    assert world.unused == 0  # lengths are known once the next step begins
    world.step(1, 0.0)
    headers = 8 * sum(len(part.rows) for part in world.programs[0].parts)
    sends = sum(e.counters.messages_sent for e in world.executors) // 2
    assert sends > 0
    assert world.unused <= world.sent
    assert world.unused > world.sent / 2 - sends * headers


@pytest.mark.parametrize("strategy", ["ps", "ring", "exchange"])
def test_lengths_go_first_where_the_host_may_wait(strategy, start):
    """From the second step on, after the first has shown that room for all is too much."""
    world, took = start(strategy, 3, Sparse(), waits=True), []
    for number in range(3):
        mean = sum(gradient(0.02, number, rank) for rank in range(3)) / 3
        before = world.executors[0].counters.bytes_sent
        torch.testing.assert_close(world.step(number, 0.02), mean)
        took.append(world.executors[0].counters.bytes_sent - before)
    assert took[1] < took[0] / 10
    assert world.executors[0].counters.bytes_exact == took[1] + took[2]
    assert world.executors[0].counters.bytes_unused["sparse"] > 0


def test_lengths_that_cannot_be_are_an_error(start):
    class Lies(Sparse):
        """A codec whose second step reports more elements than are possible."""

        def encode_batch(self, *args, step=0, **options):
            return super().encode_batch(*args, **options) + 10**6 * step

    world = start("ps", 2, Lies(), waits=True)
    world.step(0, 0.02)
    errors = world.run([gradient(0.02, 1, rank) for rank in range(2)], 1)
    assert any("do not fit the bounds" in str(error) for error in errors)


def layout_of(bounds):
    bound = np.array(bounds, np.int64)
    at = positions(bound, 8 * len(bound))
    return Layout(False, 8 * len(bound), bound, at[:-1], int(at[-1]))


numbers = some.integers(0, 10**6)


@given(some.lists(some.tuples(numbers, numbers), min_size=1, max_size=5), some.data())
def test_a_room_holds_a_quarter_more_than_was_used_if_there_may_be_so_much(pairs, data):
    layout = layout_of([max(pair) for pair in pairs])
    room = Room(layout.at, layout.bound, layout.size)
    for _ in range(4):
        used = np.array(
            [data.draw(some.integers(0, int(c))) for c in room.capacity.tolist()], np.int64
        )
        room = room.next(layout, used)
        assert (room.capacity <= layout.bound).all()
        assert (room.capacity >= np.minimum(layout.bound, used + used // 4)).all()
        assert room.size <= layout.size


def test_a_room_does_not_follow_every_change():
    layout = layout_of([100_000])
    room = Room(layout.at, layout.bound, layout.size).next(layout, np.array([10_000]))
    assert room.capacity[0] < 20_000
    for used in (9_800, 10_300, 8_500, 10_000):
        assert room.next(layout, np.array([used])) is room
    assert room.next(layout, np.array([13_000])).capacity[0] > room.capacity[0]
    assert room.next(layout, np.array([1_000])).capacity[0] < room.capacity[0]
