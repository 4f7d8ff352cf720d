"""Texts of errors that name rank, peer, step and task."""

from __future__ import annotations

from collections.abc import Sequence

from casync.building.tasks import Recv, Send, Task
from casync.errors import (
    CasyncError,
    DeadlockError,
    PayloadError,
    PeerTimeout,
    TransportAborted,
    TransportError,
)

__all__ = ["named_error", "rank_names"]


def rank_names(world_size: int, ranks: Sequence[int] | None) -> list[str]:
    """Names of ranks in errors."""
    numbers = range(world_size)
    if ranks is None or list(ranks) == list(numbers):
        return [str(rank) for rank in numbers]
    return [f"{rank} (global {ranks[rank]})" for rank in numbers]


def named_error(
    error: Exception, task: Task, step: int, source: int, names: Sequence[str]
) -> CasyncError:
    """A CasyncError that names rank, peer, step and task, after a plain sentence."""
    if isinstance(error, DeadlockError):  # names all ranks itself
        return error
    peer = task.peer if isinstance(task, Send | Recv) else source
    beside = f", peer {names[peer]}" if peer != task.rank else ""
    what = str(error) if isinstance(error, CasyncError) else f"{type(error).__name__}: {error}"
    where = f"rank {names[task.rank]}{beside}, task `{task.text()}`: {what}"
    if not isinstance(error, TransportError):
        return PayloadError(f"step {step} failed: {where}")
    who = f"rank {names[peer]}" if beside else "a rank"
    happened = f"{who} closed the connection"
    if isinstance(error, PeerTimeout):
        happened = f"{who} did not answer"
    elif isinstance(error, TransportAborted):
        happened = "this rank closed its connections"
    return type(error)(f"{happened} in step {step} ({where})")
