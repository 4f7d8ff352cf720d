"""Every exception that casync raises on purpose.

::

    CasyncError
    ├── PlanError            a plan that cannot be built: unknown strategy, unsuited codec, overlaps
    ├── DeadlockError        a graph whose tasks cannot all run; names the stuck ones
    ├── TransportError       a peer is gone or the transport broke; names rank, task and peer
    │   │                    (no peer where all ranks reduce together)
    │   ├── PeerTimeout      a peer did not answer in time
    │   └── TransportAborted this rank itself broke its connections; another error says why
    ├── PayloadError         a codec failed or a message is malformed; names rank, task and,
    │                        for a message, its sender
    └── ExecutorClosed       submitted after close(), or closed while running
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.futures import Future

__all__ = [
    "CasyncError",
    "DeadlockError",
    "ExecutorClosed",
    "PayloadError",
    "PeerTimeout",
    "PlanError",
    "TransportAborted",
    "TransportError",
    "copy_to_raise",
]

E = TypeVar("E", bound=BaseException)


class CasyncError(Exception):
    """Base of all errors of this package."""


class PlanError(CasyncError):
    """A plan that cannot be built."""


class DeadlockError(CasyncError):
    """A graph whose tasks cannot all run. `stuck` lists the text of those that cannot."""

    def __init__(self, message: str, stuck: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.stuck = stuck


class TransportError(CasyncError):
    """A peer is gone, or the transport itself broke."""


class PeerTimeout(TransportError):
    """A peer did not answer in time."""


class TransportAborted(TransportError):
    """This rank itself broke its connections, after a time-out or abort; an echo of that error."""


class PayloadError(CasyncError):
    """A codec failed on a part, or a received message is malformed."""


class ExecutorClosed(CasyncError):
    """The executor was closed."""


def copy_to_raise(error: E) -> E:
    """A copy of a stored error, to raise. A raised error collects frames, which keep their callers'
    objects (such as models) alive; the stored one must not."""
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again


def fail_future(future: Future[Any], error: Exception) -> None:
    """Set an error as a future's, which keeps it: without frames, as in copy_to_raise."""
    error.__traceback__ = None
    future.set_exception(error)
