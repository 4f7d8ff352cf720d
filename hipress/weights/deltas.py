"""Differences between two states of a tensor, byte by byte, and checksums of states.

The encodings are those of slime, miles, SGLang and ModelExpress: `xor` is one zstd frame of the old
bytes XOR the new ones; `overwrite` one of a count, the positions of changed bytes (both uint32) and
the new bytes. Here `full` is the new bytes as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hipress.errors import ConfigError, StateError

Bytes: TypeAlias = NDArray[np.uint8]
FULL = "full"
ENCODINGS = ("xor", "overwrite")
BLOCK = 16 << 20  # bytes that are compared at once
LEVEL = 1  # of zstd: higher ones save 2% at most
_MODULUS = 65521  # of Adler-32


class Part(NamedTuple):
    """The part of a tensor's difference that is one rank's."""

    begin: int  # byte of the tensor
    size: int  # bytes of the tensor
    payload: bytes  # empty: nothing changed


def zstd() -> ModuleType:
    """The package zstandard. Raises ConfigError if it is not installed."""
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise ConfigError(
            "hipress.Publisher and hipress.Receiver need zstandard: pip install 'hipress[weights]'"
        ) from error
    return zstandard


def blocks(size: int) -> Iterator[slice]:
    """Slices of at most BLOCK bytes that cover `size` bytes."""
    for begin in range(0, size, BLOCK):
        yield slice(begin, min(begin + BLOCK, size))


def encode(encoding: str, old: Bytes, new: Bytes) -> bytes:
    """The difference of two states of equal length; empty if they are equal and not `full`."""
    if encoding == FULL:
        return new.tobytes()
    if np.array_equal(old, new):
        return b""
    if encoding == "xor":
        return _compressed((old[s] ^ new[s] for s in blocks(len(new))), len(new))
    found = [np.flatnonzero(old[s] != new[s]) + s.start for s in blocks(len(new))]
    at = np.concatenate(found).astype("<u4")
    return _overwrite(at, new[at])


def join(encoding: str, parts: Sequence[Part], size: int) -> bytes:
    """The difference of a whole tensor of `size` bytes, from those of its parts."""
    if len(parts) == 1 and parts[0].size == size:
        return parts[0].payload
    parts = sorted(parts)
    if encoding == FULL:
        return b"".join(part.payload for part in parts)
    raws = [_decompressed(p.payload, _most(encoding, p.size)) if p.payload else b"" for p in parts]
    if encoding == "xor":
        pairs = zip(parts, raws, strict=True)
        return _compressed((raw or np.zeros(part.size, np.uint8) for part, raw in pairs), size)
    found = [(part.begin, *_positions(raw)) for part, raw in zip(parts, raws, strict=True) if raw]
    at = np.concatenate([begin + at for begin, at, _ in found]).astype("<u4")
    return _overwrite(at, np.concatenate([values for *_, values in found]))


def apply(encoding: str, payload: bytes | Bytes, state: Bytes) -> None:
    """Change a state to the next one, in place. Raises StateError for a payload that does not fit;
    the state may be changed by then."""
    if encoding == FULL:
        if len(payload) != len(state):
            raise StateError(f"{len(payload)} bytes for a tensor of {len(state)}")
        state[:] = np.frombuffer(payload, np.uint8)
        return
    raw = _decompressed(payload, _most(encoding, len(state)))
    if encoding == "xor":
        if len(raw) != len(state):
            raise StateError(f"a difference of {len(raw)} bytes for a tensor of {len(state)}")
        state ^= np.frombuffer(raw, np.uint8)
        return
    at, values = _positions(raw)
    if len(at) and int(at.max()) >= len(state):
        raise StateError(f"position {at.max()} in a tensor of {len(state)} bytes")
    state[at] = values


def adler(data: Bytes) -> int:
    """Adler-32 of some bytes."""
    return zlib.adler32(data.data)


def adler_of_all(parts: Sequence[tuple[int, int, int]]) -> int:
    """Adler-32 of consecutive parts (begin, size, Adler-32), which need not be here."""
    low, high = 1, 0
    for _, size, each in sorted(parts):
        high = (high + size * (low - 1) + (each >> 16)) % _MODULUS
        low = (low + (each & 0xFFFF) - 1) % _MODULUS
    return high << 16 | low


def text_of(checksum: int) -> str:
    """A checksum in eight hexadecimal digits, as files hold it."""
    return f"{checksum:08x}"


def matches(kind: str, data: Bytes, expected: str) -> bool:
    """True if the bytes have this checksum. Raises ConfigError for one that cannot be computed."""
    if kind == "adler32":
        return text_of(adler(data)) == expected
    if kind != "xxh3-128":
        raise ConfigError(f"checksums of {kind!r} are not known: adler32 and xxh3-128 are")
    try:
        import xxhash
    except ModuleNotFoundError as error:
        raise ConfigError("this folder has checksums of xxh3-128: pip install xxhash") from error
    return bool(xxhash.xxh3_128_hexdigest(data.data) == expected)


def _most(encoding: str, size: int) -> int:
    return size if encoding == "xor" else 4 + 5 * size


def _overwrite(at: NDArray[np.uint32], values: Bytes) -> bytes:
    raw = (np.uint32(len(at)).astype("<u4").tobytes(), at.tobytes(), values.tobytes())
    return _compressed(raw, sum(map(len, raw)))


def _positions(raw: bytes) -> tuple[NDArray[np.uint32], Bytes]:
    """Positions and values of a decompressed `overwrite`."""
    count = int.from_bytes(raw[:4], "little")
    if len(raw) != 4 + 5 * count:
        raise StateError(f"{count} positions and values in {len(raw)} bytes")
    return np.frombuffer(raw, "<u4", count, 4), np.frombuffer(raw, np.uint8, count, 4 + 4 * count)


def _compressed(pieces: Any, size: int) -> bytes:
    """A single zstd frame, which knows its size; checksums are those of states."""
    compressor = zstd().ZstdCompressor(level=LEVEL)
    if size <= BLOCK:  # 1.3 times as fast at once
        return bytes(compressor.compress(b"".join(pieces)))
    stream = compressor.compressobj(size=size)
    return b"".join([*map(stream.compress, pieces), stream.flush()])


def _decompressed(payload: bytes | Bytes, most: int) -> bytes:
    """The contents of one frame, at most so many bytes: checked before memory is taken."""
    library = zstd()
    try:
        size = library.frame_content_size(payload)  # -1: not told
        if size > most:
            raise StateError(f"{size} bytes are too many, at most {most} fit")
        raw: bytes = library.ZstdDecompressor().decompress(
            payload, max_output_size=max(most, 1), allow_extra_data=False
        )
    except (library.ZstdError, ValueError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(str(error)) from error
    return raw
