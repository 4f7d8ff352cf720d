"""The cache of compiled kernels, kept between processes: $COMPLL_CACHE, or the user's cache.

[Note: whose kernels] What lies in a cache is run. So a file is taken only if nobody but this user
or root can have put it there: it, its folder and the cache's root belong to one of these, and
nobody else may write them. Some umasks let a group write; what is made here does not.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import shutil
import stat
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

log = logging.getLogger("compll")
#: seconds for which another process is waited for, and between looks
LONGEST, LOOK = 120.0, 0.02
#: bytes that a folder must have room for: the kernels of a large spec
ROOM = 1 << 20


class ForeignError(OSError):
    """A file or folder that other users own or may write."""


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
    """A folder for one backend's files, which this user alone can write; a temporary one where the
    usual one cannot be written, is full, or others may write it. Raises UsageError."""
    path = usual(kind)
    try:
        make(path)
        need_own(path)
        need_room(path)
        return path
    except ForeignError as why:
        log.warning("%s: kernels are compiled for this process alone", why)
        return temporary(kind)
    except OSError:
        return temporary(kind)


def make(path: Path) -> None:
    """A folder of a cache, and the cache's root, which others may not write."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (path.parent, path):
        each.mkdir(mode=0o755, exist_ok=True)


def own(file: Path) -> bool:
    """True for a file that is there and may be run: see [Note: whose kernels]."""
    try:
        need_own(file.parent)
        refuse_foreign(file.stat(), file)
        return True
    except OSError:
        return False


def read(file: Path) -> bytes:
    """The bytes of a file that may be run: see [Note: whose kernels]. Raises OSError."""
    with file.open("rb") as opened:
        refuse_foreign(os.fstat(opened.fileno()), file)
        need_own(file.parent)
        return opened.read()


def need_own(path: Path) -> None:
    """Raise ForeignError for a folder of a cache of which others may write the files."""
    for each in (path.parent, path):
        refuse_foreign(each.stat(), each)


def refuse_foreign(found: os.stat_result, path: Path) -> None:
    """Raise ForeignError for what others own or may write."""
    if not hasattr(os, "getuid"):  # not a Unix
        return
    advice = "name another folder by COMPLL_CACHE"
    if found.st_uid not in (0, os.getuid()):
        raise ForeignError(f"{path} belongs to user {found.st_uid}, not to {os.getuid()}: {advice}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ForeignError(f"other users may write {path}: remove it, or {advice}")


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
        root = Path(tempfile.mkdtemp(prefix="compll-"))
        atexit.register(remove, root, os.getpid())
        path = root / kind
        make(path)
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
    make(path.parent)
    part = path.with_name(f"{os.urandom(8).hex()}.tmp")
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            file.write(data)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a file's lock while this process makes the file: others that would make it wait, for
    LONGEST seconds at most.

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
