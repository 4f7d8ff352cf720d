"""Captured programs give the same bits as uncaptured ones, step by step; a graph is a list here."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy

import numpy as np
import pytest
import torch

import compll
from casync.errors import PlanError
from casync.memory.host import HostMemory
from casync.runtime.executor import Executor
from casync.runtime.options import Capture, RunOptions
from tests.casync.emulated import compiled
from tests.casync.fakes import CODECS, MEANS, Exact, Sign, gradients, graph_of
from tests.casync.rendezvous import Meeting
from tests.casync.streams import at_work
from tests.patience import HANG

LENGTHS = (40, 5000)
TOTAL = sum(LENGTHS)
BOTH = (Capture.NEVER, Capture.LAUNCH)


class Stream:
    """Runs its work at once, or records it during capture."""

    def __init__(self, memory):
        self.memory = memory

    def run(self, work):
        if self.memory.taken is None:
            work()
        else:
            self.memory.taken.append(work)

    def after(self, event):
        pass

    def record(self, event):
        pass


class Memory(HostMemory):
    """Host memory with graphs. captured: their number; launched: number of launches."""

    taken = None
    captured = launched = 0

    def stream(self, *, urgent=False):
        return Stream(self)

    def caller(self):
        return Stream(self)

    def capture(self, work):
        self.taken, self.captured = [], self.captured + 1
        work()
        taken, self.taken = self.taken, None

        def launch():
            self.launched += 1
            for each in taken:
                each()

        return launch


class Dice(Sign):
    """Adds a value that follows from the step; a captured call keeps its tick."""

    name = "dice"
    tick = (0,)

    @contextmanager
    def ticking(self, tick):
        self.tick = tick
        yield

    def encode_batch(self, x, table, out, at, *, step=0, **options):
        now = step + int(self.tick[0])
        for start, n, *_ in table.tolist():
            x[start : start + n] += np.sin(np.arange(n, dtype=np.float32) + now)
        return super().encode_batch(x, table, out, at, **options)


class World:
    """Ranks in threads. capture: as for the executor, in the next steps."""

    def __init__(self, strategy, codecs, *, capture=Capture.LAUNCH, size=3):
        self.capture = capture
        name = next(iter(codecs))
        graph = graph_of(LENGTHS, strategy, name, size, codecs=codecs, least_bytes=4000)
        self.programs = [graph.slice(rank) for rank in range(size)]
        self.memories = [Memory() for _ in range(size)]
        ends = Meeting(size, HANG).endpoints()
        self.executors = [
            Executor(
                end,
                {name: copy(codecs[name])},
                RunOptions(timeout=HANG),
                memory=memory,
            )
            for end, memory in zip(ends, self.memories, strict=True)
        ]
        self.codec = codecs[name]
        self.fresh()
        self.buckets = [torch.zeros(TOTAL) for _ in range(size)]
        self.pool = ThreadPoolExecutor(size)

    def fresh(self):
        """Initial states, in arrays of their own."""
        sides = ("worker", "aggregator")
        self.states = [
            {(self.codec.name, side): self.codec.init_state(TOTAL) for side in sides}
            for _ in self.programs
        ]

    def step(self, number, *, elsewhere=False):
        """The average. elsewhere: in other buckets than before."""
        if elsewhere:
            self.buckets = [torch.zeros(TOTAL) for _ in self.buckets]
        for bucket, values in zip(self.buckets, gradients(TOTAL, 3, seed=number), strict=True):
            bucket.copy_(values)
        futures = [self.pool.submit(self.run, rank, number) for rank in range(3)]
        for future in futures:
            future.result(HANG)
        assert all(torch.equal(bucket, self.buckets[0]) for bucket in self.buckets)
        return self.buckets[0].clone()

    def run(self, rank, number):
        bucket, states = self.buckets[rank], self.states[rank]
        program, how = self.programs[rank], self.capture
        self.executors[rank].submit(program, bucket, states, number, capture=how).wait()

    @property
    def captured(self):
        return [memory.captured for memory in self.memories]

    @property
    def launched(self):
        return [memory.launched for memory in self.memories]


FIXED = sorted(pair for pair in MEANS if pair[1] in ("sign", "exact"))


@pytest.mark.parametrize("strategy, codec", FIXED)
def test_captured_runs_have_the_bits_of_others(strategy, codec):
    codecs = {codec: CODECS[codec]}
    plain, other = (World(strategy, codecs, capture=each) for each in BOTH)
    for number in range(5):
        assert torch.equal(plain.step(number), other.step(number)), number
    assert other.captured == [1] * 3
    assert other.launched == [4] * 3  # all but the first
    for one, two in zip(plain.executors, other.executors, strict=True):
        assert (one.counters.jobs, one.counters.bytes_sent) == (5, two.counters.bytes_sent)
        assert one.counters.messages_received == two.counters.messages_received
        assert one.counters.bytes_reduced == two.counters.bytes_reduced


def test_steps_are_counted_where_kernels_run():
    plain, other = (World("ps", {"dice": Dice()}, capture=each) for each in BOTH)
    for number in range(5):
        assert torch.equal(plain.step(3 * number), other.step(3 * number)), number
    assert other.launched == [4] * 3


def test_a_bucket_elsewhere_is_copied_to_where_it_was():
    codecs = {"sign": CODECS["sign"]}
    plain, other = (World("ps", codecs, capture=each) for each in BOTH)
    for number in range(5):
        wanted = plain.step(number)
        assert torch.equal(wanted, other.step(number, elsewhere=number > 2)), number
    assert other.captured == [1] * 3


def test_states_elsewhere_are_captured_anew():
    """A loaded state causes a normal run, which makes its buffers, and then a new capture."""
    codecs = {"sign": CODECS["sign"]}
    plain, other = (World("ring", codecs, capture=each) for each in BOTH)
    for number in range(7):
        if number == 4:
            plain.fresh()
            other.fresh()
        assert torch.equal(plain.step(number), other.step(number)), number
    assert other.captured == [2] * 3
    assert other.launched == [3 + 2] * 3


class Follows(Exact):
    """A codec whose host computation depends on the step."""

    name = "follows"
    repeats = False


@pytest.mark.parametrize(
    "codec, why",
    [
        (Follows(), "the host computes parameters of follows in each step"),
        (CODECS["sparse"], "the lengths of sparse vary"),
    ],
)
def test_payloads_of_varying_length_are_not_captured_and_that_is_told(codec, why, caplog):
    world = World("ps", {codec.name: codec})
    for number in range(3):
        world.step(number)
    assert world.captured == [0] * 3
    told = [f"capture: {why}, so its tasks are launched one by one"] * 3  # by each rank, once
    assert [record.getMessage() for record in caplog.records] == told


def test_a_graph_is_made_while_tasks_are_launched_one_by_one_and_given_up_without_capture():
    codecs = {"sign": CODECS["sign"]}
    plain = World("ps", codecs, capture=Capture.NEVER)
    other = World("ps", codecs, capture=Capture.MAKE)
    for number, how in enumerate([*3 * ["MAKE"], "LAUNCH", "NEVER", "LAUNCH", "LAUNCH"]):
        other.capture = Capture[how]
        assert torch.equal(plain.step(number), other.step(number)), number
        assert other.captured == [(number > 0) + (number > 4)] * 3
        assert other.launched == [(number > 2) + (number > 4) + (number > 5)] * 3
    for one, two in zip(plain.executors, other.executors, strict=True):
        assert one.counters.bytes_sent == two.counters.bytes_sent
        assert one.counters.messages_sent == two.counters.messages_sent


@pytest.mark.parametrize("how", [Capture.MAKE, Capture.LAUNCH])
def test_a_capture_that_fails_ends_a_run_only_if_it_was_to_be_launched(how):
    world = World("ps", {"exact": Fails()}, capture=how)
    world.step(0)
    if how is Capture.LAUNCH:
        with pytest.raises(PlanError, match=r"rank \d: a capture failed: OSError: not permitted"):
            world.step(1)
        assert any(executor.failed for executor in world.executors)
        return
    plain = World("ps", {"exact": Exact()}, capture=Capture.NEVER)
    plain.step(0)
    assert torch.equal(plain.step(1), world.step(1))
    assert [executor.pop_capture_error() for executor in world.executors] == 3 * [
        "OSError: not permitted"
    ]
    assert not any(executor.pop_capture_error() for executor in world.executors)
    assert plain.executors[0].counters.bytes_sent == world.executors[0].counters.bytes_sent


class Fails(Exact):
    """A codec whose second ticks are refused, as CUDA refuses some calls in a capture."""

    @contextmanager
    def ticking(self, tick):
        raise OSError("not permitted")
        yield


def test_a_captured_program_that_is_dropped_leaves_nothing():
    world = World("ps", {"exact": Exact()})
    for number in range(3):
        world.step(number)
    left = [weakref.ref(bucket) for bucket in world.buckets]
    for executor in world.executors:
        executor.settle()
    world.programs, world.buckets = [], []
    gc.collect()
    assert not any(bucket() is not None for bucket in left)


def test_a_closed_executor_leaves_nothing_to_the_collector():
    world = World("ps", {"exact": Exact()}, capture=Capture.NEVER)
    for number in range(3):
        world.step(number)
    left = [weakref.ref(executor) for executor in world.executors]
    for executor in world.executors:
        executor.close()
    gc.collect()
    gc.disable()
    try:
        del executor, world.executors
        assert not any(one() is not None for one in left)
    finally:
        gc.enable()


def test_an_error_in_a_captured_program_is_told():
    world = World("ps", {"exact": Exact()})
    world.step(0)
    for executor in world.executors:
        executor.abort(ValueError("over"))
    with pytest.raises(ValueError, match="over"):
        world.step(1)


@pytest.mark.parametrize("name", ["qsgd", "terngrad_uniform"])
def test_a_tick_counts_for_steps(name):
    """A captured encode that runs `tick` steps later makes the draws of that step."""
    codec = compiled(name)
    x = np.linspace(-1, 1, 3000, dtype=np.float32)
    table, at = map(codec.hold, (np.array([[0, 3000, 0, 0, 0]]), np.zeros(1, np.int64)))
    at_work.device = True
    try:
        outs = []
        for step, ticks in ((5, 0), (2, 3), (2, 0)):
            out = np.zeros(codec.payload_bytes(3000), np.uint8)
            with codec.ticking(np.array([ticks], np.int64)):
                codec.encode_batch(x.copy(), table, out, at, step=step)
            outs.append(out.tobytes())
    finally:
        at_work.device = False
    assert outs[0] == outs[1] != outs[2]
    assert codec.backend.tick is None


def test_whose_host_follows_the_step():
    found = {name: compll.compile(name, "reference").repeats for name in ("dgc", "topk", "qsgd")}
    assert found == {"dgc": False, "topk": True, "qsgd": True}
