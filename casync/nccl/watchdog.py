"""Time-outs of calls and of groups on a stream. See [Note: time-outs on a device]."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from casync.errors import PeerTimeout, TransportError
from casync.memory import Event, Memory
from casync.shutdown import start_thread

__all__ = ["Watchdog"]

_Task: TypeAlias = tuple[float, Sequence[str]]  # start by time.monotonic(), and names

_LOOKS = 20  # checks per time-out
_LONGEST = 1.0  # most seconds between checks


class Watchdog:
    """A thread that calls `fail` once, with an error of a time-out or of `failure`."""

    def __init__(
        self,
        rank: int,
        timeout: float,
        fail: Callable[[TransportError], None],
        failure: Callable[[], str],
        memory: Memory,
    ) -> None:
        """memory: of the device of the events."""
        self._rank, self._timeout = rank, timeout
        self._fail, self._failure, self._memory = fail, failure, memory
        self._call: _Task | None = None
        self._groups: deque[tuple[_Task, Event, object]] = deque()
        self._ends = threading.Event()
        self._thread = start_thread(self._run, "casync-nccl-watch")

    @contextmanager
    def call(self, names: Sequence[str]) -> Iterator[None]:
        """A context of calls that may block; an inner one is watched instead of the outer."""
        outer, self._call = self._call, (time.monotonic(), names)
        try:
            yield
        finally:
            self._call = outer

    def watch(self, event: Event, names: Sequence[str], data: object) -> None:
        """Watch a group on a stream: `event` follows it, and `data` is kept until then."""
        self._groups.append(((time.monotonic(), names), event, data))

    def close(self) -> None:
        """Wait for all groups, or for a time-out, then end."""
        while not all(event.done() for _, event, _ in list(self._groups)):
            if self._ends.wait(1e-3):
                break
        self.stop()

    def stop(self) -> None:
        """End the thread."""
        self._ends.set()

    def _run(self) -> None:
        pause = min(_LONGEST, self._timeout / _LOOKS)
        while not self._ends.wait(pause):
            try:
                with self._memory.current():
                    error = self._look()
            except Exception as unknown:  # without this thread, ranks would wait for ever
                error = TransportError(f"rank {self._rank} cannot watch NCCL: {unknown!r}")
            if error is not None:
                self._fail(error)
                return

    def _look(self) -> TransportError | None:
        while self._groups and self._groups[0][1].done():
            self._groups.popleft()
        oldest = self._call or (self._groups[0][0] if self._groups else None)
        since, names = oldest or (time.monotonic(), ())
        what = ", ".join(f"`{name}`" for name in names) or "nothing"
        if time.monotonic() - since >= self._timeout:
            return PeerTimeout(f"rank {self._rank} waited {self._timeout:g} s for {what}")
        failure = self._failure()
        where = f"rank {self._rank}, waiting for {what}"
        return TransportError(f"NCCL failed ({where}): {failure}") if failure else None
