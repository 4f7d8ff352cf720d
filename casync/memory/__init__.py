"""Where payloads lie on this rank, what of them travels, and the streams that work there.

host.py and device.py implement Memory: tensors are torch's in both. Codecs take NumPy arrays of
host memory, and of a device whatever has `__cuda_array_interface__`, as torch's tensors do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Event", "Memory", "Moment", "Stream", "as_codecs_take"]


def as_codecs_take(tensor: torch.Tensor) -> Any:
    """The same memory: an array of NumPy, or of a device the tensor."""
    return tensor.detach().numpy() if tensor.device.type == "cpu" else tensor.detach()


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether what came before it is done; True where it was never recorded."""
        ...

    def wait(self) -> None:
        """Have the host wait for that."""
        ...


class Moment(Protocol):
    """When a stream got somewhere."""

    def since(self, earlier: Any) -> float:
        """Seconds from another one of the same memory. The host waits until both are known."""
        ...


class Stream(Protocol):
    """Work that a device does in order, and by itself."""

    def after(self, event: Event) -> None:
        """What comes next waits for where `event` was recorded last."""
        ...

    def run(self, work: Callable[[], object]) -> None:
        """Put what `work` launches behind what is there. `work` must not wait for the device."""
        ...

    def record(self, event: Event) -> None:
        """Put the event behind what is there."""
        ...


class Memory(Protocol):
    """One kind of memory."""

    @property
    def host(self) -> bool:
        """Whether codecs take NumPy arrays of it."""
        ...

    @property
    def device(self) -> torch.device:
        """Of its tensors."""
        ...

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor, which all streams that were made before may use."""
        ...

    def staging(self, count: int) -> torch.Tensor:
        """uint8 [count] of zeros in host memory, to and from which `copy` does not wait."""
        ...

    def array(self, tensor: torch.Tensor) -> Any:
        """The same memory, as codecs take it."""
        ...

    def tensor(self, array: Any) -> torch.Tensor:
        """The same memory as what a codec gave."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between tensors here, or one of `staging` and one here; in the stream that runs this."""
        ...

    def stream(self, *, urgent: bool = False) -> Stream:
        """A new stream; an urgent one comes first where the device has too little room."""
        ...

    def caller(self) -> Stream:
        """The stream that is current in this thread."""
        ...

    def event(self) -> Event:
        """A new event."""
        ...

    def moment(self) -> Moment:
        """Now; on a device, when the caller's stream is done with what it holds."""
        ...

    def current(self) -> AbstractContextManager[object]:
        """Within it, this thread's codecs and streams are of this memory's device."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Call `work`, which puts things to streams from the caller's on and joins them there: they
        are taken down, not done. What is returned does them, in the stream that runs it."""
        ...

    def future(self) -> torch.futures.Future[torch.Tensor]:
        """A future that, where it is waited for, orders streams rather than blocks the host."""
        ...
