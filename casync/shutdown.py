"""Closing of objects with threads: when they are collected, and before the interpreter ends.

[Note: exit] A daemon thread that is in C++ when the interpreter ends (completing a future, for
example, for which the main thread no longer waits) cannot come back: before 3.14 Python unwinds
it through frames that must not be unwound, and the process aborts although all work is done. Other
threads would keep a process alive whose main thread has failed. So objects end their threads before
that, and groups are broken whose collectives would call back. A thread that still waits in a
library (for the answer of a stopped process, say) is kept there, as 3.14 does: a signal, whose
handler is pause(), lets it never come back. One that runs, or waits for the GIL, may hold a lock
that the interpreter needs to end (also a condition variable waits for those who wait for it), so it
is left to end, or to wait, by itself.

[Note: fork] A forked child has none of these threads, and its parent's connections: closing or
dropping them would wait for missing threads, or break connections that the parent still uses. So a
child (a DataLoader's worker, for example) keeps all that it inherits.

[Note: collection] Python's collector calls a finalizer in whatever thread allocates: perhaps in one
that the finalizer would wait for, or that holds a lock which it takes. So only in the main thread
it runs at once; elsewhere it gets a thread of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet, finalize

__all__ = ["aside", "close_at_exit", "end_with", "keep_when_forked", "start_thread"]

_PATIENCE = 0.5  # seconds in which threads end whose waits were ended
_LOOK = 0.02  # seconds; whoever waits for the GIL wakes more often
_LOOKS = 50  # then threads that have not slept through one are left


class Closing(Protocol):
    """An object that ends its threads in close(), which may be called repeatedly."""

    def close(self) -> None:
        """End the threads."""
        ...


_open: WeakSet[Closing] = WeakSet()
_threads: WeakSet[threading.Thread] = WeakSet()
_connected: WeakSet[object] = WeakSet()
_inherited: list[object] = []


def close_at_exit(one: Closing) -> None:
    """Close an object when the interpreter ends, if it still exists."""
    _open.add(one)


def keep_when_forked(one: object) -> None:
    """Keep an object alive in forked children: its end would end threads and connections."""
    _connected.add(one)


def start_thread(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread that may wait inside of a library: see [Note: exit]."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def end_with(owner: object, end: Callable[[], None]) -> Callable[[], None]:
    """Call `end` once `owner` is collected, as by `aside`, or before that by the function that this
    returns, which may be called repeatedly."""
    finalizer = finalize(owner, aside, end)

    def now() -> None:
        if finalizer.detach() is not None:
            end()

    return now


def aside(end: Callable[[], None]) -> None:
    """Call `end`, a finalizer, where it may wait: see [Note: collection]."""
    if threading.current_thread() is threading.main_thread():
        end()
    else:
        start_thread(end, "casync-end")


@atexit.register
def _close_all() -> None:
    for one in list(_open):
        with suppress(Exception):
            one.close()
    end = time.monotonic() + _PATIENCE
    for each in _others():
        each.join(max(0.0, end - time.monotonic()))
    if sys.version_info < (3, 14):
        _keep_waiting(_others())  # a thread may have started another


def _others() -> list[threading.Thread]:
    here = threading.current_thread()  # an interrupt may have come before another had started
    return [each for each in _threads if each is not here and each.is_alive()]


def _keep_waiting(threads: list[threading.Thread]) -> None:
    """Let threads that wait in C never return to Python."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p
    libc.signal(signal.SIGRTMAX, ctypes.cast(libc.pause, ctypes.c_void_p))
    for _ in range(_LOOKS):
        before = {each: _sleeps(each) for each in threads if each.is_alive()}
        if not before:
            return
        time.sleep(_LOOK)
        for each, sleeps in before.items():
            if sleeps is not None and sleeps == _sleeps(each) and each.ident is not None:
                signal.pthread_kill(each.ident, signal.SIGRTMAX)
                threads.remove(each)


def _sleeps(thread: threading.Thread) -> int | None:
    """Number of times that the thread fell asleep; None if it is awake, or has ended."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/status") as file:
            status = dict(line.split(":", 1) for line in file)
    except OSError:
        return None
    asleep = status["State"].strip().startswith("S")
    return int(status["voluntary_ctxt_switches"]) if asleep else None


def _keep_all() -> None:
    """Keep all inherited objects in a forked child: see [Note: fork]."""
    _inherited.extend([*_open, *_connected])
    _open.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_keep_all)
