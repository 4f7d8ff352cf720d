"""Shards of the published tensors, and what the ranks that hold them tell each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from hipress.errors import ConfigError, HipressError
from hipress.model.shards import is_sharded, local
from hipress.ranks import coordinator as coordinators
from hipress.ranks.groups import connect

T = TypeVar("T")


class Span(NamedTuple):
    """Rows of a tensor that this rank holds; all of them of a tensor without rows."""

    first: int
    last: int
    own: bool  # True if this rank publishes them, not a replica


def span_of(name: str, tensor: torch.Tensor, rank: int = 0) -> Span:
    """The rows of a DTensor, or of a tensor of which every rank has all.

    Raises ConfigError for a DTensor that is not sharded along its first dimension alone.
    """
    rows = tensor.shape[0] if tensor.ndim else 1
    if not is_sharded(tensor):
        return Span(0, rows, rank == 0)
    distributed: Any = tensor
    mesh, placements = distributed.device_mesh, distributed.placements
    coordinates = mesh.get_coordinate()
    first, last, own = 0, rows, coordinates is not None
    for axis, placement in enumerate(placements):
        place = coordinates[axis] if coordinates else 0
        if placement.is_shard(0):
            each = -(-(last - first) // mesh.size(axis))  # as torch.chunk
            first, last = min(first + place * each, last), min(first + (place + 1) * each, last)
        elif placement.is_replicate():
            own = own and place == 0
        else:
            break
    else:
        if (local(tensor).shape[0] if tensor.ndim else 1) == last - first:
            return Span(first, last, own)
    raise ConfigError(
        f"{name!r} is placed as {placements}: hipress.weights takes DTensors that are replicated "
        "or sharded along dimension 0, as fully_shard makes them"
    )


class Ranks:
    """The ranks that publish together; None: this process alone. All ranks make it."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if group is not None and dist.get_world_size(group) > 1:
            # of its own: a thread uses it while training uses the others
            self._group = connect(coordinators.coordinator(group, timeout), "publisher")
            self.rank, self.size = self._group.rank(), self._group.size()

    def share(self, value: T) -> list[T]:
        """Each rank's value, by rank."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def exchange(self, values: Sequence[T]) -> list[T]:
        """The value that each rank has for this one. values: by rank."""
        if self._group is None:
            return list(values)
        mine = list[Any]()
        for rank, value in enumerate(values):
            found = [None] * self.size if rank == self.rank else None
            dist.gather_object(value, found, group=self._group, group_dst=rank)
            mine = found or mine
        return mine

    @contextmanager
    def together(self, failure: Exception | None = None) -> Iterator[None]:
        """A block that fails on all ranks if it does on one, or if `failure` has come before it.

        Raises the error itself if this rank is alone, else HipressError with each rank's text.
        """
        if failure is None:
            try:
                yield
            except Exception as error:
                failure = error
        if failure is not None and self.size == 1:
            raise failure
        texts = self.share(_text(failure) if failure else "")
        if failed := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]:
            raise HipressError("; ".join(failed)) from failure


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, HipressError) else f"{type(error).__name__}: {error}"
