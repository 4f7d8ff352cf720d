"""NCCL through pynccl 0.1.2 (ctypes, 2020), for machines without nccl4py.

pynccl finds libnccl in the directory NUMBA_NCCLLIB; if that is unset, this uses the libnccl of
NVIDIA's wheel, which comes with torch for CUDA. pynccl lacks bfloat16, which NCCL got later, and
has lengths of 32 bits.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from casync.codec import Operation
from casync.errors import PlanError
from casync.nccl import Communicator, binding

__all__ = ["Pynccl"]

_LONGEST = 2**31 - 1  # elements of a call
_FINE = (0, 7)  # ncclSuccess and ncclInProgress
_OPS = {"sum": 0, "max": 2}  # ncclRedOp_t
_TYPES = {torch.uint8: 1, torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}  # ncclDataType_t


class Pynccl:
    """Implements Library. Raises PlanError if pynccl or libnccl is missing."""

    def __init__(self) -> None:
        os.environ.setdefault("NUMBA_NCCLLIB", _wheel())
        module = binding("pynccl", "pynccl", "pip install pynccl")
        self._ids: Any = binding("pynccl", "pynccl.binding", "pip install pynccl").ncclUniqueId
        try:
            self._calls: Any = module.Nccl()
        except Exception as error:  # libnccl was not found
            raise PlanError(
                f"NCCL through pynccl cannot be used ({error}): "
                "set NUMBA_NCCLLIB to the directory of libnccl.so.2"
            ) from error

    def unique_id(self) -> bytes:
        return bytes(self._calls.get_unique_id())

    def connect(self, unique_id: bytes, rank: int, size: int) -> Communicator:
        handle = self._calls.get_comm()
        identifier = self._ids.from_buffer_copy(unique_id)
        self._calls.comm_init_rank(ctypes.byref(handle), size, identifier, rank)
        return _Communicator(self._calls, handle)


class _Communicator:
    """Implements Communicator."""

    def __init__(self, calls: Any, handle: ctypes.c_void_p) -> None:
        self._calls, self._handle = calls, handle

    @contextmanager
    def group(self) -> Iterator[None]:
        self._calls.group_start()
        try:
            yield
        finally:
            self._calls.group_end()

    def send(self, data: torch.Tensor, peer: int, stream: int) -> None:
        for piece in torch.split(data, _LONGEST):
            self._calls.pp_send(*_buffer(piece), peer, self._handle, stream)

    def recv(self, data: torch.Tensor, peer: int, stream: int) -> None:
        for piece in torch.split(data, _LONGEST):
            self._calls.pp_recv(*_buffer(piece), peer, self._handle, stream)

    def all_reduce(self, data: torch.Tensor, op: Operation, stream: int) -> None:
        for piece in torch.split(data, _LONGEST):
            place, count, kind = _buffer(piece)
            self._calls.all_reduce(place, place, count, kind, _OPS[op], self._handle, stream)

    def reduce_scatter(self, pieces: Sequence[torch.Tensor], op: Operation, stream: int) -> None:
        for rank, whole in enumerate(pieces):
            for piece in torch.split(whole, _LONGEST):
                place, count, kind = _buffer(piece)
                rest = (_OPS[op], rank, self._handle, stream)
                self._calls.reduce(place, place, count, kind, *rest)

    def failure(self) -> str:
        status = ctypes.c_int(0)
        self._calls.comm_get_async_error(self._handle, ctypes.byref(status))
        return "" if status.value in _FINE else f"ncclResult_t {status.value}"

    def abort(self) -> None:
        self._calls.comm_abort(self._handle)

    def close(self) -> None:
        self._calls.comm_destroy(self._handle)


def _buffer(data: torch.Tensor) -> tuple[int, int, int]:
    """Address, number of elements, and type."""
    return data.data_ptr(), data.numel(), _TYPES[data.dtype]


def _wheel() -> str:
    """The directory of libnccl in NVIDIA's wheel; "" if that is not installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:  # the name space is missing, too
        return ""
    places = spec.submodule_search_locations if spec else None
    return str(Path(next(iter(places))) / "lib") if places else ""
