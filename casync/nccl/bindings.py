"""Which binding of NCCL is taken, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from casync.errors import PlanError
from casync.nccl import Connect, Library, distributed
from casync.nccl.meet import Store, through_store
from casync.nccl.nccl4py import Nccl4py
from casync.nccl.pynccl import Pynccl

__all__ = ["BINDINGS", "connect_by"]

_LIBRARIES: dict[str, Callable[[], Library]] = {"nccl4py": Nccl4py, "pynccl": Pynccl}
BINDINGS = ("distributed", *_LIBRARIES)


def connect_by(
    name: str, rank: int, ranks: Sequence[int], device: torch.device, store: Store, timeout: float
) -> Connect:
    """What connects ranks, for NcclTransport.

    rank: this one's, 0 to n-1. ranks: the global number of each. device: of this rank. store: all
    ranks', where no other key begins with a number. timeout: seconds for the others to come.
    Raises PlanError where the binding is unknown or missing.
    """
    if name == "distributed":
        return distributed.connector(ranks, timeout, device)
    if name not in _LIBRARIES:
        raise PlanError(f"unknown binding of NCCL {name!r}; one of {', '.join(BINDINGS)}")
    return through_store(_LIBRARIES[name](), store, rank, timeout)
