"""Where compiled kernels are kept between processes: $COMPLL_CACHE, or the user's cache."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import platformdirs

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

#: seconds for which another process is waited for, and between looks
LONGEST, LOOK = 120.0, 0.02


@cache
def folder(kind: str) -> Path:
    """A writable folder for one backend's files; a temporary one where the usual one is not."""
    root = Path(os.environ.get("COMPLL_CACHE") or platformdirs.user_cache_dir("compll"))
    try:
        path = root / kind
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        return Path(tempfile.mkdtemp(prefix=f"compll-{kind}-"))


def write(path: Path, text: str | bytes) -> None:
    """Write a file so that another process sees all of it or none."""
    data = text.encode() if isinstance(text, str) else text
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    Path(name).replace(path)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """While this process makes a file, others that would make it wait; LONGEST seconds at most.

    The ranks of a machine start at once, and would each compile the same kernels. A lock ends with
    its process. Where there are no locks, nobody waits.
    """
    lock = path.with_suffix(".lock")
    try:
        handle = os.open(lock, os.O_CREAT | os.O_RDWR)
    except OSError:
        yield
        return
    try:
        wait(handle)
        yield
        # Who waits has the file open; who comes later finds what was made.
        with suppress(OSError):
            lock.unlink()
    finally:
        os.close(handle)


def wait(handle: int) -> None:
    """Take the lock of an open file, unless that takes too long or cannot be."""
    end = time.monotonic() + LONGEST
    while fcntl is not None and time.monotonic() < end:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOOK)
        except OSError:
            return None
    return None
