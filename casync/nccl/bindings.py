"""Bindings of NCCL by name. To connect, the first rank puts its id into a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch

from casync.errors import PeerTimeout, PlanError
from casync.nccl import Communicator, Connect, Library, distributed
from casync.nccl.nccl4py import Nccl4py
from casync.nccl.pynccl import Pynccl

__all__ = ["BINDINGS", "Store", "connect_by", "through_store"]

_LIBRARIES: dict[str, Callable[[], Library]] = {"nccl4py": Nccl4py, "pynccl": Pynccl}
BINDINGS = ("distributed", *_LIBRARIES)


class Store(Protocol):
    """The used methods of a torch.distributed store."""

    def set(self, key: str, value: Any) -> object:
        """Put a value."""
        ...

    def get(self, key: str) -> bytes:
        """An existing value."""
        ...

    def check(self, keys: list[str]) -> bool:
        """True if all keys are there."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> object:
        """Wait until all keys are there; raises RuntimeError at the time-out."""
        ...


def connect_by(
    name: str, rank: int, ranks: Sequence[int], device: torch.device, store: Store, timeout: float
) -> Connect:
    """A function that connects ranks, for NcclTransport.

    rank: this one's, 0 to n-1. ranks: global number of each. device: of this rank. store: shared by
    all ranks, without other keys that begin with a number. timeout: seconds for the others to come.
    Raises PlanError if the binding is unknown or missing.
    """
    if name == "distributed":
        return _on(device, distributed.connector(ranks, timeout, device))
    if name not in _LIBRARIES:
        raise PlanError(f"unknown binding of NCCL {name!r}; one of {', '.join(BINDINGS)}")
    return _on(device, through_store(_LIBRARIES[name](), store, rank, timeout))


def _on(device: torch.device, connect: Connect) -> Connect:
    """Connect with `device` as the current device, which NCCL uses for a communicator."""

    def there(ranks: Sequence[int]) -> Communicator:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return connect(ranks)

    return there


def through_store(library: Library, store: Store, rank: int, timeout: float) -> Connect:
    """A function that connects ranks once all of them are in the store; NCCL would wait for ever.


    store: without other keys of the same form. Raises PeerTimeout, which names absent ranks.
    """

    def connect(ranks: Sequence[int]) -> Communicator:
        key = "-".join(map(str, ranks))
        first = rank == ranks[0]
        store.set(f"{key}/{rank}", library.unique_id() if first else b"here")
        _meet(store, key, ranks, timeout)
        unique_id = bytes(store.get(f"{key}/{ranks[0]}"))
        return library.connect(unique_id, ranks.index(rank), len(ranks))

    return connect


def _meet(store: Store, key: str, ranks: Sequence[int], timeout: float) -> None:
    end = time.monotonic() + timeout
    for rank in ranks:
        remaining = max(end - time.monotonic(), 1e-3)
        try:
            store.wait([f"{key}/{rank}"], timedelta(seconds=remaining))
        except RuntimeError as error:
            absent = [each for each in ranks if not store.check([f"{key}/{each}"])]
            raise PeerTimeout(
                f"ranks {absent} did not come to connect {list(ranks)} in {timeout:g} s: {error}"
            ) from None
