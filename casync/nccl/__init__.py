"""NCCL, through whichever binding is there: what `casync.transports.nccl` asks of it.

A module is an adapter: `distributed` (torch's process groups), `nccl4py` and `pynccl`. A binding is
imported when its adapter is made. All calls are made with our stream as torch's current one, so
on its device, and never by two threads at once, `abort` and `failure` apart.
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

EXTRAS = "pip install 'hipress[cuda12]' or 'hipress[cuda13]', whichever your driver has"


class Communicator(Protocol):
    """Some ranks that are connected; peers are places among them. Calls return once the stream
    will do it; `data` is flat, on the device, and stays as it is until then."""

    def group(self) -> AbstractContextManager[object]:
        """What is called inside goes to the stream together, at its end."""
        ...

    def send(self, data: torch.Tensor, peer: int, stream: int) -> None:
        """uint8 [bytes] to a peer. stream: a cudaStream_t, here and below."""
        ...

    def recv(self, data: torch.Tensor, peer: int, stream: int) -> None:
        """uint8 [bytes] from a peer: as many as it sends."""
        ...

    def all_reduce(self, data: torch.Tensor, op: Operation, stream: int) -> None:
        """Combine over all of its ranks, in place: float32, float16, bfloat16 or uint8."""
        ...

    def failure(self) -> str:
        """What went wrong since, in the library's words; "" where nothing did."""
        ...

    def abort(self) -> None:
        """End what is under way, also calls that block; may be called from another thread."""
        ...

    def close(self) -> None:
        """Release it, once all is done."""
        ...


#: makes the communicator of some ranks, ascending; all of them call it, in one order of all
Connect: TypeAlias = Callable[[Sequence[int]], Communicator]


class Library(Protocol):
    """A binding whose communicators are made from an id that one rank draws."""

    def unique_id(self) -> bytes:
        """A new one."""
        ...

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        """Place `rank` among `size`; blocks until all have called it."""
        ...


def binding(package: str, module: str, install: str = EXTRAS) -> ModuleType:
    """The module of a package, or a PlanError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PlanError(f"NCCL through {package} cannot be used ({error}): {install}") from error
