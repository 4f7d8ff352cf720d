"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import Any

__all__ = ["replacing", "write_file", "write_json"]

_INNERMOST = re.compile(r"[\[{]\n[^][{}]*\n *[]}]")


@contextmanager
def replacing(path: Path, part: Path | None = None, mode: int = 0o666) -> Iterator[BufferedWriter]:
    """A new file that takes the place of `path` after the block; others see all of it or none.

    After an error it is removed, and `path` is as it was. A pipe, a device or a link is written in
    place. Raises OSError with the path if the disk refuses, as for lack of room.

    part: the new file's path meanwhile. mode: its permissions, before the umask.
    """
    plain = not path.is_symlink() and (path.is_file() or not path.exists())
    begun = (part or path.with_name(f"{path.name}.part")) if plain else path
    try:
        with open(begun, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
        if plain:
            begun.replace(path)
    except BaseException as error:
        if plain:
            with suppress(OSError):
                begun.unlink()
        refused = _of_disk(error)
        if refused is not None:
            raise OSError(refused.errno, refused.strerror or str(refused), str(path)) from error
        raise


def write_file(path: Path, data: str | bytes) -> None:
    """Write a file of a text, as UTF-8, or of bytes. Raises OSError as `replacing` does."""
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def write_json(path: Path, data: Any) -> None:
    """Write indented JSON, the innermost lists and mappings on a line each. Raises OSError as
    `replacing` does."""
    lines = json.dumps(data, indent=1)  # none ends within a text
    write_file(path, _INNERMOST.sub(lambda match: _on_a_line(match[0]), lines) + "\n")


def _on_a_line(text: str) -> str:
    first, *middle, last = (line.strip() for line in text.splitlines())
    return f"{first}{' '.join(middle)}{last}"


def _of_disk(error: BaseException | None) -> OSError | None:
    """The disk's error that led to this one, if any: torch.save raises others in its place."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error
