"""Codecs for a region of every piece: what is selected in a whole tensor travels to many owners.

A piece of n elements has `count` regions of about as many elements, cut at multiples of `align`. A
payload of a region is that of the elements in it; decoding leaves the others as they are. Its key,
such as "topk:2of4by1", says all that: nobody lists such codecs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from casync.codec import FLOAT_BYTES, Bytes, Codec, CodecDefaults, Floats, Ints, State

__all__ = ["NONZERO", "Codecs", "region_key", "whole_key"]

NONZERO = "nonzero"  # its key, in those of its regions
_KEY = re.compile(r"(.+):(\d+)of(\d+)by(\d+)")
_PAIR = 8  # bytes of an index and a value


def region_key(key: str, number: int, count: int, align: int) -> str:
    """The key of a region's codec."""
    return f"{key}:{number}of{count}by{align}"


def whole_key(key: str) -> tuple[str, int]:
    """The codec's key, and how many regions there are; 1 where the key is of no region."""
    match = _KEY.fullmatch(key)
    return (match[1], int(match[3])) if match else (key, 1)


class Codecs(dict[str, Codec]):
    """Codecs by key, and those of their regions."""

    def __missing__(self, key: str) -> Codec:
        match = _KEY.fullmatch(key)
        if match is None:
            raise KeyError(key)
        inner = Nonzero() if match[1] == NONZERO else self[match[1]]
        self[key] = Region(inner, *(int(word) for word in match.groups()[1:]))
        return self[key]


class Region(CodecDefaults):
    """A codec on a region of every piece. See Codec for its members."""

    def __init__(self, inner: Codec, number: int, count: int, align: int) -> None:
        self._inner, self._number, self._count = inner, number, count
        self.name = f"{inner.name}, region {number} of {count}"
        self.digest, self.params = inner.digest, inner.params
        self.align, self.fixed = align, inner.fixed
        self.reencodes, self.stateful = inner.reencodes, inner.stateful
        self.repeats = False  # captured programs have none

    def payload_bytes(self, n: int) -> int:
        """See Codec."""
        first, last = self._ends(n)
        return self._inner.payload_bytes(last - first) if last > first else 0

    def init_state(self, n: int, tensors: int = 1) -> dict[str, Any]:
        """That of the whole."""
        return self._inner.init_state(n, tensors)

    def encode_batch(
        self, x: Floats, table: Ints, out: Bytes, at: Ints, *, incoming: Any = None, **options: Any
    ) -> Ints:
        """See Codec."""
        assert incoming is None  # it does not fuse
        rows, inside = self._cut(table)
        used = np.zeros(len(table), np.int64)
        if len(rows):
            used[rows] = self._inner.encode_batch(x, inside, out, at[rows], **options)
        return used

    def decode_batch(
        self, payload: Bytes, table: Ints, at: Ints, used: Ints, out: Floats, **options: Any
    ) -> None:
        """See Codec."""
        rows, inside = self._cut(table)
        if len(rows):
            self._inner.decode_batch(payload, inside, at[rows], used[rows], out, **options)

    def _ends(self, n: int) -> tuple[int, int]:
        """First element of a piece's region, and the one behind its last."""
        blocks = -(-n // self.align)
        first, last = (blocks * i // self._count for i in (self._number, self._number + 1))
        return min(n, first * self.align), min(n, last * self.align)

    def _cut(self, table: Ints) -> tuple[Sequence[int], Ints]:
        """Rows whose region is not empty, and their regions as rows."""
        rows, inside = [], []
        for i, (start, n, tensor, offset, state) in enumerate(table.tolist()):
            first, last = self._ends(n)
            if last > first:
                rows.append(i)
                inside.append((start + first, last - first, tensor, offset + first, state + first))
        return rows, np.array(inside, np.int64).reshape(-1, 5)


class Nonzero(CodecDefaults):
    """Indices and values of what is not zero, or all values where those are no more bytes."""

    name = digest = NONZERO
    fixed = False
    reencodes = True

    def payload_bytes(self, n: int) -> int:
        """See Codec."""
        return FLOAT_BYTES * n

    def encode_batch(
        self,
        x: Floats,
        table: Ints,
        out: Bytes,
        at: Ints,
        *,
        state: State | None = None,
        seed: int = 0,
        step: int = 0,
        scale: float = 1.0,
        writeback: bool = False,
        incoming: Any = None,
        capacity: Ints | None = None,
    ) -> Ints:
        """See Codec; what it is asked for is values as they are."""
        assert incoming is None
        assert capacity is None
        assert scale == 1.0
        used = np.zeros(len(table), np.int64)
        for i, ((start, n, *_), first) in enumerate(zip(table.tolist(), at.tolist(), strict=True)):
            used[i] = _put(x[start : start + n], out[first : first + FLOAT_BYTES * n])
        return used

    def decode_batch(
        self,
        payload: Bytes,
        table: Ints,
        at: Ints,
        used: Ints,
        out: Floats,
        *,
        add: bool = False,
        step: int = 0,
    ) -> None:
        """See Codec; raises ValueError on a bad payload."""
        for (start, n, *_), first, size in zip(
            table.tolist(), at.tolist(), used.tolist(), strict=True
        ):
            piece = out[start : start + n]
            where, values = _get(payload[first : first + size], n)
            if add:
                piece[where] += values  # an index is there once
            else:
                piece[:] = 0
                piece[where] = values


def _put(piece: Floats, out: Bytes) -> int:
    """The payload of a piece; its bytes."""
    index = np.flatnonzero(piece)
    if _PAIR * len(index) >= out.nbytes:
        out.view(np.float32)[:] = piece
        return out.nbytes
    half = FLOAT_BYTES * len(index)
    out[:half].view(np.uint32)[:] = index
    out[half : 2 * half].view(np.float32)[:] = piece[index]
    return 2 * half


def _get(data: Bytes, n: int) -> tuple[Any, Floats]:
    """Which elements of a piece of n, and their values."""
    if len(data) == FLOAT_BYTES * n:
        return slice(None), data.view(np.float32)
    if len(data) % _PAIR or len(data) > FLOAT_BYTES * n:
        raise ValueError(f"{len(data)} bytes are no pairs of an index and a value")
    half = len(data) // 2
    index = data[:half].view(np.uint32)
    if half and (int(index[-1]) >= n or (np.diff(index.astype(np.int64)) <= 0).any()):
        raise ValueError(f"indices do not ascend below {n}")
    return index, data[half:].view(np.float32)
