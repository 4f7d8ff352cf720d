"""Arrays of other libraries, such as torch's tensors, given to a codec of the CUDA backend.

A stand-in for CuPy takes host memory for the device's, and the shim runs the kernels.
"""

import sys
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import compll
from compll.backends.cuda import device as cuda_device
from compll.errors import UsageError
from tests.compll import cuda_host


class Tensor:
    """A tensor with torch's interface."""

    def __init__(self, held, typestr=None, device="cuda:0", wrong=None):
        self.held, self.device, self.wrong = held, device, wrong
        self.typestr = typestr or held.dtype.str
        self.dtype = f"torch.{held.dtype}"

    def __len__(self):
        return len(self.held)

    @property
    def __cuda_array_interface__(self):
        if self.wrong:
            raise self.wrong
        return self.held.__array_interface__ | {"typestr": self.typestr}


class Array(np.ndarray):
    """A CuPy array."""

    number = 0

    def __array_finalize__(self, other):
        self.number = getattr(other, "number", 0)

    @property
    def device(self):
        return SimpleNamespace(id=self.number)


#: the device of an address, where that is not 0
PLACES = {}


class Streams:
    """CuPy's current device and stream, and the streams of torch that it was given."""

    def __init__(self, newer):
        self.current, self.given = 0, []
        where = lambda pointer: SimpleNamespace(device=PLACES.get(pointer, 0))  # noqa: E731
        self.runtime = SimpleNamespace(getDevice=lambda: 0, pointerGetAttributes=where)
        if newer:
            take = lambda stream: self.ExternalStream(stream.__cuda_stream__()[1])  # noqa: E731
            self.Stream = SimpleNamespace(from_external=take)

    def get_current_stream(self):
        return SimpleNamespace(ptr=self.current)

    def ExternalStream(self, number):
        self.given.append(number)
        return self

    def __enter__(self):
        self.current = self.given[-1]

    def __exit__(self, *error):
        self.current = 0


def asarray(x):
    if isinstance(x, Array):
        return x
    seen = SimpleNamespace(__array_interface__=x.__cuda_array_interface__, owner=x)
    assert x.__cuda_array_interface__["data"][0] not in PLACES, "a copy"
    return np.asarray(seen).view(Array)


#: of CuPy's arrays
codec = partial(cuda_host.codec, arrays=None)


def making(function):
    return lambda *args: function(*args).view(Array)


@pytest.fixture(params=[False, True], ids=["cupy13", "cupy14"])
def module(monkeypatch, request):
    names = ("ascontiguousarray", "empty", "zeros")
    makers = {name: making(getattr(np, name)) for name in names}
    made = SimpleNamespace(ndarray=Array, asarray=asarray, cuda=Streams(request.param), **makers)
    monkeypatch.setattr(cuda_device, "cupy", lambda: made)
    return made


def test_gradients_payloads_and_states_are_written_where_they_are(module, rng):
    ours, theirs, n = codec("onebit_group"), compll.compile("onebit_group", "reference"), 1500
    x = rng.standard_normal(n).astype(np.float32)
    table, at = np.array([[0, n, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
    out, state = np.zeros(theirs.payload_bytes(n), np.uint8), ours.init_state(n)
    wanted = theirs.init_state(n)
    held = {name: Tensor(one) for name, one in state.items()}
    ours.encode_batch(Tensor(x.copy()), table, Tensor(out), at, state=held)
    np.testing.assert_array_equal(out, theirs.encode(x, state=wanted))
    np.testing.assert_array_equal(state["residual"], wanted["residual"])
    y = np.ones(n, np.float32)
    ours.decode_batch(Tensor(out), table, at, np.array([len(out)]), Tensor(y), add=True)
    np.testing.assert_array_equal(y, theirs.decode(out, n) + 1)


def test_bfloat16_tensors_are_their_bits(module, rng):
    ours, n = codec("int4_group"), 300
    bits = (rng.standard_normal(n).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    payload = ours.encode(Tensor(bits, "<V2"), seed=3)
    np.testing.assert_array_equal(payload, compll.compile("int4_group").encode(wide, seed=3))


def elsewhere(number):
    """A tensor on another device, which CuPy would copy."""
    held = np.zeros(4, np.float32)
    PLACES[held.ctypes.data] = number
    return Tensor(held, device=f"cuda:{number}")


@pytest.mark.parametrize(
    "given, message",
    [
        (Tensor(np.zeros(4), device="cpu", wrong=AttributeError("cpu")), "Tensor on cpu"),
        (Tensor(np.zeros(4, np.float32), wrong=RuntimeError("requires grad")), "requires grad"),
        (Tensor(np.zeros(4, np.float64)), "float32 or float16 .* not float64"),
        (Tensor(np.zeros((4, 4), np.float32)[:, 1]), "contiguous"),
        (elsewhere(3), "on device 3, and 0 is the current"),
        ([1.0, 2.0], "not list"),
    ],
)  # fmt: skip
def test_tensors_out_of_reach_of_kernels_are_refused(module, given, message):
    with pytest.raises(UsageError, match=f"onebit: .*{message}"):
        codec("onebit").encode(given)


def test_a_state_in_the_hosts_memory_is_refused(module):
    ours, x = codec("onebit"), Tensor(np.zeros(4, np.float32))
    cpu = Tensor(np.zeros(4, np.float32), device="cpu", wrong=AttributeError("cpu"))
    with pytest.raises(UsageError, match="Tensor on cpu"):
        ours.encode(x, state={"residual": cpu})


class Torch:
    """The part of torch's interface that is used. made: bytes and stream of allocations."""

    uint8 = "uint8"

    def __init__(self, stream, full=False):
        self.cuda, self.made, self.full = self, [], full
        self.number = self.own = stream
        self.OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})

    def is_initialized(self):
        return True

    def current_device(self):
        return 0

    def current_stream(self, device):
        assert device == 0
        return SimpleNamespace(cuda_stream=self.own)

    def ExternalStream(self, number, device):
        assert device == 0
        return number

    @contextmanager
    def stream(self, number):
        self.number = number
        yield
        self.number = self.own

    def empty(self, size, dtype, device):
        assert (dtype, device) == ("uint8", "cuda:0")
        if self.full:
            raise self.OutOfMemoryError("full")
        self.made.append((size, self.number))
        return Tensor(np.empty(size, np.uint8))


@pytest.mark.parametrize("torch, cupy, used", [(0, 0, []), (7, 0, [7]), (7, 9, [])])
def test_kernels_run_on_torchs_stream_unless_cupy_has_one(module, monkeypatch, torch, cupy, used):
    monkeypatch.setitem(sys.modules, "torch", Torch(torch))
    module.cuda.current = cupy
    codec("onebit").encode(Tensor(np.ones(4, np.float32)))
    assert module.cuda.given == used


def test_new_memory_is_zeroed_in_the_stream_that_it_comes_from(module, monkeypatch):
    """Work of torch's stream may still use what a freed tensor has left there."""
    seen, zeros = [], cuda_device.zeros

    def noted(count, dtype):
        seen.append(module.cuda.current)
        return zeros(count, dtype)

    monkeypatch.setitem(sys.modules, "torch", Torch(7))
    monkeypatch.setattr(cuda_device, "zeros", noted)
    device = type("Device", (cuda_host.HostDevice,), {"zeros": lambda _, *given: noted(*given)})
    made = codec("topk", device)
    count = len(seen)
    made.prepare()
    assert len(seen) > count > 0
    assert {*seen} == {7}


@pytest.mark.parametrize("torch, cupy, stream", [(0, 0, 0), (7, 0, 7), (7, 9, 9)])
def test_memory_is_of_torchs_allocator(module, monkeypatch, torch, cupy, stream):
    """In the stream that uses it, so freed memory is reused in that stream's order."""
    theirs = Torch(torch)
    monkeypatch.setitem(sys.modules, "torch", theirs)
    module.cuda.current = cupy
    state = codec("onebit").init_state(100)
    assert theirs.made == [(400, stream)]
    assert state["residual"].dtype == np.float32
    theirs.full = True
    with pytest.raises(UsageError, match="there is no memory for 100 elements"):
        codec("onebit").init_state(100)
