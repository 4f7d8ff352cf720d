"""NCCL through one of its bindings, as `casync.transports.nccl` uses it.

Each module adapts a binding: `distributed` (torch's process groups), `nccl4py` and `pynccl`. A
binding is imported when its adapter is made. All calls come with casync's stream as torch's current
one, so on its device, and never from two threads at once, except `abort` and `failure`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeAlias

from casync.errors import PlanError

if TYPE_CHECKING:
    import torch

    from casync.codec import Operation

__all__ = ["Communicator", "Connect", "Library", "binding"]

EXTRAS = "pip install 'hipress[cuda12]' or 'hipress[cuda13]', whichever matches the driver"


class Communicator(Protocol):
    """A communicator of some ranks; peers are positions among them. Calls only enqueue work on the
    stream; `data` is flat, on the device, and must not change until the work is done."""

    def group(self) -> AbstractContextManager[object]:
        """A context whose calls are enqueued together at its end."""
        ...

    def send(self, data: torch.Tensor, peer: int, stream: int) -> None:
        """Send uint8 [bytes] to a peer. stream: a cudaStream_t, here and below."""
        ...

    def recv(self, data: torch.Tensor, peer: int, stream: int) -> None:
        """Receive uint8 [bytes] from a peer, which sends equally many."""
        ...

    def all_reduce(self, data: torch.Tensor, op: Operation, stream: int) -> None:
        """Combine over all ranks, in place: float32, float16, bfloat16 or uint8."""
        ...

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Operation, stream: int) -> None:
        """Combine one piece per rank, in place on that rank; others must not use it. Elements are
        as in `all_reduce`; no piece is empty."""
        ...

    def failure(self) -> str:
        """The library's text on a failure since the start; "" if there is none."""
        ...

    def abort(self) -> None:
        """End all operations, also calls that block; may be called from another thread."""
        ...

    def close(self) -> None:
        """Release the communicator after all operations are done."""
        ...


#: makes the communicator of some ranks, ascending; all of them call it, in the same order
Connect: TypeAlias = Callable[[Sequence[int]], Communicator]


class Library(Protocol):
    """A binding whose communicators are made from an id that one rank draws."""

    def unique_id(self) -> bytes:
        """A new id."""
        ...

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """Connect as `rank` of `size`; blocks until all ranks have called it."""
        ...


def binding(package: str, module: str, install: str = EXTRAS) -> ModuleType:
    """The module of a package; PlanError with install instructions if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PlanError(f"NCCL through {package} cannot be used ({error}): {install}") from error
