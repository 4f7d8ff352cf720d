"""A conformance test for all kinds of memory: a GPU's on a double, and a real GPU's."""

import pytest
import torch

from casync.memory.device import DeviceMemory
from casync.memory.host import HostMemory
from tests.casync import cuda_double, emulated
from tests.casync.streams import Schedule

#: emulated ones run their streams in several orders, by a seed
KINDS = ("host", "emulated-0", "emulated-1", "emulated-2", "emulated-3", "double", "gpu")


@pytest.fixture(params=KINDS)
def memory(request, monkeypatch):
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    if request.param == "double":
        with cuda_double.doubled(monkeypatch):
            yield DeviceMemory(cuda_double.DEVICE)
        return
    kind, _, seed = request.param.partition("-")
    yield {
        "host": HostMemory,
        "emulated": lambda: emulated.DeviceMemory(Schedule(int(seed))),
        "gpu": lambda: DeviceMemory(torch.device("cuda", torch.cuda.current_device())),
    }[kind]()


def staged(memory, values):
    """Values in memory of the kind from which `copy` reads on the host."""
    made = memory.staging(4 * len(values))
    made.view(torch.float32)[:] = torch.tensor(values)
    return made


def fetched(memory, tensor, stream):
    """Values of a tensor after all work of the stream."""
    target, event = memory.staging(tensor.nbytes), memory.event()
    stream.run(lambda: memory.copy(target, tensor.view(torch.uint8)))
    stream.record(event)
    event.wait()
    assert event.done()
    return target.view(torch.float32).tolist()


def come_after_zeros(memory, stream):
    """Let a stream come after the caller's, which zeroes memory."""
    zeroed = memory.event()
    memory.caller().record(zeroed)
    stream.after(zeroed)


def test_zeros_are_of_the_device_and_zero(memory):
    stream = memory.stream()
    made = memory.zeros(3, torch.float32)
    assert (made.device, made.dtype, made.numel()) == (memory.device, torch.float32, 3)
    assert memory.zeros(0, torch.int64).numel() == 0
    come_after_zeros(memory, stream)
    assert fetched(memory, made, stream) == [0, 0, 0]


def test_a_stream_comes_after_an_event_of_another(memory):
    one, other = memory.stream(urgent=True), memory.stream()
    made, event = memory.zeros(2, torch.float32), memory.event()
    assert event.done()  # it was never recorded
    source = staged(memory, [1.0, 2.0])
    come_after_zeros(memory, one)
    one.run(lambda: memory.copy(made.view(torch.uint8), source))
    one.record(event)
    other.after(event)
    other.run(lambda: made.mul_(3.0))
    assert fetched(memory, made, other) == [3, 6]


def test_codecs_and_tensors_see_the_same_memory(memory):
    made, stream = memory.zeros(4, torch.float32), memory.stream()
    array = memory.array(made)
    come_after_zeros(memory, stream)
    stream.run(lambda: memory.copy(made.view(torch.uint8), staged(memory, [1.0, 2.0, 3.0, 4.0])))
    again = memory.tensor(array) if memory.host else array
    assert fetched(memory, again, stream) == [1, 2, 3, 4]


def test_a_future_takes_tensors_of_the_device(memory):
    made, future = memory.zeros(1, torch.float32), memory.future()
    stream, done = memory.stream(), memory.event()
    stream.run(lambda: future.set_result(made))
    stream.record(done)
    done.wait()
    assert future.wait() is made


def test_moments_are_in_the_order_of_the_stream(memory):
    with memory.current():
        first, made = memory.moment(), memory.zeros(1 << 16, torch.float32)
        memory.caller().run(lambda: made.fill_(2.0))
        last = memory.moment()
    assert last.since(first) >= 0 >= first.since(last)
