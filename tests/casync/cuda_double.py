"""A double of torch.cuda for the real DeviceMemory: what is launched is done at once, in memory of
the host, and every call is written down."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from casync.memory import device
from tests.casync.emulated import DeviceTensor
from tests.casync.streams import at_work

DEVICE = torch.device("meta")  # whose tensors can be made without a GPU


class Call(NamedTuple):
    """`stream`: that in which it is, or that was current; 0: the caller's."""

    what: str
    stream: int
    about: Any = None


class Tensor(DeviceTensor):
    """Of the device; `memory` is its Cuda."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cuda = next(each.memory for each in args if isinstance(each, cls))
        given = [each.inside if isinstance(each, cls) else each for each in args]
        if func.is_view:
            return cls(func(*given, **kwargs or {}), cuda)
        cuda.note(func.overloadpacket.__name__)
        func(*given, **kwargs or {})
        return args[0]

    def record_stream(self, stream):
        self.memory.note("record_stream", self, stream=stream)


class Cuda:
    """What DeviceMemory finds as torch. `calls`: in order; `seconds`: what events measure."""

    def __init__(self):
        self.calls: list[Call] = []
        self._local, self._streams = threading.local(), 0
        self._lock = threading.RLock()  # the shim that runs kernels is for one thread at a time
        self.futures = SimpleNamespace(Future=self._future)
        self.cuda = SimpleNamespace(
            Event=self._event, Stream=self._stream, stream=self._within, graph=self._graph,
            current_stream=lambda device: self.current, CUDAGraph=lambda: SimpleNamespace(
                replay=lambda: self.note("replay")),
            device=lambda device: self._within(self._stream_of(0)),
        )  # fmt: skip

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, count, *, dtype, device=None, pin_memory=False):
        values = torch.zeros(count, dtype=dtype)
        self.note("pinned" if pin_memory else "zeros", count)
        return values if pin_memory else Tensor(values, self)

    def as_tensor(self, array, device):
        return array if isinstance(array, Tensor) else Tensor(torch.from_numpy(array), self)

    def note(self, what, about=None, stream=None):
        self.calls.append(Call(what, (stream or self.current).number, about))

    @property
    def current(self):
        if not hasattr(self._local, "stream"):
            self._local.stream = self._stream_of(0)
        return self._local.stream

    def of(self, *whats):
        """The calls of these kinds."""
        return [call for call in self.calls if call.what in whats]

    @contextmanager
    def _within(self, stream):
        before, busy = self.current, getattr(at_work, "device", False)
        with self._lock:
            self._local.stream, at_work.device = stream, True
            try:
                yield
            finally:
                self._local.stream, at_work.device = before, busy

    @contextmanager
    def _graph(self, graph, capture_error_mode):
        self.note("capture", capture_error_mode)
        yield

    def _stream(self, device, priority):
        self._streams += 1
        made = self._stream_of(self._streams)
        self.note("Stream", priority, stream=made)
        return made

    def _stream_of(self, number):
        made = SimpleNamespace(number=number)
        made.wait_event = lambda event: self.note("wait_event", event, stream=made)
        return made

    def _event(self, enable_timing=False):
        made = SimpleNamespace(query=lambda: True, at=0.0)
        made.synchronize = lambda: self.note("synchronize", made)
        made.elapsed_time = lambda later: later.at - made.at

        def record(stream):
            made.at = float(len(self.calls))
            self.note("record", made, stream=stream)

        made.record = record
        return made

    def _future(self, devices):
        self.note("Future", devices)
        note = self.note

        class Future(torch.futures.Future):
            def set_result(self, result):
                note("set_result")
                super().set_result(result)

        return Future()


@contextmanager
def doubled(monkeypatch):
    """A Cuda instead of torch, for DeviceMemory."""
    made = Cuda()
    with monkeypatch.context() as patch:
        patch.setattr(device, "torch", made)
        yield made
