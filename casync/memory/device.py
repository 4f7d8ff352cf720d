"""Memory of a CUDA device, from torch's caching allocator.

[Note: whose memory is in use] The allocator reuses freed memory in the order of the stream in which
it was allocated; executors use other streams. So `record_stream` tells it, once per tensor when
that is made, of all streams: a dropped program does not free memory that a stream still reads.
Buckets belong to the caller, and `record_stream` in every step would keep each from the allocator
until that has polled events; instead the future of the averaged bucket orders the caller's stream
after the executor's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, cast

import torch

from casync.memory import Event, Stream

__all__ = ["DeviceMemory"]


class _Event:
    """A CUDA event without timing, which would be slow."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def done(self) -> bool:
        """Implements Event.done."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Implements Event.wait; releases the GIL."""
        self.event.synchronize()


class _Moment:
    """A CUDA event with timing, recorded in the given stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def since(self, earlier: Any) -> float:
        """Implements Moment.since."""
        for moment in (earlier, self):
            moment.event.synchronize()
        return 1e-3 * float(earlier.event.elapsed_time(self.event))


class _Stream:
    """A CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def after(self, event: Event) -> None:
        """Implements Stream.after."""
        self.stream.wait_event(cast(_Event, event).event)

    def run(self, work: Callable[[], object]) -> None:
        """Implements Stream.run; within `work` this is torch's current stream, also for codecs."""
        with torch.cuda.stream(self.stream), _null_for_cupy():
            work()

    def record(self, event: Event) -> None:
        """Implements Stream.record."""
        cast(_Event, event).event.record(self.stream)


def _null_for_cupy() -> AbstractContextManager[Any]:
    """A context in which CuPy's current stream is none of the caller's: codecs would take that
    before torch's, and no event orders it."""
    cuda: Any = getattr(sys.modules.get("cupy"), "cuda", None)
    try:
        if cuda is None or cuda.get_current_stream().ptr in (0, 1, 2):  # names of default streams
            return nullcontext()
    except RuntimeError:  # it finds no driver that it knows, and runs no codec
        return nullcontext()
    null: AbstractContextManager[Any] = cuda.Stream.null
    return null


class DeviceMemory:
    """Memory of one CUDA device. Implements Memory."""

    host = False

    def __init__(self, device: torch.device) -> None:
        """device: with its number, such as cuda:0."""
        self.device = device
        self._streams: list[torch.cuda.Stream] = []

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Implements Memory.zeros; see [Note: whose memory is in use]."""
        tensor = torch.zeros(count, dtype=dtype, device=self.device)
        for stream in self._streams if count else ():
            tensor.record_stream(stream)
        return tensor

    def staging(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.uint8, pin_memory=True, device="cpu")

    def array(self, tensor: torch.Tensor) -> Any:
        return tensor.detach()

    def tensor(self, array: Any) -> torch.Tensor:
        return torch.as_tensor(array, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def stream(self, *, urgent: bool = False) -> Stream:
        priority = -1 if urgent else 0
        own = torch.cuda.Stream(self.device, priority=priority)  # type: ignore[no-untyped-call]
        self._streams.append(own)
        return _Stream(own)

    def caller(self) -> Stream:
        return _Stream(torch.cuda.current_stream(self.device))

    def event(self) -> Event:
        return _Event()

    def moment(self) -> _Moment:
        return _Moment(torch.cuda.current_stream(self.device))

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Implements Memory.capture by a CUDA graph. Other threads may go on meanwhile.

        Not by torch.cuda.graph, which first waits for the device and empties torch's cache, to
        leave all memory to the graph: `work` takes none.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(self.device)):  # type: ignore[no-untyped-call]
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # of a capture that is broken already
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    def future(self) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future(devices=[self.device])
