"""The CUDA device through CuPy: memory, compilation, launches. Nothing else imports CuPy."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.backends.cuda.nvrtc import kept
from compll.backends.cuda.plans import GRADIENTS, Place, Source, within
from compll.errors import PayloadError, UsageError

_NULL = np.uint64(0)
#: the interface's names of bfloat16, which NumPy does not know
BFLOAT16 = ("<V2", "|V2")
#: names of gradients' dtypes: NumPy makes a name anew at each question
_NAMES: dict[Any, str] = {np.dtype(name): name for name in ("float32", "float16")}
_NAMES[np.dtype(np.uint16)] = "bfloat16"
#: names of the null stream, and of a thread's default stream
DEFAULT_STREAMS = (0, 1, PER_THREAD := 2)
INSTALL = "pip install 'hipress[cuda12]' or 'hipress[cuda13]', whichever your driver has"


@cache
def cupy() -> Any:
    """The cupy module, with a device that works. Raises UsageError."""
    try:
        import cupy as module
    except ImportError as why:
        raise UsageError(f"the cuda backend needs CuPy ({INSTALL}): {why}") from why
    try:
        count = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as why:
        what = f"the cuda backend finds no CUDA device: {why}"
        raise UsageError(f"{what}; for a CuPy of your driver's CUDA: {INSTALL}") from why
    if count == 0:
        raise UsageError("the cuda backend finds no CUDA device")
    return module


def empty(count: int, dtype: str) -> Any:
    """Uninitialized device memory, from torch's allocator if torch uses the device: neither library
    gives memory that it caches back to the other. Raises MemoryError."""
    module, torch = cupy(), sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or not count:
        return module.empty(count, dtype)
    number = module.cuda.runtime.getDevice()
    stream, size = module.cuda.get_current_stream().ptr, count * np.dtype(dtype).itemsize
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, number)) if stream else nullcontext():
        try:
            made = torch.empty(size, dtype=torch.uint8, device=f"cuda:{number}")
        except torch.cuda.OutOfMemoryError as why:
            raise MemoryError(str(why)) from why
    return module.asarray(made).view(dtype)


def zeros(count: int, dtype: str) -> Any:
    """Zeros in device memory, allocated as by `empty`."""
    made = empty(count, dtype)
    made.fill(0)
    return made


class CupyDevice:
    """Runs a source's kernels on the current stream. Belongs to the device that is current when it
    is made, and so does its memory."""

    def __init__(self, source: Source) -> None:
        self.cupy, self.source = cupy(), source
        self.number = self.cupy.cuda.runtime.getDevice()
        self.functions: dict[tuple[str, str], Any] = {}
        self.modules: dict[str, Any] = {}

    def upload(self, values: NDArray[Any]) -> Any:
        """A copy in device memory. Raises UsageError if another device is current, or if a CUDA
        graph is being captured."""
        self.check_device()
        self.check_capture()
        made = empty(values.size, values.dtype.name)
        # ordered by the stream, which may still use the memory's previous content; of a copy, since
        # CUDA reads pinned memory of the caller's later
        stream = self.cupy.cuda.get_current_stream()
        made.set(np.array(values, order="C").reshape(-1), stream=stream)
        return made

    def zeros(self, count: int, dtype: str) -> Any:
        """Zeros in device memory. Raises UsageError, as upload."""
        self.check_device()
        self.check_capture()
        return zeros(count, dtype)

    def part(self, zone: Any, place: Place) -> Any:
        """An array within bytes of device memory."""
        return within(zone, place)

    def capturing(self) -> bool:
        """True if a CUDA graph is being captured from the current stream."""
        current = self.cupy.cuda.get_current_stream()
        return current.ptr > 1 and bool(current.is_capturing())  # the null stream never captures

    def stream(self) -> int:
        """The current stream, as a number; a thread's default stream has one name in all threads."""
        number = int(self.cupy.cuda.get_current_stream().ptr)
        return -threading.get_ident() if number == PER_THREAD else number

    def settle(self) -> None:
        """Wait until nothing runs on the device. Raises UsageError during a capture."""
        self.check_capture()
        self.cupy.cuda.Device().synchronize()

    def finish(self) -> None:
        """Wait until the current stream has finished its work. Raises UsageError, as settle."""
        self.check_capture()
        self.cupy.cuda.get_current_stream().synchronize()

    def check_capture(self) -> None:
        """Raise UsageError if a CUDA graph is being captured from the current stream: copies from
        the host, allocations and waits would spoil it."""
        if self.capturing():
            raise UsageError(
                "a CUDA graph is being captured, and this call needs memory or numbers that the "
                "device does not have yet: make the same call once before the capture, with the "
                "same table and step; pass `used` in device memory"
            )

    def check_device(self) -> None:
        """Raise UsageError if another device has become the current one."""
        current = self.cupy.cuda.runtime.getDevice()
        if current != self.number:
            raise UsageError(
                f"this codec was made on device {self.number}, and {current} is the current one: "
                "make a codec for each"
            )

    def download(self, array: Any) -> NDArray[Any]:
        """A copy in host memory; waits."""
        result: NDArray[Any] = self.cupy.asnumpy(array)
        return result

    def dtype(self, array: Any) -> str:
        """float32, float16 or bfloat16 (uint16 arrays hold bfloat16 bits)."""
        return gradient_of(array)

    def launch(
        self, gradient: str, kernel: str, grid: int, threads: int, args: tuple[Any, ...]
    ) -> None:
        """Run a kernel, after the work of the current stream."""
        given = tuple(_NULL if a is None else a for a in args)
        self.function(gradient, kernel)((grid,), (threads,), given)

    def function(self, gradient: str, kernel: str) -> Any:
        """A compiled kernel. Raises UsageError."""
        self.check_device()
        if (gradient, kernel) not in self.functions:
            self.functions[gradient, kernel] = self.loaded(gradient, kernel)
        return self.functions[gradient, kernel]

    def loaded(self, gradient: str, kernel: str) -> Any:
        """A kernel for a gradient's dtype, compiled for the current device and loaded there."""
        capability = self.cupy.cuda.Device().compute_capability
        try:
            if gradient not in self.modules:
                path = kept(self.source.full(gradient), capability)
                self.modules[gradient] = self.cupy.RawModule(path=str(path))
            return self.modules[gradient].get_function(kernel)
        except (RuntimeError, ImportError) as why:  # ImportError: no NVRTC library
            raise UsageError(f"device of compute capability {capability}: {why}") from why


class Queue:
    """A stream of another library, in the form that CuPy takes since version 14."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.number


@lru_cache(64)
def external(streams: Any, number: int) -> AbstractContextManager[Any]:
    """A context in which the stream with this address is CuPy's current one."""
    make = getattr(getattr(streams, "Stream", None), "from_external", None)
    made: AbstractContextManager[Any] = (
        make(Queue(number)) if make else streams.ExternalStream(number)
    )
    return made


class Bits:
    """The bits of a bfloat16 array in device memory, as uint16."""

    def __init__(self, owner: Any, interface: dict[str, Any]) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = interface | {"typestr": "<u2"}


class DeviceArrays:
    """CuPy arrays, and other arrays with `__cuda_array_interface__`, such as torch tensors."""

    host = False

    def vector(self, x: Any, name: str, *, write: bool = False) -> Any:
        """x as a flat cupy view: float32, float16, or uint16 for bfloat16. Raises UsageError."""
        array = self.view(x, name)
        if gradient_of(array) not in GRADIENTS or not array.flags.c_contiguous:
            raise UsageError(
                f"{name}: a contiguous float32 or float16 array (or uint16, the bits of bfloat16) "
                f"is needed, not {array.dtype} {array.shape}"
            )
        return array.reshape(-1)

    def payload(self, raw: Any, name: str) -> Any:
        """bytes, or a uint8 vector in host or device memory. Raises PayloadError."""
        module = cupy()
        if isinstance(raw, bytes):
            raw = np.frombuffer(raw, np.uint8)
        data = module.asarray(raw)
        if data.dtype != np.uint8 or data.ndim != 1:
            raise PayloadError(
                f"{name}: a payload is a uint8 vector, not {data.dtype} {data.shape}"
            )
        return module.ascontiguousarray(data)

    def view(self, x: Any, name: str) -> Any:
        """A cupy view of an array on the current device; bfloat16 as uint16 bits. Raises
        UsageError."""
        module = cupy()
        if isinstance(x, module.ndarray):
            self.check_place(x.device.id, name)
            return x
        try:
            interface = x.__cuda_array_interface__
        except AttributeError:
            # torch has the attribute, but not for tensors in host memory: a view would show a
            # copy, and writes of kernels would be lost
            where = f" on {x.device}" if hasattr(x, "device") else ""
            kind = f"{type(x).__name__}{where}"
            raise UsageError(f"{name}: an array in device memory is needed, not {kind}") from None
        except (RuntimeError, TypeError, KeyError) as why:
            raise UsageError(f"{name}: this {type(x).__name__} is not accessible: {why}") from why
        pointer = interface["data"][0]
        if pointer:  # asarray would copy from another device, and writes would be lost
            self.check_place(module.cuda.runtime.pointerGetAttributes(pointer).device, name)
        return module.asarray(Bits(x, interface) if interface["typestr"] in BFLOAT16 else x)

    def check_place(self, number: int, name: str) -> None:
        """Raise UsageError for memory of another device than the current one."""
        current = cupy().cuda.runtime.getDevice()
        if number != current:
            raise UsageError(
                f"{name}: an array on device {number}, and {current} is the current one "
                f"(torch.cuda.set_device({number}) makes that the current one)"
            )

    def raw(self, x: Any, name: str) -> Any:
        """Any array in device memory, as a flat cupy view. Raises UsageError."""
        array = self.view(x, name)
        if not array.flags.c_contiguous:
            raise UsageError(f"{name}: a contiguous array is needed, not {array.shape}")
        return array.reshape(-1)

    def payloads(self, x: Any, name: str, what: str, *, write: bool = False) -> Any:
        """A flat cupy view of an array in device memory. Raises UsageError."""
        return self.raw(x, name)

    def stream(self) -> AbstractContextManager[Any]:
        """Torch's current stream, unless CuPy has one of its own."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return nullcontext()
        streams = cupy().cuda
        theirs = torch.cuda.current_stream(torch.cuda.current_device()).cuda_stream
        if theirs == 0 or streams.get_current_stream().ptr not in DEFAULT_STREAMS:
            return nullcontext()
        return external(streams, theirs)

    def address(self, x: Any) -> int:
        """Address of a vector's first element."""
        return int(x.data.ptr)

    def empty(self, count: int, dtype: str) -> Any:
        """Uninitialized."""
        return empty(count, dtype)

    def zeros(self, count: int, dtype: str) -> Any:
        """Zeros."""
        return zeros(count, dtype)


def gradient_of(array: Any) -> str:
    """The dtype of the gradients in an array."""
    return _NAMES.get(array.dtype) or str(array.dtype.name)
