"""An emulated device: memory that host code must not touch, and kernels that run on it.

Its tensors are torch's, of a device "meta". Operations on them run in the stream that runs them, or
in the caller's, as torch's do. Only kernels may read them, and copies to the host, which wait for
the data; in our streams nothing is allocated, and nothing copied without the protocol. Kernels are
the generated CUDA sources, run by the shim.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import torch

from casync.memory.host import HostMemory
from compll.runtime.codec import Codec
from compll.runtime.library import locate
from tests.casync.streams import FakeMemory, Schedule, at_work, refuse_capture
from tests.compll.cuda_host import HostDevice, kernels

GARBAGE = 0x7F  # bytes
_CHANGES = {"copy_", "mul_", "add_", "div_", "fill_", "zero_", "sqrt_", "addmm_", "masked_fill_"}


class DeviceTensor(torch.Tensor):
    """A tensor in the emulated device's memory. inside: that memory, for code that runs there."""

    inside: torch.Tensor
    memory: DeviceMemory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inside, memory):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inside.shape, strides=inside.stride(), storage_offset=inside.storage_offset(),
            dtype=inside.dtype, device="meta",
        )  # fmt: skip
        made.inside, made.memory = inside, memory
        return made

    def data_ptr(self):
        return self.inside.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        memory = next(each.memory for each in args if isinstance(each, cls))
        given = [each.inside if isinstance(each, cls) else each for each in args]
        if isinstance(kwargs.get("out"), cls):
            _refuse_host()
            func(*given, **kwargs | {"out": kwargs["out"].inside})
            return kwargs["out"]
        if func.is_view:
            made = func(*given, **kwargs)
            return [cls(x, memory) for x in made] if isinstance(made, list) else cls(made, memory)
        others = [each for each in args if isinstance(each, torch.Tensor) and type(each) is not cls]
        if not getattr(at_work, "device", False):
            return memory.by_caller(func, given, args, kwargs)
        if name not in _CHANGES or any(each.dim() for each in others):
            raise AssertionError(f"{func} reads device memory, makes some, or takes the host's")
        func(*given, **kwargs)
        return args[0]


def _refuse_host():
    if not getattr(at_work, "device", False):
        raise AssertionError("the host touches device memory")


def opened(tensor):
    """Device memory as kernels see it; within a stream."""
    _refuse_host()
    tensor = tensor.array if isinstance(tensor, Viewed) else tensor
    inside = tensor.inside if isinstance(tensor, DeviceTensor) else tensor
    if not isinstance(inside, torch.Tensor):
        return inside
    if inside.dtype == torch.bfloat16:
        return inside.view(torch.int16).numpy().view(np.uint16)
    return inside.numpy()


class DeviceMemory(FakeMemory):
    """Implements casync.memory.Memory."""

    host = False
    device = torch.device("meta")

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.made = 0  # tensors so far
        self._staged: list[weakref.ref[torch.UntypedStorage]] = []

    @property
    def staged(self):
        """Pinned memory that is in use."""
        return [storage for each in self._staged if (storage := each()) is not None]

    def zeros(self, count, dtype):
        """Memory that holds garbage until the caller's stream has filled it, as a device does."""
        refuse_capture()
        self.made += 1
        inside = HostMemory.zeros(self, count, dtype)
        inside.view(torch.uint8).fill_(GARBAGE)
        self.users.run(inside.zero_)
        return DeviceTensor(inside, self)

    def staging(self, count):
        refuse_capture()
        self.made += 1
        made = torch.zeros(count, dtype=torch.uint8)
        self._staged.append(weakref.ref(made.untyped_storage()))
        return made

    def by_caller(self, func, given, args, kwargs):
        """Outside of our streams: run in the caller's stream; copies to the host wait."""
        if func.overloadpacket.__name__ in _CHANGES:
            theirs = [a.clone() if isinstance(a, torch.Tensor) and a is b else a
                      for a, b in zip(given, args, strict=True)]  # fmt: skip
            self.users.run(lambda: func(*theirs, **kwargs))
            return args[0]
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._fetched(given[0]).item()
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == HostMemory.device:
            return self._fetched(given[0])
        return self._computed(func, given, kwargs)

    def _fetched(self, inside):
        """A copy in host memory, for which the host waits."""
        target, event = torch.empty_like(inside), self.event()
        self.users.run(partial(target.copy_, inside))
        self.users.record(event)
        event.wait()
        return target

    def _computed(self, func, given, kwargs):
        """Result of an operation, computed when the caller's stream gets there."""
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        shaped = [torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else x
                  for x in given]  # fmt: skip
        made = torch.empty_like(func(*shaped, **kwargs), device="cpu")
        self.users.run(lambda: made.copy_(func(*given, **kwargs)))
        return DeviceTensor(made, self)

    def array(self, tensor):
        return tensor.detach()

    def tensor(self, array):
        made = isinstance(array, DeviceTensor)
        return array if made else DeviceTensor(torch.from_numpy(array), self)

    def copy(self, target, source):
        _refuse_host()
        ends = [each for each in (target, source) if not isinstance(each, DeviceTensor)]
        pinned = {each.data_ptr() for each in self.staged}
        assert all(each.untyped_storage().data_ptr() in pinned for each in ends)
        target, source = (getattr(each, "inside", each) for each in (target, source))
        target.copy_(source)

    def filled(self, values):
        """A tensor that the caller's stream fills with these."""
        return self.zeros(len(values), values.dtype).copy_(values)

    def download(self, tensor):
        """A copy of the present values, for a test to look at."""
        return tensor.inside.clone()


class Viewed:
    """A codec's own view of an array, which torch does not take, as it takes none of cupy's."""

    def __init__(self, array):
        self.array = array
        self.dtype, self.shape = array.dtype, array.shape

    def __len__(self):
        return len(self.array)


class Arrays:
    """Implements compll.runtime.arrays.Arrays."""

    host = False

    def vector(self, x, name, *, write=False):
        return opened(x)

    def payloads(self, x, name, what, *, write=False):
        return opened(x)

    def raw(self, x, name):
        return opened(x)

    def view(self, x, name):
        return x if isinstance(x, Viewed) else Viewed(x)

    def stream(self):
        return nullcontext()

    def address(self, x):
        return x.ctypes.data

    def empty(self, count, dtype):
        return np.empty(count, dtype)

    def zeros(self, count, dtype):
        return np.zeros(count, dtype)


class Launched:
    """A codec that may also be called outside of our streams; kernels then go to the caller's."""

    def __init__(self, inner, memory):
        self._inner, self._memory = inner, memory

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def for_shape(self, shape):
        return self

    def prepare(self):
        """Does nothing: everything is compiled."""

    def encode_batch(self, x, table, out, at, **more):
        if getattr(at_work, "device", False):
            return self._inner.encode_batch(x, table, out, at, **more)
        used = self._memory.tensor(np.zeros(len(table), np.int64))
        self._memory.users.run(
            lambda: np.copyto(
                used.inside.numpy(), self._inner.encode_batch(x, table, out, at, **more)
            )
        )
        return used

    def decode_batch(self, *args, **more):
        decode = partial(self._inner.decode_batch, *args, **more)
        if getattr(at_work, "device", False):
            decode()
        else:
            self._memory.users.run(decode)


class Device(HostDevice):
    """A device whose work a CUDA graph may capture."""

    def upload(self, values):
        self._refuse_capture()
        return super().upload(values)

    def zeros(self, count, dtype):
        self._refuse_capture()
        return super().zeros(count, dtype)

    def settle(self):
        self._refuse_capture()

    def finish(self):
        self._refuse_capture()

    def capturing(self):
        """True also for kernels of a graph that run, which read its tick."""
        return getattr(at_work, "capturing", False) or getattr(at_work, "replaying", False)

    def _refuse_capture(self):
        if getattr(at_work, "capturing", False):
            raise AssertionError("a copy, an allocation or a wait while a graph is captured")


class Emulated(Codec):
    """A codec whose kernels read the count of steps when they run, on the device."""

    @contextmanager
    def ticking(self, tick):
        if getattr(at_work, "device", False):
            at_work.replaying = True
            try:
                with super().ticking(tick):
                    yield
            finally:
                at_work.replaying = False
            return
        ticks = at_work.__dict__.setdefault("ticks", [])  # for the graph that is captured within
        ticks.append((self, tick))
        yield
        ticks.pop()


def compiled(name, **params):
    """The codec of a spec, with kernels for a device."""
    made = kernels(name, Device, **params)
    made.arrays = Arrays()
    return Emulated(made.module, made.params, "cuda", locate(name).read_text(), made)


class Garbled:
    """A codec that damages its encoded payloads."""

    def __init__(self, inner, spoils):
        self._inner, self._spoils = inner, spoils

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def for_shape(self, shape):
        return self

    def encode_batch(self, x, table, out, at, **options):
        used = self._inner.encode_batch(x, table, out, at, **options)
        if self._spoils:
            opened(out)[:] = 255
        return used
