"""Closing of objects with threads before the interpreter ends.

[Note: exit] A daemon thread that is in C++ when the interpreter ends (completing a future, for
example, for which the main thread no longer waits) cannot come back: Python unwinds it through
frames that must not be unwound, and the process aborts although all work is done. Other threads
would keep a process alive whose main thread has failed.

[Note: fork] A forked child has none of these threads, and its parent's connections: closing or
dropping them would wait for missing threads, or break connections that the parent still uses. So a
child (a DataLoader's worker, for example) keeps all that it inherits.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

__all__ = ["close_at_exit", "keep_when_forked"]


class Closing(Protocol):
    """An object that ends its threads in close(), which may be called repeatedly."""

    def close(self) -> None:
        """End the threads."""
        ...


_open: WeakSet[Closing] = WeakSet()
_connected: WeakSet[object] = WeakSet()
_inherited: list[object] = []


def close_at_exit(one: Closing) -> None:
    """Close an object when the interpreter ends, if it still exists."""
    _open.add(one)


def keep_when_forked(one: object) -> None:
    """Keep an object alive in forked children: its end would end threads and connections."""
    _connected.add(one)


@atexit.register
def _close_all() -> None:
    for one in list(_open):
        with suppress(Exception):
            one.close()


def _keep_all() -> None:
    """Keep all inherited objects in a forked child: see [Note: fork]."""
    _inherited.extend([*_open, *_connected])
    _open.clear()


os.register_at_fork(after_in_child=_keep_all)
