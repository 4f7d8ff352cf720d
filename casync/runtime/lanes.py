"""Lanes run a job's tasks for the executor.

[Note: lanes] In host memory lanes are threads (threads.py), on a device streams (streams.py). A
task is issued when all tasks that it waits for are issued. For threads that means done. For
streams, an event marks the time at which they will be done, and the task waits for that event on
its own stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from casync.runtime.jobs import Job
from casync.runtime.options import RunOptions

__all__ = ["Lanes", "Progress"]


class Lanes(Protocol):
    """Lanes, as the executor uses them."""

    def admit(self, job: Job) -> None:
        """Take a job whose bucket is filled, in the caller's stream."""
        ...

    def start(self, job: Job) -> None:
        """Let a job's messages arrive; calls come one at a time, in one order on all ranks."""
        ...

    def issue(self, job: Job, ready: Sequence[int]) -> None:
        """Run tasks of a started job, now or once there is a thread for them."""
        ...

    def finish(self, job: Job, free: Callable[[], None], complete: Callable[[], None]) -> None:
        """End a job whose tasks are all issued: call `free` once its program may run again, then
        `complete` at the job's end, on a device in a stream."""
        ...

    def drop(self) -> None:
        """Forget tasks that have not begun."""
        ...

    def close(self, patience: float) -> None:
        """Stop the threads, waiting up to `patience` seconds for each."""
        ...


@dataclass(frozen=True)
class Progress:
    """Callbacks of lanes, and what they run by."""

    done: Callable[[Job, Sequence[int], float], None]  # tasks, and their begin (perf_counter)
    failed: Callable[[Job, int, Exception], None]  # a task, and its error
    idle: Callable[[float], None]  # seconds in which the compute lane had no work
    ended: threading.Event  # set by the first error and by close(): run no more tasks
    options: RunOptions
