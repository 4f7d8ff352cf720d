"""Ten training steps on an emulated device: payloads are those of the CPU backend."""

import math
import queue
import re
from contextlib import ExitStack, closing
from functools import partial

import pytest
import torch

import compll
from casync.building.parts import Choice
from casync.building.tasks import Send, members
from casync.errors import PayloadError
from casync.graph.graph import build
from casync.graph.joining import Bulk, join_tasks
from casync.graph.plan import partition
from casync.memory.device import DeviceMemory as CudaMemory
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.testing import Hub
from casync.topology import Topology
from tests.casync.emulated import DeviceMemory, Garbled, compiled
from tests.casync.fakes import gradients, slices, tensors_of
from tests.casync.rendezvous import Meeting
from tests.casync.streams import FakeEnd, Schedule
from tests.patience import HANG
from tests.tiers import first_fast

LENGTHS = (33, 1200, 1024)
TOTAL = sum(LENGTHS)
RANKS = 3
STEPS = 10
PARAMS = {
    "topk": {"ratio": 0.1},
    "threshold": {"tau": 2.0},
    "dgc": {"ratio": 0.1},
    "powersgd": {"rank": 2},
}
PROGRAMS = [
    ("ps", "onebit_group"),
    ("allreduce", "powersgd"),
    ("ring", "onebit_group"),
    ("hierarchical", "onebit_group"),
    ("exchange", "dgc"),
    ("ps", "int4_group"),
    ("ring", "int4_group"),
    ("hierarchical", "int4_group"),
    ("exchange", "int4_group"),
    ("ps", "topk"),
    ("ring", "topk"),
    ("hierarchical", "topk"),
    ("exchange", "topk"),
    ("exchange", "onebit_group"),
]


class Recorder:
    """A transport that records its messages."""

    def __init__(self, inner):
        self._inner, self.sent = inner, {}

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def post_send(self, data, peer, channel):
        self.sent.setdefault((peer, channel), []).append(bytes(data.numpy()))
        return self._inner.post_send(data, peer, channel)

    def post_reduce(self, data, ranks, op="sum"):
        self.sent.setdefault(ranks, []).append(bytes(data.view(torch.uint8).numpy()))
        return self._inner.post_reduce(data, ranks, op)


def graph_by(strategy, codec, lengths=LENGTHS, *, rotates=True, **bounds):
    topology, tensors = Topology.even(RANKS, 2), tensors_of(lengths)
    choices = {t.name: Choice("codec", strategy) for t in tensors}
    parts = partition(tensors, choices, topology, {"codec": codec}, least_bytes=4000, **bounds)
    return build(parts, topology, {"codec": codec}, rotates=rotates)


def states_of(codec, place=lambda array: array):
    state = codec.init_state(TOTAL, len(LENGTHS))
    sides = ("worker", "aggregator")
    return {("codec", s): {n: place(a.copy()) for n, a in state.items()} for s in sides}


def buckets_of(step, dtype, waiting):
    """Gradients by rank. If states may be `waiting`, one tensor is zero on all ranks in some steps,
    and on one rank in others."""
    made = gradients(TOTAL, RANKS, seed=step)
    for rank, x in enumerate(made):
        if waiting and (step % 3 == 1 or (step % 3 == 2 and rank == 1)):
            x[33:1233] = 0
    return [x.to(dtype) for x in made]


def on_cpu(graph, codec, dtype=torch.float32, waiting=None):
    """Messages of each rank and averages, by step."""
    ends = [Recorder(end) for end in Hub(RANKS).endpoints()]
    states, averages = [states_of(codec) for _ in ends], []
    with ExitStack() as stack:
        executors = [
            stack.enter_context(
                Executor(e, {"codec": codec}, RunOptions(timeout=HANG, deferred=waiting or {}))
            )
            for e in ends
        ]
        for step in range(STEPS):
            buckets = buckets_of(step, dtype, waiting)
            futures = [
                executor.submit(graph.slice(rank), buckets[rank], states[rank], step)
                for rank, executor in enumerate(executors)
            ]
            torch.futures.wait_all(futures)
            averages.append(buckets)
    return [end.sent for end in ends], averages


class GPU(CudaMemory):
    """The real memory, with the counters that tests read from an emulated one."""

    made, staged = 0, ()  # not counted

    def __init__(self):
        super().__init__(torch.device("cuda", torch.cuda.current_device()))

    def filled(self, values):
        return values.to(self.device)

    def download(self, tensor):
        return tensor.cpu()


class Devices:
    """A device for each of some endpoints, all with one schedule; without one, a GPU for all."""

    def __init__(self, ends, name, schedule=None, spoils=None, waiting=None):
        """spoils: a rank with damaged payloads. waiting: states that wait, by codec."""
        self.waiting = waiting
        self.memories = [DeviceMemory(schedule) if schedule else GPU() for _ in ends]
        make = compiled if schedule else partial(compll.compile, target="cuda")
        codecs = [make(name, **PARAMS.get(name, {})) for _ in ends]
        if spoils is not None:
            codecs[spoils] = Garbled(codecs[spoils], spoils=True)
        self.codecs = codecs
        pairs = list(zip(self.memories, codecs, strict=True))
        self.states = [
            {key: {n: m.zeros(len(a), m.tensor(a).dtype) for n, a in state.items()}
             for key, state in states_of(codec).items()}
            for m, codec in pairs
        ]  # fmt: skip
        unused = object()  # a codec that no program has, so it is never called
        self.executors = [
            Executor(
                end,
                {"codec": codec, "other": unused},
                RunOptions(timeout=HANG, deferred=waiting or {}),
                memory=memory,
            )
            for end, (memory, codec) in zip(ends, pairs, strict=True)
        ]

    def submit(self, programs, step, dtype=torch.float32):
        """The buckets of a step, and their futures."""
        given = buckets_of(step, dtype, self.waiting)
        self.buckets = [m.filled(x) for m, x in zip(self.memories, given, strict=True)]
        self.made = [memory.made for memory in self.memories]
        each = zip(self.executors, programs, self.buckets, self.states, strict=True)
        return [executor.submit(*given, step) for executor, *given in each]

    def averages(self):
        return [m.download(b) for m, b in zip(self.memories, self.buckets, strict=True)]

    def close(self):
        for executor in self.executors:
            executor.close()


HALVES = [
    ("ring", "onebit_group", torch.bfloat16),
    ("ps", "onebit_group", torch.float16),
    *((*each, torch.bfloat16) for each in PROGRAMS if each != ("ring", "onebit_group")),
]
WHOLE = [(*each, torch.float32) for each in PROGRAMS]


WAITING = [
    ("ring", "onebit_group", torch.bfloat16, ["residual"]),
    ("ps", "onebit_group", torch.float32, ["residual"]),
    ("exchange", "dgc", torch.float32, ["u", "v"]),
    ("allreduce", "powersgd", torch.bfloat16, ["residual"]),
]


@pytest.mark.parametrize("strategy, name, dtype", first_fast(WHOLE) + first_fast(HALVES))
def test_staged_messages_are_those_of_the_cpu_backend(strategy, name, dtype):
    """Messages and averages, over a host transport, are the same bit for bit on all ranks."""
    compare_with_the_cpu(strategy, name, dtype, None)


@pytest.mark.parametrize("strategy, name, dtype, states", first_fast(WAITING))
def test_states_wait_on_a_device_as_on_the_cpu(strategy, name, dtype, states):
    """States of unused tensors wait, though no host looks at values."""
    compare_with_the_cpu(strategy, name, dtype, {"codec": states})


def compare_with_the_cpu(strategy, name, dtype, waiting):
    codec = compll.compile(name, **PARAMS.get(name, {}))
    graph = graph_by(strategy, codec)
    programs = slices(graph)
    sent, averages = on_cpu(graph, codec, dtype, waiting)
    ends, schedule = [Recorder(end) for end in Hub(RANKS).endpoints()], Schedule(1)
    made = partial(Devices, ends, name, schedule, waiting=waiting)
    with schedule.driving(), closing(made()) as devices:
        for step in range(STEPS):
            torch.futures.wait_all(devices.submit(programs, step, dtype))
            assert all(map(torch.equal, devices.averages(), averages[step]))
            # nothing is made after the first step
            assert not step or devices.made == [memory.made for memory in devices.memories]
    assert [end.sent for end in ends] == sent


@pytest.mark.gpu
@pytest.mark.parametrize("strategy, name, dtype", WHOLE + HALVES)
def test_gpu_messages_are_those_of_the_cpu_backend(strategy, name, dtype):
    codec = compll.compile(name, **PARAMS.get(name, {}))
    graph = graph_by(strategy, codec)
    programs = slices(graph)
    sent, averages = on_cpu(graph, codec, dtype)
    ends = [Recorder(end) for end in Hub(RANKS).endpoints()]
    with closing(Devices(ends, name)) as devices:
        for step in range(STEPS):
            torch.futures.wait_all(devices.submit(programs, step, dtype))
            for executor in devices.executors:
                executor.settle()
            assert all(map(torch.equal, devices.averages(), averages[step]))
    assert [end.sent for end in ends] == sent


@pytest.mark.parametrize("strategy, name", first_fast(PROGRAMS))
def test_without_tags_averages_are_those_of_the_cpu_backend(strategy, name):
    """Groups of whole buffers on the stream, as over NCCL."""
    codec = compll.compile(name, **PARAMS.get(name, {}))
    has_averages_of_the_cpu(graph_by(strategy, codec), codec, name)


def test_encodes_of_several_parts_take_in_payloads_in_one_call():
    """In a ring of parts with one tensor each."""
    codec = compll.compile("onebit_group")
    graph = graph_by("ring", codec, (33, 300, 400, 500, 500, 524), batch_bytes=4, rotates=False)
    program = join_tasks(graph.slice(0), {"codec": codec}, Bulk(math.inf, at_once=True))
    kinds = [[type(each).__name__ for each in members(task)] for task in program.tasks]
    assert any(some.count("Merge") == some.count("Encode") > 1 for some in kinds)
    has_averages_of_the_cpu(graph, codec, "onebit_group")


def has_averages_of_the_cpu(graph, codec, name):
    programs = slices(graph)
    _, averages = on_cpu(graph, codec)
    meeting, schedule = Meeting(RANKS), Schedule(3)
    ends = [FakeEnd(meeting, rank, lambda *_: None) for rank in range(RANKS)]
    with closing(Devices(ends, name, schedule)) as devices:
        for step in range(STEPS):
            futures = devices.submit(programs, step)
            assert not any(future.done() for future in futures)  # the host has waited for nothing
            schedule.run()
            assert all(future.done() for future in futures)
            assert all(map(torch.equal, devices.averages(), averages[step]))


def test_rooms_that_follow_need_are_held():
    """They are held until new ones replace them; a dropped one would cost a wait later."""
    graph = graph_by("exchange", compll.compile("threshold", **PARAMS["threshold"]))
    programs, meeting = slices(graph), Meeting(RANKS)
    ends, schedule = [FakeEnd(meeting, r, lambda *_: None) for r in range(RANKS)], Schedule(3)
    with closing(Devices(ends, "threshold", schedule)) as devices:
        for step in range(4):
            devices.submit(programs, step)
            schedule.run()
        rooms = [s for e in devices.executors for p in e._prepared.values() for s, *_ in p.varying]
        assert all((s._room.capacity < s.layout.bound).any() for s in rooms)
        assert not any(codec.backend.keeper.copies for codec in devices.codecs)


@pytest.mark.parametrize("strategy", ["ring", "ps"])
def test_a_payload_that_a_kernel_found_bad_is_named(strategy):
    """A rank that decoded it raises the error after the run."""
    graph = graph_by(strategy, compiled("topk", **PARAMS["topk"]))
    programs, schedule = slices(graph), Schedule(3)
    meeting = Meeting(RANKS)
    ends = [FakeEnd(meeting, rank, lambda *_: None) for rank in range(RANKS)]
    with closing(Devices(ends, "topk", schedule, spoils=2)) as devices:
        devices.submit(programs, 7)
        schedule.run()
        found = [error for error in map(settled, devices.executors) if error is not None]
        assert found
        for error in found:
            told = r"step 7 failed: rank [01], peer [02], task `(merge|decode) rank=.*lies outside"
            assert re.match(told, str(error))


def settled(executor):
    """The device's error, or None."""
    try:
        executor.settle()
    except PayloadError as error:
        return error
    return None


def test_a_chunk_is_sent_while_later_ones_are_not_encoded_yet():
    """Staging overlaps: the device encodes while the host sends."""
    codec, encoded, sent = compiled("onebit_group"), [], queue.SimpleQueue()

    class Watched(Recorder):
        def post_send(self, data, peer, channel):
            sent.put(len(encoded))
            return super().post_send(data, peer, channel)

    def takes_effect(text):
        if text.startswith("encode"):
            encoded.append(text)

    flat, tensors = Topology.flat(2), tensors_of([32 * 1024])
    choices = {tensors[0].name: Choice("codec", "ps", 8)}
    parts = partition(tensors, choices, flat, {"codec": codec}, least_bytes=4000)
    program = build(parts, flat, {"codec": codec}).slice(0)
    memory, end = DeviceMemory(Schedule(1)), Watched(Hub(2).endpoints()[0])
    chunks = sum(isinstance(task, Send) and task.channel == 0 for task in program.tasks)
    codecs = {"codec": codec}
    with Executor(
        end, codecs, RunOptions(timeout=HANG, delay=takes_effect), memory=memory
    ) as executor:
        executor.submit(program, memory.filled(torch.ones(32 * 1024)), {}, 0)
        assert sent.get(timeout=HANG) < chunks == 8
