"""Folders of versions: one that this machine mounts, or one at a URL that fsspec knows.

A publisher writes the index of a version last, so no reader needs more than this: a list, whole
files, and that a file which was written is there for all.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import IO, Any, Protocol

from hipress.errors import ConfigError, HipressError

log = logging.getLogger("hipress")
INDEX = "model.safetensors.index.json"
DELTA, ANCHOR = "weight", "anchor"  # kinds of versions
VERSION = re.compile(rf"({DELTA}|{ANCHOR})_v(\d{{6,18}})")
LOCK = ".publisher"


class Folder(Protocol):
    """Versions, each a folder of files; names of files are FOLDER/FILE. Errors are OSErrors."""

    pause: float  # seconds between looks for a version

    def versions(self) -> dict[str, set[str]]:
        """Names of files by folder."""

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A file, to be read. Raises FileNotFoundError."""

    def local(self, name: str, copies: Path) -> Path:
        """A file of this machine: itself, or a copy below `copies`. Raises FileNotFoundError."""

    def writing(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A new file in a folder that was begun."""

    def begin(self, folder: str) -> None:
        """Make a folder. Raises HipressError if another publisher writes here."""

    def remove(self, folder: str) -> None:
        """Remove a folder, index first; only log an error."""

    def take(self) -> Callable[[], object]:
        """Keep other publishers out until the function that this returns is called. Raises
        ConfigError if one is in."""


def folder_at(place: str | os.PathLike[str]) -> Folder:
    """The folder of a path or URL. Raises ConfigError for a URL that fsspec does not know."""
    text = os.fspath(place)
    if "://" not in text:
        return LocalFolder(Path(text))
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    try:
        files, path = url_to_fs(text)
    except (ImportError, ValueError) as error:  # the package of a protocol is absent
        raise ConfigError(f"{text!r} cannot be opened: {error}") from error
    local = isinstance(files, LocalFileSystem)
    return LocalFolder(Path(path)) if local else Remote(files, path, text)


class LocalFolder(Folder):
    """A folder that this machine mounts. Files are there as a whole or not at all."""

    pause = 0.05

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def versions(self) -> dict[str, set[str]]:
        found = {}
        for name in os.listdir(self.path) if self.path.is_dir() else ():
            with suppress(FileNotFoundError, NotADirectoryError):  # a file, or just removed
                if VERSION.fullmatch(name):
                    found[name] = set(os.listdir(self.path / name))
        return found

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return (self.path / name).open("rb")

    def local(self, name: str, copies: Path) -> Path:
        return self.path / name

    def writing(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return lasting(self.path / name)

    def begin(self, folder: str) -> None:
        try:
            (self.path / folder).mkdir()
        except FileExistsError as error:
            raise HipressError(f"another publisher has written {self}/{folder}") from error
        sync(self.path)

    def remove(self, folder: str) -> None:
        try:
            (self.path / folder / INDEX).unlink(missing_ok=True)
            shutil.rmtree(self.path / folder)
        except OSError as error:
            log.warning("%s was not removed: %s", self.path / folder, error)

    def take(self) -> Callable[[], object]:
        """Lock the folder; a process that ends gives it back."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        unlock = weakref.finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another publisher has {self}: give each a folder") from error
        return unlock


class Remote(Folder):
    """A folder of any other file system of fsspec, as s3:// and gs://.

    There is no lock: the publisher that came last has the folder, and others are told with their
    next version.
    """

    pause = 1.0

    def __init__(self, files: Any, path: str, url: str) -> None:
        """files: of fsspec. path: in them. url: for errors."""
        self._files, self._path, self._url = files, path.rstrip("/"), url.rstrip("/")
        self._mark = secrets.token_hex(8).encode()

    def __str__(self) -> str:
        return self._url

    def versions(self) -> dict[str, set[str]]:
        found = dict[str, set[str]]()
        with self._asked():
            self._files.invalidate_cache()
            for path in self._files.find(self._path):
                folder, _, file = path.removeprefix(f"{self._path}/").rpartition("/")
                found.setdefault(folder, set()).add(file)
        return found

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        with self._asked(), self._files.open(self._at(name), "rb") as file:
            yield file

    def local(self, name: str, copies: Path) -> Path:
        path = copies / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._asked():
            self._files.get_file(self._at(name), str(path))
        return path

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        """A new file, which readers of most stores see once it is closed."""
        with self._asked(), self._files.open(self._at(name), "wb") as file:
            yield file

    def begin(self, folder: str) -> None:
        with self.open(LOCK) as file:
            mark = file.read()
        if mark != self._mark or folder in self.versions():
            raise HipressError(f"another publisher has taken {self}: give each a folder")
        with self._asked():
            self._files.makedirs(self._at(folder), exist_ok=True)

    def remove(self, folder: str) -> None:
        try:
            with self._asked():
                if self._files.exists(self._at(f"{folder}/{INDEX}")):
                    self._files.rm_file(self._at(f"{folder}/{INDEX}"))
                self._files.rm(self._at(folder), recursive=True)
        except FileNotFoundError:
            pass  # no file is left, and so no folder
        except OSError as error:
            log.warning("%s/%s was not removed: %s", self, folder, error)

    def take(self) -> Callable[[], object]:
        """Write a mark, for which `begin` looks."""
        with self._asked():
            self._files.makedirs(self._path, exist_ok=True)
        with self.writing(LOCK) as file:
            file.write(self._mark)
        return bool

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Errors of stores as OSErrors that name the folder."""
        try:
            yield
        except (FileNotFoundError, HipressError):
            raise
        except Exception as error:
            raise OSError(f"{self}: {type(error).__name__}: {error}") from error


@contextmanager
def lasting(path: Path) -> Iterator[BufferedWriter]:
    """A new file that is there as a whole or not at all, also after a crash of the machine."""
    from compll.files import replacing  # importing compll takes a while

    with replacing(path) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)


def sync(path: Path) -> None:
    """Make what a file holds last, or new, renamed and removed names of a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
