"""A payload's buffer, as NumPy and as torch see it, and as it travels."""

from __future__ import annotations

import zlib

import numpy as np
import torch

from casync.codec import Bytes, Ints
from casync.errors import PayloadError
from casync.graph.layout import Layout
from casync.memory.squeeze import ABSENT, MARK, PLAIN, expand, extent, promises, squeeze

__all__ = ["Slot"]

CHECKSUM = 8  # bytes


class Slot:
    """A payload's buffer on this rank, with the same memory as a torch tensor.

    See squeeze.py for what travels: the buffer with a mark in front, or a squeezed copy. With
    checksums an int64 comes before that mark: the CRC-32 of all that follows it.
    """

    __slots__ = (
        "_buffer", "_front", "_mark", "_squeezed", "_wire", "array", "contents", "layout",
        "source", "tensor", "travels",
    )  # fmt: skip

    def __init__(
        self, layout: Layout, source: int, travels: bool, *, checksum: bool = False
    ) -> None:
        """`travels`: whether this rank sends it."""
        self.layout = layout
        self._front = CHECKSUM if checksum else 0
        self._buffer: Bytes = np.zeros(self._front + MARK + layout.size, np.uint8)
        self._mark = self._buffer[self._front :][:MARK].view(np.int64)
        self._squeezed: Bytes | None = None  # made when first needed
        self.array = self._buffer[self._front + MARK :]
        self.tensor = torch.from_numpy(self.array)
        self.contents = layout.whole
        self.source = source  # rank it comes from
        self.travels = travels
        self._wire = self._buffer

    @property
    def spared(self) -> int:
        """Bytes of the message that do not travel."""
        return self._front + MARK + self.contents[2] - len(self._wire)

    def clear(self) -> torch.Tensor:
        """The memory, ready to receive into."""
        self._mark[0] = ABSENT  # so that a message that is not there shows
        self.layout.clear(self.array)
        return torch.from_numpy(self._buffer)

    def fill(self, used: Ints) -> None:
        """Just encoded."""
        self.contents = self.layout.pack(self.array, used)
        if self.travels:
            self._pack()

    def arrived(self, received: int) -> None:
        """Just received, in `received` bytes (-1: unknown); raises PayloadError."""
        mark = int(self._mark[0])
        if received >= 0:
            received = max(received - self._front, 0)
        if mark == ABSENT or 0 <= received < MARK:
            raise PayloadError("the message is empty")
        if mark != PLAIN:
            received = self._unpack(received)
        elif received >= 0:
            received -= MARK
        self.contents = self.layout.unpack(self.array, received)
        if mark == PLAIN:
            self._wire = self._buffer[: self._front + MARK + self.contents[2]]
            self._check(self._wire)

    def message(self) -> torch.Tensor:
        """The bytes that travel."""
        return torch.from_numpy(self._wire)

    def _pack(self) -> None:
        message, front = self.array[: self.contents[2]], self._front
        size = squeeze(message, self._copy()[front:]) if promises(message) else 0
        self._mark[0] = PLAIN
        whole = self._buffer[: front + MARK + len(message)]
        self._wire = self._copy()[: front + size] if size else whole
        if front:
            _stored(self._wire)[0] = _checksum(self._wire)

    def _unpack(self, received: int) -> int:
        """Put the squeezed message that lies in the buffer into place; its length."""
        size = extent(self._buffer[self._front :], self.layout.size)
        if received not in (-1, size):
            raise PayloadError(f"message of {received} bytes, expected {size}")
        self._wire = self._copy()[: self._front + size]
        self._wire[:] = self._buffer[: self._front + size]
        self._check(self._wire)
        return expand(self._wire[self._front :], self.array)

    def _check(self, wire: Bytes) -> None:
        if self._front and _stored(wire)[0] != _checksum(wire):
            raise PayloadError("the message was damaged on its way: its checksum differs")

    def _copy(self) -> Bytes:
        if self._squeezed is None:
            self._squeezed = np.zeros_like(self._buffer)
        return self._squeezed


def _stored(wire: Bytes) -> Ints:
    return wire[:CHECKSUM].view(np.int64)


def _checksum(wire: Bytes) -> int:
    return zlib.crc32(wire[CHECKSUM:].data)
