"""Folders of versions, and the safetensors files in them.

    to/weight_v000007/model-00001-of-00002.safetensors   differences from version 6
                      model.safetensors.index.json       written last: it publishes
    to/anchor_v000050/...                                all weights, as a checkpoint

A tensor of `weight_v...` is the array of bytes that `deltas.encode` made; its file holds the
checksums of the new state as metadata. The index has the keys of slime, SGLang and ModelExpress,
and two that those skip: `base_checksums`, of all tensors of the base, and `run`.
"""

from __future__ import annotations

import json
import logging
import math
import operator
import os
import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hipress.errors import StateError
from hipress.weights.deltas import ENCODINGS, FULL, Bytes

log = logging.getLogger("hipress")
INDEX = "model.safetensors.index.json"
DELTA, ANCHOR = "weight", "anchor"  # kinds of folders
_FOLDER = re.compile(rf"({DELTA}|{ANCHOR})_v(\d{{6,18}})")
_FILE = re.compile(r"[\w.-]+\.safetensors")
_MOST = 100 << 20  # bytes of a header, as safetensors has it, or of an index
#: safetensors' names of types
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip


class Entry(NamedTuple):
    """Place of a tensor in a file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int  # byte of the file
    size: int  # bytes

    def read(self) -> Bytes:
        """Its bytes, in memory of their own. Raises OSError or StateError."""
        data = np.fromfile(self.path, np.uint8, self.size, offset=self.begin)
        if len(data) != self.size:
            raise StateError(f"{self.path} is cut off")
        return data


class Item(NamedTuple):
    """A tensor to be written."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@contextmanager
def lasting(path: Path) -> Iterator[BufferedWriter]:
    """A new file that is there as a whole or not at all, also after a crash of the machine."""
    from compll.files import replacing  # importing compll takes a while

    with replacing(path) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make new, renamed and removed names of a folder last."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_tensors(path: Path, items: Mapping[str, Item], notes: Mapping[str, str]) -> None:
    """Write a safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    at = 0
    for name, (dtype, shape, data) in items.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with lasting(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for item in items.values():
            file.write(item.data)


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Places of all tensors of a safetensors file, and its notes.

    Raises StateError for a file that is damaged, cut off or a link, and OSError.
    """
    if path.is_symlink():
        raise StateError(f"{path} is a link: copy the file that it leads to")
    total = path.stat().st_size
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if total < 8 or size > min(_MOST, total - 8):
            raise StateError(f"{path} is cut off, or no safetensors file")
        text = file.read(size)
    try:
        header = json.loads(text)
        notes = header.pop("__metadata__", {})
        entries = {n: _entry(path, each, 8 + size, total) for n, each in header.items()}
        return entries, {name: str(note) for name, note in notes.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(f"the header of {path} is damaged: {error}") from error


def _entry(path: Path, each: Mapping[str, Any], begin: int, total: int) -> Entry:
    first, last = map(operator.index, each["data_offsets"])
    shape = tuple(map(operator.index, each["shape"]))
    if not 0 <= first <= last <= total - begin:
        raise StateError(f"bytes {first} to {last} lie beyond the end of {path}")
    dtype = DTYPES.get(each["dtype"])
    fits = dtype is None or math.prod(shape) * dtype.itemsize == last - first
    if not fits or min(shape, default=0) < 0:
        raise StateError(f"{last - first} bytes for {each['dtype']} {shape} in {path}")
    return Entry(path, each["dtype"], shape, begin + first, last - first)


@dataclass(frozen=True)
class Version:
    """A published version, or a step to it."""

    number: int
    base: int  # version that the differences are from; -1 for all weights
    encoding: str
    checksum: str  # kind
    run: str
    base_checksums: Mapping[str, str]
    checksums: Mapping[str, str]  # of the new state, by tensor
    entries: Mapping[str, Entry]


def folder_of(source: Path, kind: str, number: int) -> Path:
    """The folder of a version."""
    return source / f"{kind}_v{number:06d}"


def checked_name(text: str) -> Path:
    """The name of a file with its folder. Raises StateError if it is not one of a version."""
    folder, _, file = text.partition("/")
    if not _FOLDER.fullmatch(folder) or not (file == INDEX or _FILE.fullmatch(file)):
        raise StateError(f"{text!r} is no file of a version")
    return Path(folder, file)


def number_of(folder: Path) -> int:
    """The version of a folder."""
    return int(folder.name.rpartition("_v")[2])


def remove(folder: Path) -> None:
    """Remove a version, index first; only log an error."""
    try:
        (folder / INDEX).unlink()
        shutil.rmtree(folder)
    except OSError as error:
        log.warning("%s was not removed: %s", folder, error)


def numbers(source: Path, kind: str, *, published: bool = True) -> list[int]:
    """Versions in a folder, sorted; of those that are not published the folder has no index."""
    found = []
    for path in source.iterdir() if source.is_dir() else ():
        match = _FOLDER.fullmatch(path.name)
        if match and match[1] == kind and (path / INDEX).is_file() == published:
            found.append(int(match[2]))
    return sorted(found)


def write_index(
    folder: Path, metadata: Mapping[str, Any], files: Mapping[str, Iterable[str]]
) -> None:
    """Publish a folder. files: names of tensors by file."""
    weight_map = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": metadata, "weight_map": weight_map})
    with lasting(folder / INDEX) as file:
        file.write(text.encode())


def read_version(folder: Path) -> Version | None:
    """A published version with the places of its tensors; None if there is no index.

    Raises StateError for an index or a file that is damaged, or a name that leads elsewhere.
    """
    try:
        index = read_json(folder / INDEX)
    except FileNotFoundError:
        return None
    try:
        metadata, weight_map = index["metadata"], index["weight_map"]
        encoding = metadata.get("delta_encoding", FULL)
        compression = metadata.get("compression_format", "zstd")
        number, base = int(metadata["version"]), int(metadata.get("base_version", -1))
        kind, run = metadata.get("checksum_format", "adler32"), str(metadata.get("run", ""))
        base_checksums = dict(metadata.get("base_checksums", {}))
        files = sorted({str(file) for file in weight_map.values()})
        named = set(weight_map)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(f"{folder / INDEX} is damaged: {error!r}") from error
    if encoding not in (*ENCODINGS, FULL) or compression != "zstd":
        raise StateError(f"{folder}: {encoding!r} with {compression!r} is not known")
    if encoding != FULL and not 0 <= base < number:
        raise StateError(f"{folder / INDEX}: version {number} from version {base}")
    entries, checksums = _contents(folder, files)
    if entries.keys() != named:
        raise StateError(
            f"{folder}: {min(entries.keys() ^ named)!r} is in its index or a file only"
        )
    if absent := named - checksums.keys():
        raise StateError(f"{folder}: {min(absent)!r} has no checksum")
    return Version(
        number, -1 if encoding == FULL else base, encoding, kind, run, base_checksums, checksums,
        entries,
    )  # fmt: skip


def _contents(folder: Path, files: Iterable[str]) -> tuple[dict[str, Entry], dict[str, str]]:
    """Places of tensors in files of this folder, and checksums."""
    entries: dict[str, Entry] = {}
    checksums: dict[str, str] = {}
    for file in files:
        if not _FILE.fullmatch(file):
            raise StateError(f"{folder}: {file!r} is not the name of a safetensors file in it")
        try:
            found, notes = read_header(folder / file)
        except FileNotFoundError as error:
            raise StateError(f"{folder} lacks {file!r}, or is being removed") from error
        entries |= found
        checksums |= notes
    return entries, checksums


def read_json(path: Path) -> Any:
    """The contents of a JSON file. Raises StateError if it is none, and FileNotFoundError."""
    if path.stat().st_size > _MOST:
        raise StateError(f"{path} is larger than {_MOST} bytes")
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise StateError(f"{path} is damaged: {error}") from error
