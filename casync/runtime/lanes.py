"""Lanes run a job's tasks for the executor.

[Note: lanes] In host memory lanes are threads (threads.py), on a device streams (streams.py). A
task is put when all tasks that it waits for are issued. For threads that means done. For streams,
an event marks the time at which they will be done, and the task waits for that event on its own
stream.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from casync.runtime.jobs import Job

__all__ = ["Lanes", "Owner"]


class Lanes(Protocol):
    """Lanes, as the executor uses them. `begin` comes from any thread; `start`, `put` and `end`
    come one after the other."""

    def begin(self, job: Job) -> None:
        """Take a job whose bucket is filled, in the caller's stream, and whose buffers exist."""
        ...

    def start(self, job: Job) -> None:
        """Begin a job, whose messages may now arrive; jobs in the same order on all ranks."""
        ...

    def put(self, job: Job, index: int) -> None:
        """Take a task that may be issued. Receives need no put: starting their job suffices."""
        ...

    def run(self) -> None:
        """Issue the tasks that were put, unless another thread does."""
        ...

    def end(self, job: Job) -> None:
        """End a job whose tasks are all issued; its program may run again."""
        ...

    def complete(self, job: Job, work: Callable[[], None]) -> None:
        """Call `work` at the end of a job: in the stream of that end, on a device."""
        ...

    def drop(self) -> None:
        """Forget tasks that have not begun."""
        ...

    def close(self, patience: float) -> None:
        """Stop the threads, waiting up to `patience` seconds for each."""
        ...


class Owner(Protocol):
    """The executor, as lanes use it."""

    timeout: float
    delay: Callable[[str], None] | None
    span: Callable[[str], AbstractContextManager[object]]

    def finish(self, job: Job, index: int, begin: float) -> None:
        """Take a finished task. begin: start of the task by time.perf_counter."""
        ...

    def fail(self, job: Job, index: int, error: Exception) -> None:
        """Take the error of a task."""
        ...

    def idle(self, seconds: float) -> None:
        """Count seconds in which the compute lane had no work."""
        ...

    @property
    def failed(self) -> bool:
        """True after an error of a task."""
        ...

    def ends(self, seconds: float) -> bool:
        """Wait up to `seconds`; True if the executor ends by then, or has ended."""
        ...
