"""A double of torch.cuda for DeviceMemory: runs launches at once on the host, records calls."""

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
    """A call. stream: the one in which it is, or the current one; 0: the caller's."""

    what: str
    stream: int
    about: Any = None


class Tensor(DeviceTensor):
    """A tensor of the double device; `memory` is its Cuda."""

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


class Capture:
    """A thread's capture: per stream, the work of other streams that precedes its next work."""

    def __init__(self, origin):
        self.origin, self.clocks = origin, {origin: {origin: 0}}

    def work(self, stream):
        """Put work on a stream."""
        assert stream in self.clocks, f"stream {stream} works now: it is not part of the capture"
        self.clocks[stream][stream] += 1

    def join(self, stream, event):
        """Make a stream wait for an event of the capture, and so a part of the capture."""
        own = self.clocks.setdefault(stream, {stream: 0})
        for other, count in event.clock.items():
            own[other] = max(count, own.get(other, 0))

    def end(self):
        """End the capture; raises an error if a stream does not lead back to the first."""
        after = self.clocks[self.origin]
        left = [n for n, clock in self.clocks.items() if after.get(n, 0) < clock[n]]
        if left:
            raise RuntimeError(f"capture was not joined: streams {left}")


class Cuda:
    """A double of torch for DeviceMemory.

    calls: in order; seconds: measured by events; contexts: threads that made calls for a device
    without making it the current one.
    """

    def __init__(self):
        self.calls: list[Call] = []
        self._local, self._streams = threading.local(), 0
        self._local.device = True  # the caller's thread has a device
        self.contexts: set[str] = set()
        self._lock = threading.RLock()  # the shim that runs kernels is for one thread at a time
        self.futures = SimpleNamespace(Future=self._future)
        self.cuda = SimpleNamespace(
            Event=self._event, Stream=self._stream, stream=self._within, CUDAGraph=self._graph,
            current_stream=lambda device: self.current, device=self._device,
        )  # fmt: skip

    def __getattr__(self, name):
        return getattr(torch, name)

    def zeros(self, count, *, dtype, device=None, pin_memory=False):
        self._refuse_capture("an allocation")
        values = torch.zeros(count, dtype=dtype)
        self.note("pinned" if pin_memory else "zeros", count)
        return values if pin_memory else Tensor(values, self)

    def as_tensor(self, array, device):
        if not isinstance(array, Tensor):
            self._refuse_capture("a copy of the host's memory")
        return array if isinstance(array, Tensor) else Tensor(torch.from_numpy(array), self)

    def note(self, what, about=None, stream=None):
        if not getattr(self._local, "device", False):
            self.contexts.add(threading.current_thread().name)
        self.calls.append(Call(what, (stream or self.current).number, about))

    @property
    def current(self):
        if not hasattr(self._local, "stream"):
            self._local.stream = self._stream_of(0)
        return self._local.stream

    def of(self, *whats):
        """The calls of these kinds."""
        return [call for call in self.calls if call.what in whats]

    @property
    def capture(self):
        """The capture of this thread, or None."""
        return getattr(self._local, "capture", None)

    def _refuse_capture(self, what):
        if self.capture is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    @contextmanager
    def _device(self, device):
        before, self._local.device = getattr(self._local, "device", False), True
        try:
            yield
        finally:
            self._local.device = before

    @contextmanager
    def _within(self, stream):
        before, busy = self.current, getattr(at_work, "device", False)
        if self.capture is not None:
            self.capture.work(stream.number)
        with self._lock, self._device(None):
            self._local.stream, at_work.device = stream, True
            try:
                yield
            finally:
                self._local.stream, at_work.device = before, busy

    def _graph(self):
        def begin(capture_error_mode):
            assert self.current.number, "the default stream cannot be captured"
            self.note("capture", capture_error_mode)
            self._local.capture, at_work.capturing = Capture(self.current.number), True

        def end():
            capture, self._local.capture, at_work.capturing = self.capture, None, False
            capture.end()

        return SimpleNamespace(
            capture_begin=begin, capture_end=end, replay=lambda: self.note("replay")
        )

    def _stream(self, device, priority=0):
        self._streams += 1
        made = self._stream_of(self._streams)
        self.note("Stream", priority, stream=made)
        return made

    def _stream_of(self, number):
        made = SimpleNamespace(number=number)
        made.wait_event = lambda event: self._wait(made, event)
        return made

    def _wait(self, stream, event):
        self.note("wait_event", event, stream=stream)
        if event.capture is not None and event.capture is not self.capture:
            raise RuntimeError("operation not permitted on an event last recorded in a capture")
        if event.capture is not None:
            self.capture.join(stream.number, event)
        elif self.capture is not None and stream.number in self.capture.clocks:
            raise RuntimeError("dependency created on uncaptured work in another stream")

    def _ask(self, what, event):
        """Let the host query an event, or wait for it."""
        self._refuse_capture(what)
        if event.capture is not None:
            raise RuntimeError("operation not permitted on an event last recorded in a capture")
        self.note(what, event)
        return True

    def _event(self, enable_timing=False):
        made = SimpleNamespace(at=0.0, capture=None, clock={})
        made.query = lambda: self._ask("query", made)
        made.synchronize = lambda: self._ask("synchronize", made)
        made.elapsed_time = lambda later: later.at - made.at

        def record(stream):
            made.at, made.capture = float(len(self.calls)), self.capture
            if self.capture is not None:
                self.capture.work(stream.number)
                made.clock = dict(self.capture.clocks[stream.number])
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
    """A Cuda in place of torch, for DeviceMemory."""
    made = Cuda()
    with monkeypatch.context() as patch:
        patch.setattr(device, "torch", made)
        yield made
