"""Codecs for a region of every piece: values selected in a whole tensor travel to several owners.

A piece has `count` regions of about equal size: blocks in turn, at multiples of `align`. So a run
of large values, such as the rows of frequent words, is shared by all regions. A region's payload
covers its elements; decoding leaves all others as they are. The key, such as "topk:2of4by1",
describes the region, so region codecs need no registration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from casync.codec import (
    FLOAT_BYTES,
    Bytes,
    Codec,
    CodecDefaults,
    DecodeOptions,
    EncodeOptions,
    Floats,
    Ints,
    State,
)

__all__ = ["NONZERO", "Codecs", "region_key", "region_of", "whole_key"]

NONZERO = "nonzero"  # codec part of the region keys of Nonzero
_KEY = re.compile(r"(.+):(\d+)of(\d+)by(\d+)")
_PAIR = 8  # bytes of an index and a value
_BLOCK = 512  # least elements of a block
START, STATE = 0, 4  # columns of a table: where a piece begins


def region_key(key: str, number: int, count: int, align: int) -> str:
    """Key of a region's codec, such as "topk:2of4by1"."""
    return f"{key}:{number}of{count}by{align}"


def whole_key(key: str) -> tuple[str, int]:
    """Key of the whole codec, and the number of regions; 1 if the key names no region."""
    match = _KEY.fullmatch(key)
    return (match[1], int(match[3])) if match else (key, 1)


def region_of(key: str) -> tuple[int, int]:
    """Number of the region that a key names, and how many there are; (0, 1) if it names none."""
    match = _KEY.fullmatch(key)
    return (int(match[2]), int(match[3])) if match else (0, 1)


class Codecs(dict[str, Codec]):
    """Codecs by key; codecs of regions are made at their first use."""

    def __missing__(self, key: str) -> Codec:
        match = _KEY.fullmatch(key)
        if match is None:
            raise KeyError(key)
        number, count, align = (int(word) for word in match.groups()[1:])
        blocks = _Blocks(number, count, align * -(-_BLOCK // align))
        self[key] = Nonzero(blocks) if match[1] == NONZERO else Region(self[match[1]], blocks)
        return self[key]


@dataclass(frozen=True)
class _Blocks:
    """The elements of one region: every `count`-th block of a piece, starting at `number`."""

    number: int
    count: int
    block: int  # elements; the last block of a piece may have fewer

    def length(self, n: int) -> int:
        """Number of the region's elements in a piece of n elements."""
        whole, rest = divmod(n, self.block)
        there = len(range(self.number, whole, self.count)) * self.block
        return there + rest * (whole % self.count == self.number)

    def views(self, piece: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Views of the region in a piece: whole blocks as rows, and its share of the shorter last
        block."""
        whole = len(piece) // self.block
        end = whole * self.block
        rows = piece[:end].reshape(whole, self.block)[self.number :: self.count]
        return rows, piece[end:] if whole % self.count == self.number else piece[:0]

    def place(self, index: Ints) -> Ints:
        """Positions in the piece of the region's elements `index`."""
        block, within = np.divmod(index, self.block)
        return (block * self.count + self.number) * self.block + within


class Region(CodecDefaults):
    """A codec on one region of every piece. Implements Codec."""

    def __init__(self, inner: Codec, blocks: _Blocks) -> None:
        self._inner, self._blocks = inner, blocks
        self.name = f"{inner.name}, region {blocks.number} of {blocks.count}"
        self.digest, self.params = inner.digest, inner.params
        self.align, self.fixed = inner.align, inner.fixed
        self.reencodes, self.states = inner.reencodes, inner.states
        self.repeats = False  # captured programs have no regions
        self._flat = {each.name for each in inner.states if each.per == "element"}

    def payload_bytes(self, n: int) -> int:
        length = self._blocks.length(n)
        return self._inner.payload_bytes(length) if length else 0

    def encode_batch(
        self,
        x: Floats,
        table: Ints,
        out: Bytes,
        at: Ints,
        *,
        state: State | None = None,
        **options: Unpack[EncodeOptions],
    ) -> Ints:
        assert "incoming" not in options  # it does not fuse
        cut, used = _Cut(self._blocks, table), np.zeros(len(table), np.int64)
        if not len(cut.rows):
            return used
        values = cut.take(x, START)
        states = {
            name: cut.take(array, STATE) if name in self._flat else array
            for name, array in (state or {}).items()
        }
        used[cut.rows] = self._inner.encode_batch(
            values, cut.inside, out, at[cut.rows], state=states or None, **options
        )
        for name in self._flat & states.keys():
            cut.put(states[name], (state or {})[name], STATE)
        if options.get("writeback"):
            cut.put(values, x, START)
        return used

    def decode_batch(
        self,
        payload: Bytes,
        table: Ints,
        at: Ints,
        used: Ints,
        out: Floats,
        **options: Unpack[DecodeOptions],
    ) -> None:
        cut = _Cut(self._blocks, table)
        if len(cut.rows):
            values = cut.take(out, START) if options.get("add") else cut.room(out)
            where = at[cut.rows], used[cut.rows]
            self._inner.decode_batch(payload, cut.inside, *where, values, **options)
            cut.put(values, out, START)


class _Cut:
    """The regions of a table's pieces, copied one behind another."""

    def __init__(self, blocks: _Blocks, table: Ints) -> None:
        self._blocks = blocks
        lengths = np.array([blocks.length(n) for n in table[:, 1].tolist()], np.int64)
        self.rows = np.flatnonzero(lengths)  # rows of the table with a non-empty region
        self.inside = table[self.rows]
        self._whole = table[self.rows]
        self.inside[:, 1] = lengths[self.rows]
        self.inside[:, START] = self.inside[:, STATE] = (
            np.cumsum(self.inside[:, 1]) - self.inside[:, 1]
        )
        self.inside[:, 3] += blocks.number * blocks.block

    def room(self, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """An uninitialized array for the regions' elements."""
        return np.empty(int(self.inside[:, 1].sum()), like.dtype)

    def take(self, array: npt.NDArray[Any], column: int) -> npt.NDArray[Any]:
        """Copy of the regions' elements; `column` of the table says where pieces begin."""
        values = self.room(array)
        for piece, mine in self._pairs(array, values, column):
            rows, rest = self._blocks.views(piece)
            mine[: rows.size].reshape(rows.shape)[:] = rows
            mine[rows.size :] = rest
        return values

    def put(self, values: npt.NDArray[Any], array: npt.NDArray[Any], column: int) -> None:
        """Write the regions' elements back."""
        for piece, mine in self._pairs(array, values, column):
            rows, rest = self._blocks.views(piece)
            rows[:] = mine[: rows.size].reshape(rows.shape)
            rest[:] = mine[rows.size :]

    def _pairs(
        self, array: npt.NDArray[Any], values: npt.NDArray[Any], column: int
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        for whole, inside in zip(self._whole.tolist(), self.inside.tolist(), strict=True):
            at, first = whole[column], inside[START]
            yield array[at : at + whole[1]], values[first : first + inside[1]]


class Nonzero(CodecDefaults):
    """Indices and values of the nonzero elements, or all values if that takes no more bytes."""

    name = digest = NONZERO
    fixed = False
    reencodes = True

    def __init__(self, blocks: _Blocks) -> None:
        self._blocks = blocks

    def payload_bytes(self, n: int) -> int:
        """Implements Codec.payload_bytes."""
        return FLOAT_BYTES * self._blocks.length(n)

    def encode_batch(
        self,
        x: Floats,
        table: Ints,
        out: Bytes,
        at: Ints,
        *,
        state: State | None = None,
        **options: Unpack[EncodeOptions],
    ) -> Ints:
        """Implements Codec.encode_batch, for unscaled values without state."""
        assert options.get("scale", 1.0) == 1.0
        assert "incoming" not in options
        used = np.zeros(len(table), np.int64)
        for i, ((start, n, *_), first) in enumerate(zip(table.tolist(), at.tolist(), strict=True)):
            room = out[first : first + self.payload_bytes(n)]
            used[i] = self._put(x[start : start + n], room)
        return used

    def decode_batch(
        self,
        payload: Bytes,
        table: Ints,
        at: Ints,
        used: Ints,
        out: Floats,
        **options: Unpack[DecodeOptions],
    ) -> None:
        """Implements Codec.decode_batch; raises ValueError on a bad payload."""
        for (start, n, *_), first, size in zip(
            table.tolist(), at.tolist(), used.tolist(), strict=True
        ):
            piece = out[start : start + n]
            index, values = _get(payload[first : first + size], self._blocks.length(n))
            where = self._blocks.place(index)
            if options.get("add"):
                piece[where] += values  # indices are unique
            else:
                for view in self._blocks.views(piece):
                    view[:] = 0
                piece[where] = values

    def _put(self, piece: Floats, out: Bytes) -> int:
        """Write the payload of a piece's region to `out`; return its bytes."""
        index = np.flatnonzero(
            np.concatenate([(v != 0).ravel() for v in self._blocks.views(piece)])
        )
        if _PAIR * len(index) >= out.nbytes:
            index = np.arange(out.nbytes // FLOAT_BYTES)
            out.view(np.float32)[:] = piece[self._blocks.place(index)]
            return out.nbytes
        half = FLOAT_BYTES * len(index)
        out[:half].view(np.uint32)[:] = index
        out[half : 2 * half].view(np.float32)[:] = piece[self._blocks.place(index)]
        return 2 * half


def _get(data: Bytes, n: int) -> tuple[Ints, Floats]:
    """Indices in a region of n elements, and their values. Raises ValueError on a bad payload."""
    if len(data) == FLOAT_BYTES * n:
        return np.arange(n), data.view(np.float32)
    if len(data) % _PAIR or len(data) > FLOAT_BYTES * n:
        raise ValueError(f"{len(data)} bytes are no pairs of an index and a value")
    half = len(data) // 2
    index = data[:half].view(np.uint32).astype(np.int64)
    if half and (int(index[-1]) >= n or (np.diff(index) <= 0).any()):
        raise ValueError(f"indices do not ascend below {n}")
    return index, data[half:].view(np.float32)
