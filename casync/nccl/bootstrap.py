"""Connecting a communicator: the first rank puts its id into a store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from casync.errors import PeerTimeout
from casync.nccl import Communicator, Connect, Library

__all__ = ["Store", "through_store"]


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
