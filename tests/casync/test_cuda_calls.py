"""Calls of torch.cuda by the engine's own DeviceMemory, on a double: see cuda_double.py."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import compll
from casync.building.parts import Choice
from casync.errors import PeerTimeout
from casync.graph.graph import build
from casync.graph.plan import partition
from casync.memory.device import DeviceMemory
from casync.runtime import streams
from casync.runtime.executor import Executor
from casync.runtime.options import Capture, RunOptions
from casync.testing import Hub
from casync.topology import Topology
from tests.casync.cuda_double import DEVICE, Tensor, doubled
from tests.casync.emulated import compiled
from tests.casync.fakes import gradients, tensors_of
from tests.patience import HANG

LENGTHS = (1200, 9000)
TOTAL = sum(LENGTHS)
#: encode, merge, decode, leave, enter, exchange, end and graph, in the order in which they are made
ENCODE, MERGE, DECODE, LEAVE, ENTER, EXCHANGE, END, GRAPH = range(1, 9)
PRIORITIES = [-1, -1, 0, -1, -1, -1, 0, -1]


@pytest.fixture
def cuda(monkeypatch):
    with doubled(monkeypatch) as made:
        yield made


def graph_by(strategy, codec):
    flat, tensors = Topology.flat(2), tensors_of(LENGTHS)
    choices = {t.name: Choice("codec", strategy) for t in tensors}
    parts = partition(tensors, choices, flat, {"codec": codec}, least_bytes=4000)
    return build(parts, flat, {"codec": codec})


class Wire:
    """A transport without tags that transfers nothing."""

    rank, world_size = 0, 2

    def __init__(self, cuda):
        self._cuda = cuda

    def exchange(self, transfers):
        self._cuda.note("exchange", [transfer.kind for transfer in transfers])

    def abort(self):
        pass

    close = abort


def states_of(codec, memory):
    zeros = codec.init_state(TOTAL, len(LENGTHS))
    sides = ("worker", "aggregator")
    return {
        ("codec", side): {n: memory.zeros(len(a), torch.float32) for n, a in zeros.items()}
        for side in sides
    }


class Rank:
    """An executor, and the steps of one program."""

    def __init__(self, cuda, transport, strategy="ps", capture=Capture.NEVER):
        self.capture = capture
        self.cuda, self.memory, self.codec = cuda, DeviceMemory(DEVICE), compiled("onebit_group")
        codecs = {"codec": self.codec}
        self.executor = Executor(transport, codecs, RunOptions(timeout=HANG), memory=self.memory)
        self.graph = graph_by(strategy, self.codec)
        self.program = self.graph.slice(transport.rank)
        self.states = states_of(self.codec, self.memory)

    def step(self, number, dtype=torch.float32, program=None):
        """The future of a step, and its bucket."""
        values = gradients(TOTAL, 2, seed=number)[self.program.rank].to(dtype)
        bucket = Tensor(values, self.cuda)
        program = program or self.program
        how = {"capture": self.capture}
        return self.executor.submit(program, bucket, self.states, number, **how), bucket


@pytest.fixture
def rank(cuda):
    made = Rank(cuda, Wire(cuda))
    yield made
    made.executor.close()


def test_urgent_work_has_streams_of_higher_priority(cuda, rank):
    assert [(call.stream, call.about) for call in cuda.of("Stream")] == list(
        enumerate(PRIORITIES, 1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_made_after_the_first_step(cuda, rank, dtype):
    rank.step(0, dtype)
    assert cuda.of("zeros")
    for number in range(1, 4):
        cuda.calls.clear()
        rank.step(number, dtype)
        assert not cuda.of("zeros", "pinned", "Stream", "record_stream")


def test_new_tensors_are_recorded_on_all_streams(cuda, rank):
    """The allocator must not reuse a tensor while a stream reads it."""
    rank.step(0, torch.bfloat16)
    told: dict[int, list[int]] = {}
    for call in cuda.of("record_stream"):
        told.setdefault(id(call.about), []).append(call.stream)
    assert len(told) == sum(call.about > 0 for call in cuda.of("zeros"))
    assert all(streams == list(range(1, 9)) for streams in told.values())


@pytest.mark.parametrize("strategy", ["ps", "ring", "exchange"])
def test_a_step_is_put_to_streams_and_the_host_waits_for_nothing(cuda, strategy):
    rank = Rank(cuda, Wire(cuda), strategy)
    rank.step(0)
    cuda.calls.clear()
    future, _ = rank.step(1)
    assert not cuda.of("synchronize")
    assert [(call.what, call.stream) for call in cuda.calls[:2]] == [("Future", 0), ("record", 0)]
    waited = waits(cuda)
    # encodes read the bucket, so they come after it; exchanges come after encodes, and so on
    assert 0 in waited[ENCODE]
    assert ENCODE in waited[EXCHANGE]
    assert EXCHANGE in waited[MERGE] | waited[DECODE]
    assert {call.stream for call in cuda.of("exchange")} == {EXCHANGE}
    # who waits for the average has a stream come after this one
    assert [call.stream for call in cuda.of("set_result")] == [END]
    assert waited[END] & {ENCODE, MERGE, DECODE}
    assert future.done()
    rank.executor.settle()
    rank.executor.close()


def waits(cuda):
    """Per stream: the streams whose events, recorded in these calls, it waits for."""
    recorded: dict[int, int] = {}
    found: dict[int, set[int]] = {number: set() for number in range(10)}  # of a capture, too
    for call in cuda.of("record", "wait_event"):
        if call.what == "record":
            assert id(call.about) not in recorded, "an event is recorded once a run"
            recorded[id(call.about)] = call.stream
        elif id(call.about) in recorded:
            assert recorded[id(call.about)] != call.stream, "a stream need not wait for itself"
            found[call.stream].add(recorded[id(call.about)])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_staged_payloads_go_through_pinned_memory(cuda, dtype):
    """Averages are those of the host; pinned memory and device memory are made once."""
    ranks = [Rank(cuda, end) for end in Hub(2).endpoints()]
    host = compll.compile("onebit_group")
    graph = graph_by("ps", host)
    codecs = {"codec": host}
    theirs = [Executor(end, codecs, RunOptions(timeout=HANG)) for end in Hub(2).endpoints()]
    programs = [graph.slice(number) for number in range(2)]
    zeros = [host.init_state(TOTAL, len(LENGTHS)) for _ in range(4)]
    states = [
        {("codec", "worker"): one, ("codec", "aggregator"): other}
        for one, other in (zeros[:2], zeros[2:])
    ]
    for number in range(3):
        cuda.calls.clear()
        given = [rank.step(number, dtype) for rank in ranks]
        wanted = [values.to(dtype) for values in gradients(TOTAL, 2, seed=number)]
        futures = [
            executor.submit(program, bucket, state, number)
            for executor, program, bucket, state in zip(
                theirs, programs, wanted, states, strict=True
            )
        ]
        torch.futures.wait_all([*futures, *(future for future, _ in given)])
        for (_, bucket), values in zip(given, wanted, strict=True):
            assert torch.equal(bucket.inside, values)
        assert bool(cuda.of("zeros")) == bool(cuda.of("pinned")) == (number == 0)
        streams = {(call.stream - 1) % 8 + 1 for call in cuda.of("copy_")}
        assert {LEAVE, ENTER} <= streams
    for executor in [*theirs, *(rank.executor for rank in ranks)]:
        executor.close()
    assert not cuda.contexts  # of threads that made one on the machine's first device


def test_steps_of_13_buckets_are_captured(cuda):
    """Each bucket has its own graph; none of the calls in between is refused during a capture."""
    rank = Rank(cuda, Wire(cuda), capture=Capture.LAUNCH)
    programs = [rank.graph.slice(0) for _ in range(13)]
    for number in range(4):
        cuda.calls.clear()
        futures = [rank.step(number, program=program)[0] for program in programs]
        assert all(future.done() for future in futures)
        rank.executor.settle()
        assert len(cuda.of("capture")) == (13 if number == 1 else 0)
        assert len(cuda.of("replay")) == (0 if number == 0 else 13)
    rank.executor.close()
    assert not cuda.contexts


def test_a_graph_is_first_launched_after_earlier_calls(cuda):
    """Calls of other programs, too, which may use scratch memory that is the graph's now."""
    rank, awaited = Rank(cuda, Wire(cuda), capture=Capture.LAUNCH), []
    for number in range(3):
        cuda.calls.clear()
        rank.step(number)
        awaited.append(waits(cuda)[GRAPH] & {ENCODE, MERGE, DECODE})
    assert awaited == [set(), {ENCODE, MERGE, DECODE}, set()]
    rank.executor.close()


def test_a_launched_run_waits_for_no_captured_event(cuda, monkeypatch):
    """Also after a time-out, when the host asks which task is not done."""
    rank = Rank(cuda, Wire(cuda), capture=Capture.LAUNCH)
    for number in range(3):
        rank.step(number)
    monkeypatch.setattr(streams, "_LOOK", 0.0)
    monkeypatch.setattr(cuda, "_ask", lambda what, event: event.capture is not None)
    rank.executor.options = replace(rank.executor.options, timeout=0.0)
    with pytest.raises(PeerTimeout, match="rank 0"):
        rank.executor.settle()
    rank.executor.close()


def test_a_capture_leaves_other_threads_alone(cuda):
    """They may call CUDA meanwhile, as a data loader does."""
    memory = DeviceMemory(DEVICE)
    replay = memory.capture(lambda: cuda.note("work"))
    replay()
    assert [(c.what, c.about) for c in cuda.calls] == [
        ("Stream", 0),
        ("capture", "thread_local"),
        ("work", None),
        ("replay", None),
    ]


class Cupy:
    """CuPy's current stream: 9 of the caller's, and the null stream as a context."""

    number = 9

    def __init__(self):
        self.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=self.number))
        self.cuda.Stream = SimpleNamespace(null=self.null())

    @contextmanager
    def null(self):
        before, self.number = self.number, 0
        yield
        self.number = before


def test_a_cupy_without_a_driver_is_none(cuda, monkeypatch):
    """CuPy for a later CUDA than torch's: somebody else has imported it."""
    cupy, seen = Cupy(), []
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cupy.cuda.get_current_stream = Mock(side_effect=RuntimeError("cudaErrorInsufficientDriver"))
    DeviceMemory(DEVICE).stream().run(lambda: seen.append(cuda.current.number))
    assert seen == [1]


def test_codecs_run_in_our_streams_also_if_the_caller_has_set_one_of_cupys(cuda, monkeypatch):
    """They take CuPy's before torch's: kernels ran in it, and our events did not order them."""
    cupy, seen = Cupy(), []
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    DeviceMemory(DEVICE).stream().run(lambda: seen.append((cupy.number, cuda.current.number)))
    assert seen == [(0, 1)]
    assert cupy.number == 9


@pytest.mark.parametrize("what", ["zeros", "staging", "tensor", "done", "wait"])
def test_a_capture_takes_no_memory_and_answers_no_question(cuda, what):
    """The double keeps these rules of CUDA, so no test passes without them."""
    memory = DeviceMemory(DEVICE)
    event = memory.event()
    calls = {
        "zeros": lambda: memory.zeros(1, torch.uint8),
        "staging": lambda: memory.staging(1),
        "tensor": lambda: memory.tensor(np.zeros(1)),
        "done": event.done,
        "wait": event.wait,
    }
    calls[what]()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        memory.capture(calls[what])
