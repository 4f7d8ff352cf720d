"""A device that is not there: memory that host code must not touch, and kernels that run on it.

Its tensors are torch's, of a device "meta"; only what runs in a stream may change them, nobody may
read them but kernels, and nothing but DeviceMemory makes them. Kernels are the generated CUDA
sources, run by the shim.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch

from casync.memory.host import HostMemory
from compll.backends.cuda import backend as cuda
from compll.backends.cuda import source as cuda_source
from compll.runtime.codec import Codec
from compll.runtime.library import locate, type_check
from tests.casync.streams import FakeMemory, Schedule, at_work
from tests.compll.cuda_host import HostDevice

_CHANGES = {"copy_", "mul_", "add_", "fill_", "zero_"}


class DeviceTensor(torch.Tensor):
    """A tensor in the emulated device's memory. `inside`: that memory, for what runs there."""

    inside: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inside):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inside.shape, strides=inside.stride(), storage_offset=inside.storage_offset(),
            dtype=inside.dtype, device="meta",
        )  # fmt: skip
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        given = [each.inside if isinstance(each, DeviceTensor) else each for each in args]
        if func.is_view:
            return cls(func(*given, **(kwargs or {})))
        if name not in _CHANGES:
            raise AssertionError(f"the host reads device memory, or makes some: {func}")
        others = [each for each in args if isinstance(each, torch.Tensor) and type(each) is not cls]
        if any(each.dim() for each in others):
            raise AssertionError(f"{func} of host memory without the protocol")
        _refuse_host()
        func(*given, **(kwargs or {}))
        return args[0]


def _refuse_host():
    if not getattr(at_work, "device", False):
        raise AssertionError("the host touches device memory")


def opened(tensor):
    """Device memory as kernels see it; within a stream."""
    _refuse_host()
    inside = tensor.inside if isinstance(tensor, DeviceTensor) else tensor
    return inside.numpy() if isinstance(inside, torch.Tensor) else inside


class DeviceMemory(FakeMemory):
    """See casync.memory.Memory for its members."""

    host = False
    device = torch.device("meta")

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.made = 0  # tensors so far
        self.staged: list[torch.Tensor] = []

    def zeros(self, count, dtype):
        self.made += 1
        return DeviceTensor(HostMemory.zeros(self, count, dtype))

    def staging(self, count):
        self.made += 1
        self.staged.append(torch.zeros(count, dtype=torch.uint8))
        return self.staged[-1]

    def array(self, tensor):
        return tensor.detach()

    def tensor(self, array):
        return DeviceTensor(torch.from_numpy(array))

    def copy(self, target, source):
        _refuse_host()
        ends = [each for each in (target, source) if not isinstance(each, DeviceTensor)]
        pinned = {each.untyped_storage().data_ptr() for each in self.staged}
        assert all(each.untyped_storage().data_ptr() in pinned for each in ends)
        target, source = (getattr(each, "inside", each) for each in (target, source))
        target.copy_(source)

    def filled(self, values):
        """A tensor that the caller's stream fills with these."""
        made, source = self.zeros(len(values), torch.float32), self.tensor(values.clone().numpy())
        self.caller().run(lambda: made.copy_(source))
        return made

    def download(self, tensor):
        """A copy of what is there now, for a test to look at."""
        return tensor.inside.clone()


class Arrays:
    """See compll.runtime.arrays.Arrays for its members."""

    host = False

    def vector(self, x, name, *, write=False):
        return opened(x)

    def payloads(self, x, name, what, *, write=False):
        return opened(x)

    def raw(self, x, name):
        return opened(x)

    def stream(self):
        return nullcontext()

    def overlap(self, one, other):
        return np.may_share_memory(one, other)

    def empty(self, count, dtype):
        return np.empty(count, dtype)

    def zeros(self, count, dtype):
        return np.zeros(count, dtype)


def compiled(name, **params):
    """The codec of a spec whose kernels are those for a device."""
    module, known = type_check(name, params)
    kernels = cuda.kernels(module, known, HostDevice, cuda_source.source(module, 64))
    kernels.arrays = Arrays()
    return Codec(module, known, "cuda", locate(name).read_text(), kernels)
