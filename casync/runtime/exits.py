"""What has threads is closed before the interpreter ends.

[Note: exit] A daemon thread that is in C++ when the interpreter ends (completing a future, say, on
which the main thread no longer waits) cannot come back: it is made to unwind through frames that
must not be unwound, and the process aborts with all its work done. Threads that are no daemons
would keep a process alive whose main thread has failed.

[Note: fork] A forked child has none of these threads, and connections that are its parent's: to
close them, or to let go of them, waits for threads that are not there, or breaks what the parent
still uses. So a child (a DataLoader's worker, say) keeps all that it inherits, whatever dies there.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

__all__ = ["close_at_exit", "keep_when_forked"]


class Closing(Protocol):
    """What ends its threads in close(), which may be called more than once."""

    def close(self) -> None:
        """End the threads."""
        ...


_open: WeakSet[Closing] = WeakSet()
_connected: WeakSet[object] = WeakSet()
_inherited: list[object] = []


def close_at_exit(one: Closing) -> None:
    """Close it when the interpreter ends, if it is still there."""
    _open.add(one)


def keep_when_forked(one: object) -> None:
    """Let a forked child keep this, which has threads and connections that end with it."""
    _connected.add(one)


@atexit.register
def _close_all() -> None:
    for one in list(_open):
        with suppress(Exception):
            one.close()


def _keep_all() -> None:
    """See [Note: fork]."""
    _inherited.extend([*_open, *_connected])
    _open.clear()


os.register_at_fork(after_in_child=_keep_all)
