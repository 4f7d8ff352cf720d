"""How ranks come to a communicator: an id that the first of them puts into a store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from casync.errors import PeerTimeout
from casync.nccl import Communicator, Connect, Library

__all__ = ["Store", "through_store"]


class Store(Protocol):
    """What is used of a store of torch.distributed."""

    def set(self, key: str, value: Any) -> object:
        """Put a value."""
        ...

    def get(self, key: str) -> bytes:
        """A value that is there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> object:
        """Until all are there; raises a RuntimeError at the time-out."""
        ...


def through_store(library: Library, store: Store, rank: int, timeout: float) -> Connect:
    """Connects ranks once all of them are in the store: NCCL itself would wait without an end.

    store: no other keys may begin as its own do. Raises PeerTimeout, which names the absent.
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
        left = max(end - time.monotonic(), 1e-3)
        try:
            store.wait([f"{key}/{rank}"], timedelta(seconds=left))
        except RuntimeError as error:
            absent = [each for each in ranks if not store.check([f"{key}/{each}"])]
            raise PeerTimeout(
                f"ranks {absent} did not come to connect {list(ranks)} in {timeout:g} s: {error}"
            ) from None
