"""What the CUDA backend keeps between calls: when it is dropped, and when it may not be made."""

from types import SimpleNamespace

import numpy as np
import pytest

import compll
from compll.backends.cuda import backend as cuda
from compll.backends.cuda import device as cuda_device
from compll.backends.cuda import launch as cuda_launch
from compll.backends.cuda import source as cuda_source
from compll.errors import PayloadError, UsageError
from compll.runtime.batches import Encoding
from compll.runtime.codec import Codec
from compll.runtime.library import type_check
from tests.compll.cuda_host import HostDevice

AT = np.zeros(1, np.int64)


def kernels(name, device=HostDevice):
    module, params = type_check(name, {})
    return cuda.kernels(module, params, device, cuda_source.source(module, 64))


def round_trip(device, name, n, rng):
    """Encode and decode n elements, and compare with the reference."""
    reference = compll.compile(name, "reference")
    table, out = np.array([[0, n, 0, 0, 0]]), np.zeros(reference.payload_bytes(n), np.uint8)
    x = rng.standard_normal(n).astype(np.float32)
    options = {"seed": 1, "step": 2, "scale": 1.0, "writeback": False}
    used = device.encode_batch(x, table, out, AT, None, Encoding(**options))
    expected = reference.encode(x, seed=1, step=2)
    np.testing.assert_array_equal(out[: used[0]], expected)
    y = np.zeros(n, np.float32)
    device.decode_batch(out, table, AT, used, y, add=False)
    np.testing.assert_array_equal(y, reference.decode(expected, n))


#: in passes with scratch, and an array at a time
NAMES = ["dgc", "thc"]


@pytest.mark.parametrize("name", NAMES)
def test_of_many_tables_the_later_are_kept(name, monkeypatch, rng):
    monkeypatch.setattr(cuda_launch, "KEPT", 4)
    monkeypatch.setattr("compll.backends.cuda.arrays.KEPT", 4)
    device = kernels(name)
    for n in (*range(100, 108), 107, 100):
        round_trip(device, name, n, rng)
        assert len(device.batches) <= 4
        assert len(device.placed) <= 4
        assert len(getattr(device, "shared", ())) <= 5
        assert {table for _, table, *_ in device.batches} >= {np.array([[0, n, 0, 0, 0]]).tobytes()}


class Short(HostDevice):
    """A device whose memory ends once."""

    left = 10**9

    def zeros(self, count, dtype):
        self.left -= count
        if self.left < 0:
            self.left = 10**9
            raise MemoryError
        return super().zeros(count, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_memory_that_ends_is_taken_from_what_is_kept(name, rng):
    device = kernels(name, Short)
    round_trip(device, name, 100, rng)
    kept = len(device.batches)
    assert kept == 2
    device.device.left = 5
    round_trip(device, name, 200, rng)
    assert device.device.left > 5
    assert len(device.batches) == kept  # those of 200 elements


class Interrupted(HostDevice):
    """A device whose user presses Ctrl-C."""

    after = 10**9

    def launch(self, *args):
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt
        super().launch(*args)


@pytest.mark.parametrize("name", NAMES)
def test_a_call_after_an_interrupted_one_begins_anew(name, rng):
    device = kernels(name, Interrupted)
    round_trip(device, name, 5000, rng)
    for launch in range(1, len(device.device.launches)):
        device.device.after = launch
        with pytest.raises(KeyboardInterrupt):
            round_trip(device, name, 5000, rng)
        round_trip(device, name, 5000, rng)


class Cupy:
    """What CupyDevice asks of CuPy, with two devices."""

    def __init__(self):
        self.number, self.capturing, self.waited = 0, False, 0
        self.runtime = SimpleNamespace(getDevice=lambda: self.number)
        self.cuda = self
        self.asarray, self.zeros = np.array, np.zeros

    def get_current_stream(self):
        return SimpleNamespace(is_capturing=lambda: self.capturing)

    def Device(self):
        return self

    def synchronize(self):
        self.waited += 1


def test_nothing_is_made_while_a_graph_is_captured(monkeypatch):
    module = Cupy()
    monkeypatch.setattr(cuda_device, "cupy", lambda: module)
    device = cuda_device.CupyDevice(cuda_source.source(type_check("onebit", {})[0]))
    calls = (lambda: device.upload(AT), lambda: device.zeros(3, "uint8"), device.settle)
    for call in calls:
        call()
        module.capturing = True
        with pytest.raises(UsageError, match="the same call once before the capture"):
            call()
        module.capturing = False
    assert module.waited == 1


def test_every_device_has_codecs_of_its_own(monkeypatch):
    module = Cupy()
    monkeypatch.setattr(cuda_device, "cupy", lambda: module)
    monkeypatch.setattr(cuda, "cupy", lambda: module)
    monkeypatch.setattr("compll.runtime.library._compiled", {})
    first = compll.compile("onebit", "cuda")
    module.number = 1
    other = compll.compile("onebit", "cuda")
    assert first is not other
    assert (first.backend.device.number, other.backend.device.number) == (0, 1)
    module.number = 0
    assert compll.compile("onebit", "cuda") is first


@pytest.mark.parametrize(
    "used, room, error",
    [
        ([40], 0, None),
        ([40], -1, PayloadError),
        ([40, 40], 0, UsageError),
        (np.array([40], np.int32), 0, UsageError),
    ],
)
def test_lengths_in_device_memory_are_of_payloads_that_have_room(used, room, error):
    module, params = type_check("topk", {"ratio": 0.1})
    codec = Codec(module, params, "cuda", "topk", kernels("topk"))
    table, payload = np.array([[0, 100, 0, 0, 0]]), np.zeros(codec.payload_bytes(100) + room, "u1")
    there = type("There", (), {"dtype": np.asarray(used).dtype, "__len__": lambda _: len(used)})()
    if error is None:
        codec._given.lengths(payload, table, AT, there)
    else:
        with pytest.raises(error, match="topk: "):
            codec._given.lengths(payload, table, AT, there)
