"""The cache of compiled kernels, kept between processes: $COMPLL_CACHE, or the user's cache.

[Note: whose kernels] Files in a cache are executed. So a file is used only if nobody but this user
or root can have put it there: it, its folder and the cache's root belong to one of these, and
nobody else may write them. Some umasks let a group write; files made here do not.
"""

from __future__ import annotations

import atexit
import hashlib
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

from compll import __version__
from compll.errors import UsageError
from compll.files import replacing

fcntl: Any = None
with suppress(ImportError):  # not a Unix
    fcntl = importlib.import_module("fcntl")

log = logging.getLogger("compll")
#: seconds to wait for another process, which may be stopped, and between looks; few specs take a
#: second to compile
LONGEST, LOOK = 10.0, 0.02
#: bytes of free space that a folder needs: the kernels of a large spec
ROOM = 1 << 20


def sources() -> str:
    """A digest of the version, and of the modules that kernels depend on as they lie on disk:
    sources, or bytecode alone. An upgrade may change them under a process that has imported
    others."""
    digest, root = hashlib.sha256(__version__.encode()), Path(__file__).parents[1]
    for folder_of in ("backends/cpu", "ir", "numerics", "passes", "routines"):
        with suppress(OSError):  # not in files of their own: the version tells them apart
            for file in sorted((root / folder_of).iterdir()):
                if file.suffix in (".py", ".pyc"):
                    digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


#: the digest as this process began to import the package
IMPORTED = sources()


class ForeignError(OSError):
    """A file or folder that other users own or may write."""


@cache
def usual(kind: str) -> Path:
    """The folder of one backend's files, even if this process may not write there.

    It does not change when the process changes its working directory.
    """
    try:
        root = os.environ.get("COMPLL_CACHE") or platformdirs.user_cache_dir("compll")
        return Path(root).expanduser().absolute() / kind
    except RuntimeError:  # the user has no home
        return temporary(kind)


@cache
def folder(kind: str) -> Path:
    """A folder for one backend's files, which this user alone can write. A temporary one if the
    usual one cannot be written, is full, or others may write it. Raises UsageError."""
    path = usual(kind)
    try:
        make(path)
        need_own(path)
        need_room(path)
        return path
    except OSError as why:
        text: object = why
        if not isinstance(why, ForeignError):
            text = f"{path} cannot be written ({why.strerror}): name another folder by COMPLL_CACHE"
        log.warning("%s: kernels are compiled for this process alone", text)
        return temporary(kind)


def make(path: Path) -> None:
    """Make a folder of a cache, and the cache's root, which others may not write."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (path.parent, path):
        each.mkdir(mode=0o755, exist_ok=True)


def whole(file: Path) -> bool:
    """True for a file that exists as `write_whole` wrote it, and may be executed: see [Note: whose
    kernels]."""
    with suppress(OSError):
        return read(file.with_suffix(".sha256")) == hashlib.sha256(read(file)).digest()
    return False


def write_whole(file: Path, data: bytes) -> None:
    """Write a file that others open by its name, with its digest beside it: a loss of power may cut
    it."""
    write(file.with_suffix(".sha256"), hashlib.sha256(data).digest())
    write(file, data)


def read(file: Path) -> bytes:
    """The bytes of a file that may be executed: see [Note: whose kernels]. Raises OSError."""
    with file.open("rb") as opened:
        refuse_foreign(os.fstat(opened.fileno()), file)
        need_own(file.parent)
        return opened.read()


def need_own(path: Path) -> None:
    """Raise ForeignError for a cache's folder if others may write files in it."""
    for each in (path.parent, path):
        refuse_foreign(each.stat(), each)


def refuse_foreign(status: os.stat_result, path: Path) -> None:
    """Raise ForeignError for a file or folder that others own or may write."""
    if not hasattr(os, "getuid"):  # not a Unix
        return
    advice = "name another folder by COMPLL_CACHE"
    if status.st_uid not in (0, os.getuid()):
        raise ForeignError(
            f"{path} belongs to user {status.st_uid}, not to {os.getuid()}: {advice}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ForeignError(f"other users may write {path}: remove it, or {advice}")


@cache
def spare(kind: str) -> Path:
    """A temporary folder for files that `folder` no longer takes."""
    return temporary(kind)


def need_room(path: Path) -> None:
    """Raise OSError if files cannot be written."""
    with tempfile.TemporaryFile(dir=path) as file:
        file.write(bytes(ROOM))


def temporary(kind: str) -> Path:
    """A folder that is removed when this process ends."""
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
    """Remove a folder and its content, unless this process is a fork of the one that made it."""
    if os.getpid() == maker:
        shutil.rmtree(path, ignore_errors=True)


def write(path: Path, text: str | bytes) -> None:
    """Write a file so that another process sees all of it or none.

    The umask decides who may read it, unlike tempfile's default: root may fill an image that others
    use. A folder that was removed is made again.
    """
    data = text.encode() if isinstance(text, str) else text
    make(path.parent)
    part = path.with_name(f"{os.urandom(8).hex()}.tmp")  # other processes may write it, too
    with replacing(path, part, mode=0o644) as file:
        file.write(data)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a file's lock while this process makes the file. Others that would make it wait for
    LONGEST seconds at most.

    The ranks of a machine start at once, and would each compile the same kernels. A lock ends with
    its process. On systems without locks, nobody waits.
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
        # Waiting processes have the file open; later ones find the finished file.
        with suppress(OSError):
            lock.unlink()
        os.close(handle)


def wait(handle: int) -> None:
    """Take the lock of an open file, unless that takes too long or is impossible."""
    end = time.monotonic() + LONGEST
    while fcntl is not None and time.monotonic() < end:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(LOOK)
        except OSError:
            return
