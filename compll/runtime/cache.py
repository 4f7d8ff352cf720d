"""Where compiled kernels are kept between processes: $COMPLL_CACHE, or the user's cache."""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from compll.errors import UsageError

fcntl: Any = None
with suppress(ImportError):  # not a Unix
    fcntl = importlib.import_module("fcntl")

#: seconds for which another process is waited for, and between looks
LONGEST, LOOK = 120.0, 0.02
#: bytes that a folder must have room for: the kernels of a large spec
ROOM = 1 << 20


@cache
def usual(kind: str) -> Path:
    """The folder that one backend's files are in, whether or not this process may write there.

    It stays where it is when the process goes to another folder.
    """
    try:
        root = os.environ.get("COMPLL_CACHE") or platformdirs.user_cache_dir("compll")
        return Path(root).expanduser().absolute() / kind
    except RuntimeError:  # the user has no home
        return temporary(kind)


@cache
def folder(kind: str) -> Path:
    """A folder for one backend's files, which can be written; a temporary one where the usual one
    cannot, or is full. Raises UsageError."""
    path = usual(kind)
    try:
        path.mkdir(parents=True, exist_ok=True)
        need_room(path)
        return path
    except OSError:
        return temporary(kind)


@cache
def spare(kind: str) -> Path:
    """A temporary folder for what `folder` no longer takes."""
    return temporary(kind)


def need_room(path: Path) -> None:
    """Raise OSError where files cannot be written."""
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(bytes(ROOM))


def temporary(kind: str) -> Path:
    """A folder that ends with this process."""
    try:
        path = Path(tempfile.mkdtemp(prefix=f"compll-{kind}-"))
        atexit.register(remove, path, os.getpid())
        need_room(path)
        return path
    except OSError as why:
        raise UsageError(
            "there is no room for compiled kernels, neither in the user's cache folder nor in a "
            f"temporary one ({why.strerror}); COMPLL_CACHE names another"
        ) from None


def remove(path: Path, maker: int) -> None:
    """Remove a folder and all in it, if this is the process that made it, and no fork of it."""
    if os.getpid() == maker:
        shutil.rmtree(path, ignore_errors=True)


def write(path: Path, text: str | bytes) -> None:
    """Write a file so that another process sees all of it or none.

    Who may read it the umask says, not tempfile's caution: an image is filled by root, say, and
    used by others. A folder that was removed is made again.
    """
    data = text.encode() if isinstance(text, str) else text
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{os.urandom(8).hex()}.tmp")
    try:
        with part.open("xb") as file:
            file.write(data)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


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
    finally:
        # Who waits has the file open; who comes later finds what was made.
        with suppress(OSError):
            lock.unlink()
        os.close(handle)


def wait(handle: int) -> None:
    """Take the lock of an open file, unless that takes too long or cannot be."""
    end = time.monotonic() + LONGEST
    while fcntl is not None and time.monotonic() < end:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(LOOK)
        except OSError:
            return
