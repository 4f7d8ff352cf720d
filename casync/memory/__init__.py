"""Buffers of payloads on this rank, the messages that travel, and the streams of work on them.

host.py and device.py implement Memory, both with torch tensors. Codecs take NumPy arrays of host
memory; of a device they take any object with `__cuda_array_interface__`, such as torch's tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Event", "Memory", "Moment", "Stream"]


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """True if all work before the event is done, or if the event was never recorded."""
        ...

    def wait(self) -> None:
        """Block the host until all work before the event is done."""
        ...


class Moment(Protocol):
    """A time stamp of a stream."""

    def since(self, earlier: Any) -> float:
        """Seconds since another moment of the same memory. The host waits until both are known."""
        ...


class Stream(Protocol):
    """A queue of work that a device does in order, without the host."""

    def after(self, event: Event) -> None:
        """Make all later work of this stream wait for the last record of `event`."""
        ...

    def run(self, work: Callable[[], object]) -> None:
        """Append the work that `work` launches. `work` must not wait for the device."""
        ...

    def record(self, event: Event) -> None:
        """Append the event."""
        ...


class Memory(Protocol):
    """A kind of memory."""

    @property
    def host(self) -> bool:
        """True if codecs take NumPy arrays of this memory."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        ...

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor, which the caller's stream zeroes: others must come after that. For use in
        all streams that were made before."""
        ...

    def staging(self, count: int) -> torch.Tensor:
        """Zeroed uint8 [count] in host memory; `copy` to and from it does not wait."""
        ...

    def array(self, tensor: torch.Tensor) -> Any:
        """The same memory as codecs take it."""
        ...

    def tensor(self, array: Any) -> torch.Tensor:
        """The memory of a codec's array as a tensor."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between tensors of this memory, or between one of `staging` and one of this memory;
        in the stream that runs this."""
        ...

    def stream(self, *, urgent: bool = False) -> Stream:
        """A new stream; an urgent one has priority on a busy device."""
        ...

    def caller(self) -> Stream:
        """The current stream of this thread."""
        ...

    def event(self) -> Event:
        """A new event."""
        ...

    def moment(self) -> Moment:
        """Now; on a device, the moment at which the caller's stream has done its work."""
        ...

    def current(self) -> AbstractContextManager[object]:
        """A context in which this thread's codecs and streams use this memory's device."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the work that `work` launches in streams that fork from the caller's and join it
        again, without running it. The returned function launches it, in the stream that runs the
        function."""
        ...

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """A future; on a device, waiting for it orders streams rather than blocks the host."""
        ...
