"""Versions: folders with an index, and the safetensors files in them.

    to/weight_v000007/model-00001-of-00002.safetensors   differences from version 6
                      model.safetensors.index.json       written last: it publishes
    to/anchor_v000050/...                                all weights, as a checkpoint

A tensor of `weight_v...` is the array of bytes that `deltas.encode` made; its file holds the
checksums of the new state as metadata. The index has the keys of slime, SGLang and ModelExpress,
and two that those skip: `base_checksums`, of all tensors of the base, and `run`.
"""

from __future__ import annotations

import json
import math
import operator
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from hipress.errors import StateError
from hipress.weights.deltas import ENCODINGS, FULL, Bytes
from hipress.weights.folders import INDEX, VERSION, Folder

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


def write_tensors(file: IO[bytes], items: Mapping[str, Item], notes: Mapping[str, str]) -> None:
    """Write a safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    at = 0
    for name, (dtype, shape, data) in items.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for item in items.values():
        file.write(item.data)


def read_header(path: Path, where: str = "") -> tuple[dict[str, Entry], dict[str, str]]:
    """Places of all tensors of a safetensors file, and its notes. where: for errors.

    Raises StateError for a file that is damaged, cut off or a link, and OSError.
    """
    where = where or str(path)
    if path.is_symlink():
        raise StateError(f"{where} is a link: copy the file that it leads to")
    total = path.stat().st_size
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if total < 8 or size > min(_MOST, total - 8):
            raise StateError(f"{where} is cut off, or no safetensors file")
        text = file.read(size)
    try:
        header = json.loads(text)
        notes = header.pop("__metadata__", {})
        entries = {n: _entry(path, each, 8 + size, total) for n, each in header.items()}
        return entries, {name: str(note) for name, note in notes.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(f"the header of {where} is damaged: {error}") from error


def _entry(path: Path, each: Mapping[str, Any], begin: int, total: int) -> Entry:
    first, last = map(operator.index, each["data_offsets"])
    shape = tuple(map(operator.index, each["shape"]))
    if not 0 <= first <= last <= total - begin:
        raise StateError(f"bytes {first} to {last} lie beyond its end, it is cut off")
    dtype = DTYPES.get(each["dtype"])
    fits = dtype is None or math.prod(shape) * dtype.itemsize == last - first
    if not fits or min(shape, default=0) < 0:
        raise StateError(f"{last - first} bytes for {each['dtype']} {shape}")
    return Entry(path, each["dtype"], shape, begin + first, last - first)


@dataclass(frozen=True)
class Index:
    """The index of a published version, or of a step to it."""

    folder: str
    number: int
    base: int  # version that the differences are from; -1 for all weights
    encoding: str
    checksum: str  # kind
    run: str
    base_checksums: Mapping[str, str]
    files: Mapping[str, set[str]]  # names of tensors by file


@dataclass(frozen=True)
class Version(Index):
    """The same with the places of its tensors."""

    checksums: Mapping[str, str]  # of the new state, by tensor
    entries: Mapping[str, Entry]


def name_of(kind: str, number: int) -> str:
    """The folder of a version."""
    return f"{kind}_v{number:06d}"


def checked_name(text: str) -> str:
    """The name of a file with its folder. Raises StateError if it is not one of a version."""
    folder, _, file = text.partition("/")
    if not VERSION.fullmatch(folder) or not (file == INDEX or _FILE.fullmatch(file)):
        raise StateError(f"{text!r} is no file of a version")
    return text


def number_of(folder: str) -> int:
    """The version of a folder."""
    return int(folder.rpartition("_v")[2])


def numbers(source: Folder, *kinds: str, published: bool = True) -> list[int]:
    """Versions of some kinds, sorted; of those that are not published the folder has no index."""
    found = []
    for folder, files in source.versions().items():
        match = VERSION.fullmatch(folder)
        if match and match[1] in kinds and (INDEX in files) == published:
            found.append(int(match[2]))
    return sorted(found)


def write_index(
    to: Folder, folder: str, metadata: Mapping[str, Any], files: Mapping[str, Iterable[str]]
) -> None:
    """Publish a version. files: names of tensors by file."""
    weight_map = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": metadata, "weight_map": weight_map})
    with to.writing(f"{folder}/{INDEX}") as file:
        file.write(text.encode())


def read_index(source: Folder, folder: str) -> Index | None:
    """The index of a version; None if there is none.

    Raises StateError for one that is damaged, or with a name that leads elsewhere, and OSError.
    """
    where = f"{source}/{folder}/{INDEX}"
    try:
        with source.open(f"{folder}/{INDEX}") as opened:
            index = read_json(opened, where)
    except FileNotFoundError:
        return None
    try:
        metadata, weight_map = index["metadata"], index["weight_map"]
        encoding = metadata.get("delta_encoding", FULL)
        compression = metadata.get("compression_format", "zstd")
        number, base = int(metadata["version"]), int(metadata.get("base_version", -1))
        kind, run = metadata.get("checksum_format", "adler32"), str(metadata.get("run", ""))
        base_checksums = dict(metadata.get("base_checksums", {}))
        files: dict[str, set[str]] = {str(file): set() for file in weight_map.values()}
        for name, file in weight_map.items():
            files[str(file)].add(name)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StateError(f"{where} is damaged: {error!r}") from error
    if encoding not in (*ENCODINGS, FULL) or compression != "zstd":
        raise StateError(f"{where}: {encoding!r} with {compression!r} is not known")
    if encoding != FULL and not 0 <= base < number:
        raise StateError(f"{where}: version {number} from version {base}")
    if wrong := [file for file in files if not _FILE.fullmatch(file)]:
        raise StateError(f"{where}: {wrong[0]!r} is not the name of a safetensors file in it")
    base = -1 if encoding == FULL else base
    return Index(folder, number, base, encoding, kind, run, base_checksums, files)


def read_version(source: Folder, index: Index, copies: Path) -> Version:
    """A version with the places of its tensors, in files that may be copied.

    Raises StateError for a file that is damaged or gone, and OSError.
    """
    entries: dict[str, Entry] = {}
    checksums: dict[str, str] = {}
    where = f"{source}/{index.folder}"
    for file in index.files:
        try:
            path = source.local(f"{index.folder}/{file}", copies)
            found, notes = read_header(path, f"{where}/{file}")
        except FileNotFoundError as error:
            raise StateError(f"{where} lacks {file!r}, or is being removed") from error
        entries |= found
        checksums |= notes
    named = set[str]().union(*index.files.values())
    if entries.keys() != named:
        raise StateError(f"{where}: {min(entries.keys() ^ named)!r} is in its index or a file only")
    if absent := named - checksums.keys():
        raise StateError(f"{where}: {min(absent)!r} has no checksum")
    return Version(**vars(index), checksums=checksums, entries=entries)


def read_json(file: IO[bytes], where: object) -> Any:
    """The contents of a JSON file. Raises StateError if it is none."""
    text = file.read(_MOST + 1)
    if len(text) > _MOST:
        raise StateError(f"{where} is larger than {_MOST} bytes")
    try:
        return json.loads(text)
    except ValueError as error:
        raise StateError(f"{where} is damaged: {error}") from error
