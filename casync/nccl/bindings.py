"""Bindings of NCCL by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from casync.errors import PlanError
from casync.nccl import Communicator, Connect, Library, distributed
from casync.nccl.bootstrap import Store, through_store
from casync.nccl.nccl4py import Nccl4py
from casync.nccl.pynccl import Pynccl

__all__ = ["BINDINGS", "connect_by"]

_LIBRARIES: dict[str, Callable[[], Library]] = {"nccl4py": Nccl4py, "pynccl": Pynccl}
BINDINGS = ("distributed", *_LIBRARIES)


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
