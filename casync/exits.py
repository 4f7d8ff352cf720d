"""What has threads is closed before the interpreter ends.

[Note: exit] A daemon thread that is in C++ when the interpreter ends (completing a future, say, on
which the main thread no longer waits) cannot come back: it is made to unwind through frames that
must not be unwound, and the process aborts with all its work done. Threads that are no daemons
would keep a process alive whose main thread has failed.
"""

from __future__ import annotations

import atexit
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

__all__ = ["close_at_exit"]


class Closing(Protocol):
    """What ends its threads in close(), which may be called more than once."""

    def close(self) -> None:
        """End the threads."""
        ...


_open: WeakSet[Closing] = WeakSet()


def close_at_exit(one: Closing) -> None:
    """Close it when the interpreter ends, if it is still there."""
    _open.add(one)


@atexit.register
def _close_all() -> None:
    for one in list(_open):
        with suppress(Exception):
            one.close()
