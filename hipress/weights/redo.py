"""Changes of files that are written down before they are made, so that they can be repeated.

A redo file is data, a list of the changes as JSON, and the length of that list in eight bytes. It
says which bytes are to be written where, not a difference: it may be applied any number of times.
"""

from __future__ import annotations

import json
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np

from hipress.errors import StateError
from hipress.weights.delta_files import Entry
from hipress.weights.deltas import Bytes, blocks
from hipress.weights.folders import sync


class RedoWriter:
    """Writes the changes of tensors' files, in blocks: positions and bytes, or the whole block."""

    def __init__(self, file: BufferedWriter, root: Path) -> None:
        self._file, self._root, self._changes = file, root, list[Any]()
        self._sizes: dict[str, int] = {}
        self._names = list[str]()

    def add(self, name: str, place: Entry, old: Bytes, new: Bytes) -> None:
        """The change of one tensor."""
        path = str(place.path.relative_to(self._root))
        self._sizes[path] = place.path.stat().st_size
        self._names.append(name)
        for part in blocks(place.size):
            at = np.flatnonzero(old[part] != new[part]).astype("<u4")
            many = 5 * len(at) > part.stop - part.start
            if len(at):
                self._file.write(b"" if many else at.tobytes())
                self._file.write(new[part].tobytes() if many else new[part][at].tobytes())
                length = part.stop - part.start
                count = -1 if many else len(at)
                self._changes.append([path, place.begin + part.start, length, count])

    def end(self) -> None:
        """Write the list of changes."""
        table = {"sizes": self._sizes, "names": self._names, "changes": self._changes}
        text = json.dumps(table).encode()
        self._file.write(text + len(text).to_bytes(8, "little"))


def redo(file: Path, root: Path) -> list[str]:
    """Make the changes of a redo file to the files below `root`; names of the changed tensors.

    Raises StateError, before any change, if a file has another size than it had.
    """
    data = np.memmap(file, np.uint8, "r")
    length = int.from_bytes(data[-8:].tobytes(), "little")
    table = json.loads(data[-8 - length : -8].tobytes())
    for path, size in table["sizes"].items():
        if not (root / path).is_file() or (root / path).stat().st_size != size:
            raise StateError(
                f"{root / path} was changed from outside while version to be finished by {file} "
                "was applied: copy the checkpoint anew, without its folder .hipress"
            )
    maps = {path: np.memmap(root / path, np.uint8, "r+") for path in table["sizes"]}
    at = 0
    for path, begin, size, count in table["changes"]:
        target = maps[path][begin : begin + size]
        if count < 0:
            target[:] = data[at : at + size]
            at += size
        else:
            positions = data[at : at + 4 * count].view("<u4")
            target[positions] = data[at + 4 * count : at + 5 * count]
            at += 5 * count
    for path, changed in maps.items():
        changed.flush()
        sync(root / path)
    return list(table["names"])
