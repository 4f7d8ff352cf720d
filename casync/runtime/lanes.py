"""Lanes run a job's tasks for the executor.

[Note: lanes] In host memory lanes are threads (threads.py), on a device streams (streams.py). A
task is put when all tasks that it waits for are issued. For threads that means done. For streams,
an event marks the time at which they will be done, and the task waits for that event on its own
stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from casync.runtime.jobs import Job

__all__ = ["Ended", "Hooks", "Lanes"]


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


class Ended:
    """The lanes of an executor that was closed: they do nothing. See Lanes for the members."""

    def begin(self, job: Job) -> None: ...
    def start(self, job: Job) -> None: ...
    def put(self, job: Job, index: int) -> None: ...
    def run(self) -> None: ...
    def end(self, job: Job) -> None: ...
    def complete(self, job: Job, work: Callable[[], None]) -> None: ...
    def drop(self) -> None: ...
    def close(self, patience: float) -> None: ...


@dataclass(frozen=True)
class Hooks:
    """Callbacks of lanes, and their means to run tasks."""

    on_done: Callable[[Job, Sequence[int], float], None]  # tasks, and their begin (perf_counter)
    on_error: Callable[[Job, int, Exception], None]  # a task that failed
    on_idle: Callable[[float], None]  # seconds in which the compute lane had no work
    ended: threading.Event  # set by the first error and by close(): run no more tasks
    timeout: float  # seconds that a peer may take
    delay: Callable[[str], None] | None  # called with a task's text before it takes effect
    span: Callable[[str], AbstractContextManager[object]]  # entered for as long as a task takes
