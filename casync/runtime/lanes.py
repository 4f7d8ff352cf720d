"""What runs a job's tasks, for the executor.

[Note: lanes] Threads do, in host memory (threads.py), and streams on a device (streams.py). A task
is put when all that it waits for was issued. For threads that means that it is done; for streams,
that an event says when it will be, and the task waits for that event on its own stream.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from casync.runtime.jobs import Job

__all__ = ["Lanes", "Owner"]


class Lanes(Protocol):
    """What the executor asks of lanes. `begin` comes from any thread; `start`, `put` and `end` one
    after the other."""

    def begin(self, job: Job) -> None:
        """The bucket is there, as the calling thread's stream has it, and buffers are made."""
        ...

    def start(self, job: Job) -> None:
        """A job begins, in which messages may arrive; jobs in the same order everywhere."""
        ...

    def put(self, job: Job, index: int) -> None:
        """A task may be issued. Of a receive this says nothing: its job was started."""
        ...

    def run(self) -> None:
        """Issue what was put, unless another thread does."""
        ...

    def end(self, job: Job) -> None:
        """All of a job was issued; its program may run again."""
        ...

    def complete(self, job: Job, work: Callable[[], None]) -> None:
        """Tell who waits for a job that has ended, where its end is."""
        ...

    def drop(self) -> None:
        """Forget what was not begun."""
        ...

    def close(self, patience: float) -> None:
        """Stop the threads, for each of which this waits so many seconds."""
        ...


class Owner(Protocol):
    """What lanes ask of the executor."""

    timeout: float
    delay: Callable[[str], None] | None
    span: Callable[[str], AbstractContextManager[object]]

    def finish(self, job: Job, index: int, begin: float) -> None:
        """A task is done."""
        ...

    def fail(self, job: Job, index: int, error: Exception) -> None:
        """A task broke."""
        ...

    def idle(self, seconds: float) -> None:
        """The compute lane had nothing to do."""
        ...

    @property
    def failed(self) -> bool:
        """Whether a task broke."""
        ...

    def ends(self, seconds: float) -> bool:
        """Whether the executor ends within so many seconds, or has ended."""
        ...
