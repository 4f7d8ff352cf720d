"""Programs on streams: every legal order gives the same bits, and no event can be left out."""

import dataclasses
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from casync.building.parts import Choice
from casync.building.tasks import DecodeRounds, EncodeRound, Recv, Send
from casync.errors import CasyncError, DeadlockError, PeerTimeout
from casync.estimates import Estimate
from casync.graph.graph import build_program
from casync.graph.plan import partition
from casync.memory.host import HostMemory
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.strategies import list_strategies
from casync.strategies.gossip import grid
from casync.topology import Topology
from tests.casync.fakes import (
    CODECS,
    EVERY,
    PAIRS,
    gradients,
    graph_of,
    planned,
    replay,
    slices,
    states_of,
    tensors_of,
)
from tests.casync.rendezvous import Meeting
from tests.casync.streams import FakeEnd, FakeMemory, Schedule, poison
from tests.casync.test_rounds import Twice
from tests.casync.test_vote import Voter
from tests.patience import HANG
from tests.tiers import first_fast

LENGTHS = (7, 31, 5000)
TOTAL = sum(LENGTHS)
STEPS = 2


class Case:
    """Programs of all ranks, their codecs, and states made by `states(codecs)`."""

    def __init__(self, programs, codecs=CODECS, states=lambda codecs: states_of(TOTAL)):
        self.programs, self.size = programs, len(programs)
        self.codecs = codecs if isinstance(codecs, list) else [codecs] * self.size
        self._states = states

    def states(self):
        return [self._states(own) for own in self.codecs]

    def expected(self):
        """Results by threads, over a transport without tags: averages of each step, and states."""
        states, ends, found = self.states(), Meeting(self.size, HANG).endpoints(), []
        with ThreadPoolExecutor(self.size) as pool:
            for number in range(STEPS):
                buckets = gradients(TOTAL, self.size, seed=number)
                given = zip(self.programs, ends, self.codecs, buckets, states, strict=True)
                for future in [pool.submit(replay, *each, number) for each in given]:
                    future.result()
                found += buckets
        return found + flat(states)


def flat(states):
    """Arrays of all states, as tensors."""
    arrays = (each[name] for state in states for each in state.values() for name in each)
    return [torch.from_numpy(array) for array in arrays]


def payloads(task, program):
    """Payloads of a task; the last task of a part's rounds uses all of them."""
    if not isinstance(task, DecodeRounds):
        return [task.payload]
    return [t.payload for t in program.tasks if isinstance(t, EncodeRound) and t.part == task.part]


class World:
    """Ranks on fake streams. A payload is poisoned as soon as no task of its run will read it."""

    def __init__(self, case, schedule):
        self.size, self.schedule = case.size, schedule
        meeting, ranks = Meeting(case.size), range(case.size)
        self.memories = [FakeMemory(schedule) for _ in ranks]
        self.programs = case.programs
        self.tasks = [{task.text(): task for task in p.tasks} for p in self.programs]
        self.readers = [Counter(n for t in p.tasks for n in payloads(t, p)) for p in self.programs]
        self.left = [{} for _ in ranks]
        self.freed = []
        self.executors = [
            Executor(
                FakeEnd(meeting, rank, self.used),
                case.codecs[rank],
                RunOptions(delay=lambda text, rank=rank: self.used(rank, text)),
                memory=self.memories[rank],
            )
            for rank in ranks
        ]  # fmt: skip
        self.states = case.states()
        self.averages = {}

    def used(self, rank, text):
        """A task takes effect now; an earlier one may have been a payload's last."""
        for tensor in self.freed:
            poison(tensor)
        self.freed.clear()
        program = self.programs[rank]
        tasks = map(self.tasks[rank].__getitem__, text.split("; "))
        for payload in (number for task in tasks for number in payloads(task, program)):
            left = self.left[rank].setdefault(payload, self.readers[rank][payload])
            self.left[rank][payload] = left - 1 or self.readers[rank][payload]
            if left == 1:
                prepared = self.executors[rank]._prepared[program]
                self.freed.append(prepared.payloads.by_payload[payload].tensor)

    def step(self, number):
        """Submit a bucket of every rank, whose values arrive late."""
        for rank, values in enumerate(gradients(TOTAL, self.size, seed=number)):
            bucket = torch.full_like(values, float("nan"))
            self.memories[rank].users.run(lambda b=bucket, v=values: b.copy_(v))
            future = self.executors[rank].submit(
                self.programs[rank], bucket, self.states[rank], number
            )
            future.add_done_callback(lambda done, r=rank: self.ended(number, r, done))

    def ended(self, number, rank, done):
        self.averages[number, rank] = done.value().clone()

    def run(self):
        """The averages of all steps, by step and rank, and the states."""
        for number in range(STEPS):
            self.step(number)
        self.schedule.run()
        for executor in self.executors:
            executor.close()
        steps = [self.averages[n, r] for n in range(STEPS) for r in range(self.size)]
        return steps + flat(self.states)


def case_of(strategy, codec, size=3):
    if strategy == "gossip":
        return gossip(codec, size)
    if codec in ("voter", "twice"):
        codecs = {"voter": Voter(), "twice": Twice()}
        choices = {t.name: Choice(codec, strategy, 2) for t in tensors_of(LENGTHS)}
        graph = planned(tensors_of(LENGTHS), choices, size, codecs)
        return Case(slices(graph), codecs, worker_states)
    return Case(slices(graph_of(LENGTHS, strategy, codec, size, least_bytes=4000)))


def worker_states(codecs):
    return {(key, "worker"): codec.init_state(TOTAL) for key, codec in codecs.items()}


def gossip(codec, size):
    """Each rank has its own codecs, which know its neighbours."""
    flat_ = Topology.flat(size)
    codecs = [
        {codec: Estimate(CODECS[codec], grid("ring", size).neighbours(r))} for r in range(size)
    ]
    choices = {t.name: Choice(codec, "gossip:ring", 2) for t in tensors_of(LENGTHS)}
    parts = partition(tensors_of(LENGTHS), choices, flat_, codecs[0], least_bytes=4000)
    programs = [build_program(parts, flat_, own, rank) for rank, own in enumerate(codecs)]
    return Case(programs, codecs, worker_states)


def same(one, other):
    return all(map(torch.equal, one, other))


PROGRAMS = [*EVERY, ("vote", "voter"), ("allreduce", "twice"), ("gossip", "sparse")]


def refuse_difference(case, orders):
    wanted = case.expected()
    for seed in range(orders):
        assert same(World(case, Schedule(seed)).run(), wanted), f"schedule {seed}"


def test_every_strategy_is_there():
    assert {strategy for strategy, _ in PROGRAMS} == set(list_strategies())


@pytest.mark.parametrize("strategy, codec", PROGRAMS)
def test_some_legal_orders_give_the_same_bits(strategy, codec):
    refuse_difference(case_of(strategy, codec), 4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy, codec", PROGRAMS)
def test_60_legal_orders_give_the_same_bits(strategy, codec):
    refuse_difference(case_of(strategy, codec, 4), 60)


@pytest.mark.slow
@pytest.mark.parametrize("strategy, codec", PAIRS)
def test_every_codec_does_in_some_orders(strategy, codec):
    refuse_difference(case_of(strategy, codec), 10)


def caught(case, wanted, wait):
    """True if some order shows that a wait is missing."""
    for seed in range(8):
        world = World(case, Schedule(seed, dropped=wait))
        try:
            if not same(world.run(), wanted):
                return True
        except (CasyncError, KeyError, ValueError):
            return True  # lengths that are none, a bucket that has failed
    return False


@pytest.mark.parametrize(
    "strategy, codec", first_fast([("ps", "exact"), ("ring", "sign"), ("hierarchical", "sparse")])
)
def test_no_event_can_be_left_out(strategy, codec):
    """Except those by which a run waits for all of the last one: not all of it matters."""
    case = Case(slices(graph_of((40, 1500), strategy, codec, 3, partitions=1, least_bytes=2000)))
    wanted, schedule = case.expected(), Schedule(0)
    world = World(case, schedule)
    ends = [executor._lanes._lanes["end"]._stream for executor in world.executors]
    assert same(world.run(), wanted)
    missed = [n for n in range(len(schedule.waits)) if not caught(case, wanted, n)]
    between = [n for n, (_, event) in enumerate(schedule.waits) if event.stream in ends]
    assert set(missed) <= set(between)


def test_a_peer_that_does_not_come_is_told_at_the_time_out():
    """Both a thread that waits for the device and every later submit raise PeerTimeout."""
    case, schedule = case_of("ps", "exact", 2), Schedule(0)
    memory, end = FakeMemory(schedule), FakeEnd(Meeting(2), 0, lambda *_: None)
    told = r"rank 1 did not answer in step 0 \(rank 0, peer 1, task `\w+ rank=0 .*not done with it"
    with (
        schedule.driving(),
        Executor(end, CODECS, RunOptions(timeout=0.2), memory=memory) as executor,
    ):
        future = executor.submit(case.programs[0], torch.ones(TOTAL), {}, 0)
        with pytest.raises(PeerTimeout, match=told):
            executor.settle()
        with pytest.raises(PeerTimeout, match=told):
            executor.submit(case.programs[0], torch.ones(TOTAL), {}, 1)
    assert not future.done()


def test_a_bucket_is_waited_for_while_the_next_is_on_its_way():
    """On a device all buckets are issued at once."""
    schedule, meeting = Schedule(0), Meeting(2)
    ends = [FakeEnd(meeting, rank, lambda *_: None) for rank in range(2)]
    made = [
        Executor(end, CODECS, RunOptions(timeout=HANG), memory=FakeMemory(schedule)) for end in ends
    ]
    first, other = (case_of("ps", "exact", 2).programs for _ in range(2))
    with schedule.driving():
        futures = [e.submit(p, torch.ones(TOTAL), {}, 0) for e, p in zip(made, first, strict=True)]
        late = made[0].submit(other[0], torch.ones(TOTAL), {}, 0)
        made[0].settle(futures[0])
        schedule.wait_for(futures[0].done)  # told behind the event that `settle` awaits
        assert not late.done()
        made[1].submit(other[1], torch.ones(TOTAL), {}, 0)
        made[0].settle()
        schedule.wait_for(late.done)
    for executor in made:
        executor.close()


def test_a_deadlock_is_told():
    """A rank whose first two slots are exchanged: streams wait for each other."""
    graph = graph_of((40, 1500), "ring", "exact", 3, partitions=1, least_bytes=4000)
    tasks = tuple(
        dataclasses.replace(t, slot=1 - t.slot)
        if isinstance(t, Send | Recv) and t.rank == 0 and t.slot < 2
        else t
        for t in graph.tasks
    )
    with pytest.raises(DeadlockError, match="rank 0 is at slot 0 and cannot send"):
        World(Case(slices(dataclasses.replace(graph, tasks=tasks))), Schedule(0)).run()


class Silent(HostMemory):
    """Streams that do nothing, so only the host's work remains."""

    def stream(self, *, urgent=False):
        return self

    caller = stream

    def after(self, event):
        pass

    run = record = after


def test_issuing_takes_the_host_few_calls_a_task():
    """Without codecs and CUDA calls: 8 microseconds of a core on a quiet machine."""
    program = graph_of([70000] * 8, "ring", "exact", 4).slice(0)
    end, bucket, calls = FakeEnd(Meeting(4), 0, lambda *_: None), torch.zeros(8 * 70000), Counter()
    with Executor(end, CODECS, memory=Silent()) as executor:
        executor.submit(program, bucket, {}, 0)  # prepares
        sys.setprofile(lambda frame, event, about: calls.update([event]))
        try:
            executor.submit(program, bucket, {}, 1)
        finally:
            sys.setprofile(None)
    assert 0 < calls["call"] < 25 * len(program.tasks)
    assert calls["c_call"] < 28 * len(program.tasks)
