"""NCCL through nccl4py, NVIDIA's binding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch

from casync.codec import Operation
from casync.nccl import Communicator, binding

__all__ = ["Nccl4py"]

_FINE = (0, 7)  # ncclSuccess and ncclInProgress


class Nccl4py:
    """Implements Library. Raises PlanError if nccl4py is missing."""

    def __init__(self) -> None:
        self._core: Any = binding("nccl4py", "nccl.core")

    def unique_id(self) -> bytes:
        return bytes(self._core.get_unique_id())

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        core = self._core
        communicator = core.Communicator.init(size, rank, core.UniqueId.from_bytes(unique_id))
        return _Communicator(core, communicator)


class _Communicator:
    """Implements Communicator. nccl4py reads address, count and type from a torch tensor."""

    def __init__(self, core: Any, communicator: Any) -> None:
        self._core, self._communicator = core, communicator
        self._ops = {"sum": core.SUM, "max": core.MAX}

    def group(self) -> AbstractContextManager[object]:
        return cast(AbstractContextManager[object], self._core.group())

    def send(self, data: torch.Tensor, peer: int, stream: int) -> None:
        self._communicator.send(data, peer, stream=stream)

    def recv(self, data: torch.Tensor, peer: int, stream: int) -> None:
        self._communicator.recv(data, peer, stream=stream)

    def all_reduce(self, data: torch.Tensor, op: Operation, stream: int) -> None:
        self._communicator.allreduce(data, data, self._ops[op], stream=stream)

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Operation, stream: int) -> None:
        for rank, piece in enumerate(pieces):
            self._communicator.reduce(piece, piece, self._ops[op], rank, stream=stream)

    def failure(self) -> str:
        if not self._communicator.is_valid or int(self._communicator.get_async_error()) in _FINE:
            return ""
        return str(self._communicator.get_last_error())

    def abort(self) -> None:
        self._communicator.abort()

    def close(self) -> None:
        self._communicator.destroy()
