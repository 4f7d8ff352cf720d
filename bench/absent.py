"""A rank of a group whose other ranks are absent, to measure that one without the wire.

The others seem to agree with it, since the store answers for them with its own notes. They send
nothing: received messages are whatever lies in memory, so codecs that send positions find them
bad. PyTorch's collectives and NCCL, by a stand-in for nccl4py, do nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from hipress.compat import Store

__all__ = ["BACKEND", "alone"]

BACKEND = "absent"


class Answering(Store):
    """A store that answers for any rank with rank 0's note."""

    def __init__(self) -> None:
        super().__init__()
        self._inner: Store = dist.HashStore()  # type: ignore[attr-defined] # not in its annotations

    def _known(self, key: str) -> str:
        place, _, rank = key.rpartition("/")
        there = self._inner.check([key])
        return key if there or not rank.isdigit() else f"{place}/0"

    def set(self, key: str, value: Any) -> None:
        """Implements Store."""
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Implements Store; waits, as other stores do."""
        return bytes(self._inner.get(self._known(key)))

    def add(self, key: str, amount: int) -> int:
        """Implements Store."""
        return int(self._inner.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Implements Store."""
        return bytes(self._inner.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """Implements Store."""
        return bool(self._inner.delete_key(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Implements Store."""
        return bool(self._inner.check([self._known(key) for key in keys]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Implements Store."""
        self._inner.wait([self._known(key) for key in keys], timeout or timedelta(minutes=5))

    def clone(self) -> Answering:
        """Implements Store. The clone is this one: no call in it waits for long."""
        return self


class Done(dist.Work):
    """A completed collective, whose result is its input."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        device = tensors[0].device
        self._future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
        self._future.set_result(list(tensors))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Implements Work."""
        return True

    def get_future(self) -> Any:
        """Implements Work."""
        return self._future


class Group(dist.ProcessGroup):
    """A process group in which nothing travels.

    PyTorch declares overloads of these methods, and calls those with lists.
    """

    def getBackendName(self) -> str:
        """Implements ProcessGroup."""
        return BACKEND

    def broadcast(self, tensors: Any, opts: Any = None) -> Done:  # type: ignore[override]
        """Implements ProcessGroup: this rank is the first."""
        return Done(tensors)

    def allreduce(self, tensors: Any, opts: Any = None) -> Done:  # type: ignore[override]
        """Implements ProcessGroup."""
        return Done(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Done:
        """Implements ProcessGroup: all ranks have this rank's value."""
        for output in outputs[0]:
            output.copy_(inputs[0])
        return Done(inputs)

    def barrier(self, opts: Any = None) -> Done:
        """Implements ProcessGroup."""
        return Done([torch.zeros(1)])


class Communicator:
    """nccl4py's Communicator, with calls that do nothing."""

    is_valid = True

    @classmethod
    def init(cls, *_: Any, **__: Any) -> Communicator:
        """Implements nccl4py's Communicator.init."""
        return cls()

    def _nothing(self, *_: Any, **__: Any) -> int:
        return 0

    send = recv = allreduce = reduce = get_async_error = abort = destroy = _nothing


def _nccl4py() -> dict[str, ModuleType]:
    package, core = ModuleType("nccl"), ModuleType("nccl.core")
    core.__dict__.update(
        Communicator=Communicator, UniqueId=bytes, group=nullcontext, SUM=0, MAX=2,
        get_unique_id=lambda: bytes(128),
    )  # fmt: skip
    core.UniqueId = type("UniqueId", (), {"from_bytes": staticmethod(bytes)})  # type: ignore[attr-defined]
    package.core = core  # type: ignore[attr-defined]
    return {"nccl": package, "nccl.core": core}


@contextmanager
def alone(ranks: int) -> Iterator[None]:
    """A context in which this process is rank 0 of `ranks`; transport="nccl4py" moves nothing."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _group, devices=["cpu", "cuda"])
    before = {name: sys.modules.get(name) for name in ("nccl", "nccl.core")}
    sys.modules.update(_nccl4py())
    store = Answering()  # held here: torch holds the part of it that is C++'s
    dist.init_process_group(BACKEND, store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _group(store: object, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    kind: Any = Group
    return kind(rank, size)  # type: ignore[no-any-return]
