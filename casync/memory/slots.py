"""Buffers of payloads, as NumPy arrays, as torch tensors, and as messages.

[Note: three kinds of slots] `Slot`: in host memory, for transports with tags: a message has only
the bytes that it needs. `Buffer`: in any memory, for transports without tags: the message is the
whole buffer, since both sides must know its length and no host reads it. `StagedSlot`: a Buffer on
a device with a Slot in host memory through which it travels; receivers cannot tell it from a Slot.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from casync.codec import Bytes, Ints
from casync.errors import PayloadError
from casync.graph.layout import Layout
from casync.memory import Memory
from casync.memory.capacity import Room
from casync.memory.identity import IDENTITY, NOTHING
from casync.memory.repeat_elision import MARK, PLAIN, expand, extent, promises, squeeze

__all__ = ["Buffer", "Slot", "StagedSlot"]

CHECKSUM = 8  # bytes


class Slot:
    """A payload's buffer on this rank, as a NumPy array and a torch tensor of the same memory.

    The message is the buffer with an identity and a mark in front, or a squeezed copy: see
    repeat_elision.py. With checksums an int64 precedes the mark: the CRC-32 of all that follows it.
    """

    exact = False  # see Buffer

    def __init__(
        self,
        layout: Layout,
        source: int,
        travels: bool,
        memory: Memory,
        *,
        checksum: bool = False,
        room: torch.Tensor | None = None,
    ) -> None:
        """travels: True if this rank sends the payload. room: zeroed memory for `front` and the
        layout's size; by default new memory."""
        self.layout = layout
        self._checks = checksum
        self._front = IDENTITY + (CHECKSUM if checksum else 0)
        self._whole = memory.staging(self.front(checksum) + layout.size) if room is None else room
        self._buffer: Bytes = self._whole.numpy()
        self._identity = _stored(self._buffer)
        self._mark = self._buffer[self._front :][:MARK].view(np.int64)
        self._squeezed: Bytes | None = None  # made when first needed
        self.array = self._buffer[self._front + MARK :]
        self.tensor = self._whole[self._front + MARK :]
        self.contents = layout.whole
        self.size = layout.size  # bytes of the payload
        self.spared = 0  # bytes of the message that do not travel
        self.source = source  # the rank that encodes it
        self.travels = travels
        self._wire = self._buffer

    @staticmethod
    def front(checksum: bool) -> int:
        """Bytes before the payload."""
        return IDENTITY + MARK + (CHECKSUM if checksum else 0)

    def clear(self) -> torch.Tensor:
        """The memory, ready to receive into."""
        self._identity[0] = NOTHING  # detects a missing message
        if not self.layout.fixed:
            self.layout.clear(self.array)
        return self._whole

    def fill(self, used: Ints) -> None:
        """Take the used bytes of a new encode, int64 [m]; pack the message if it travels."""
        self.contents = *_, self.size = self.layout.pack(self.array, used)
        if not self.travels:
            return
        message, plain = self.array[: self.size], self._front + MARK + self.size
        size = squeeze(message, self._copy()[self._front :]) if promises(message) else 0
        self._mark[0] = PLAIN
        self._wire = self._copy()[: self._front + size] if size else self._buffer[:plain]
        self.spared = plain - len(self._wire)
        if self._checks:
            _stored(self._wire[IDENTITY:])[0] = _checksum(self._wire[IDENTITY:])

    def take_message(self, received: int | None) -> None:
        """Take a received message of `received` bytes (None: unknown); raises PayloadError."""
        mark = int(self._mark[0])
        if received is not None:
            received -= self._front
            if received < MARK:
                raise PayloadError("the message is empty")
        if mark != PLAIN:
            received = self._unpack(received)
        elif received is not None:
            received -= MARK
        self.contents = *_, self.size = self.layout.unpack(self.array, received)
        plain = self._front + MARK + self.size
        if mark == PLAIN:
            self._wire = self._buffer[:plain]
            if self._checks:
                self._check(self._wire)
        self.spared = plain - len(self._wire)

    @property
    def identity(self) -> int:
        """The number in front of a received message: see [Note: identity] in identity.py."""
        return int(self._identity[0])

    def message(self, identity: int) -> torch.Tensor:
        """The bytes that travel, with this number in front."""
        self._identity[0] = identity
        if self._squeezed is not None:
            _stored(self._squeezed)[0] = identity
        return torch.from_numpy(self._wire)

    def places(self) -> tuple[Ints, dict[str, Ints]]:
        """First byte of each piece for an encode, int64 [m], and its further keyword arguments."""
        return self.layout.at, {}

    def numbers(self) -> torch.Tensor:
        """The bytes that a native all-reduce combines."""
        return self.tensor

    def _unpack(self, received: int | None) -> int:
        """Expand the squeezed message in the buffer; return its length."""
        size = extent(self._buffer[self._front :], self.layout.size)
        if received is not None and received != size:
            sizes = received + self._front, size + self._front
            raise PayloadError(f"message of {sizes[0]} bytes, expected {sizes[1]}")
        self._wire = self._copy()[: self._front + size]
        self._wire[:] = self._buffer[: self._front + size]
        if self._checks:
            self._check(self._wire)
        return expand(self._wire[self._front :], self.array)

    def _check(self, wire: Bytes) -> None:
        wire = wire[IDENTITY:]
        if _stored(wire)[0] != _checksum(wire):
            raise PayloadError("the message was damaged on its way: its checksum differs")

    def _copy(self) -> Bytes:
        if self._squeezed is None:
            self._squeezed = np.zeros_like(self._buffer)
        return self._squeezed


class Buffer:
    """A payload's buffer with each piece at a fixed place, and lengths that vary in front.

    The lengths are in the same memory, for no host to read. If the codec cuts payloads, capacities
    follow their lengths: see [Note: lengths that vary] in capacity.py. `exact`: True if only the
    lengths travel first, and then `pieces`.
    """

    def __init__(
        self,
        layout: Layout,
        source: int,
        memory: Memory,
        *,
        cuts: bool = False,
        waits: bool = False,
        room: torch.Tensor | None = None,
    ) -> None:
        """cuts: True if the codec cuts payloads. waits: True if the host may wait for lengths.
        room: zeroed memory of the layout's size; by default new memory."""
        self.layout, self.source, self._cuts = layout, source, cuts
        self.exact, self._waits = False, waits and not cuts
        self.tensor = memory.zeros(layout.size, torch.uint8) if room is None else room
        self.array = memory.array(self.tensor)
        self._memory = memory
        self._lengths = self.tensor[: layout.header].view(torch.int64)
        self._used = layout.bound if layout.fixed else memory.array(self._lengths)
        self._last: torch.Tensor | None = None  # lengths of the last run, in host memory
        self.spared = 0
        self._use(Room(layout.at, layout.bound, layout.size))

    def fill(self, used: Any) -> None:
        """Take the used bytes of a new encode, int64 [m]."""
        if not self.layout.fixed:
            self._lengths.copy_(self._memory.tensor(used))

    def places(self) -> tuple[Ints, dict[str, Ints]]:
        """Implements Slot.places."""
        return self._room.at, {"capacity": self._room.capacity} if self._cuts else {}

    def numbers(self) -> torch.Tensor:
        """Implements Slot.numbers."""
        return self.tensor[: self.layout.header if self.exact else self._room.size]

    def pieces(self) -> list[torch.Tensor]:
        """Used bytes of each piece, by the lengths that `remember` copied; raises PayloadError."""
        used = self._lengths_there()
        self.layout.check(used)
        self.size = self.layout.header + int(used.sum())
        ends = zip(self.layout.at.tolist(), used.tolist(), strict=True)
        return [self.tensor[first : first + length] for first, length in ends]

    def remember(self) -> None:
        """Copy the lengths to the host, in a stream, after a run."""
        if self._last is None:
            self._last = self._memory.staging(self.layout.header)
        self._memory.copy(self._last, self.tensor[: self.layout.header])

    def adapt(self) -> int:
        """Set capacities for the next run, once the copy of `remember` is done; return the unused
        bytes of the last run's message."""
        if self._last is None:
            return 0
        used, before = self._lengths_there(), self._room.capacity
        unused = 0 if self.exact else int((before - used).sum())
        if self._cuts:
            self._use(self._room.next(self.layout, used))
        self.exact = self.exact or (self._waits and bool(2 * used.sum() < before.sum()))
        return unused

    def _lengths_there(self) -> Ints:
        assert self._last is not None
        return self._last.numpy().view(np.int64).copy()

    def _use(self, room: Room) -> None:
        self._room, self.size = room, room.size
        self.contents: tuple[Ints, Any, int] = (room.at, self._used, room.size)


class StagedSlot(Buffer):
    """A Buffer on a device that travels as a Slot.

    `leave` and `enter` are for streams. The other members of Slot are for the threads that send and
    receive, and wait for the device.
    """

    def __init__(
        self, layout: Layout, source: int, travels: bool, leaves: bool, memory: Memory,
        *, checksum: bool = False, room: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """leaves: True if this rank sends the payload or has it all-reduced. room: see Buffer."""
        super().__init__(layout, source, memory, room=room)
        self.leaves = leaves
        self._host = Slot(layout, source, travels, memory, checksum=checksum)
        # With varying lengths, pieces are contiguous in messages, but have gaps on the device.
        self._landing = self._host.tensor if layout.fixed else memory.staging(layout.size)
        self.on_host, self.on_device = memory.event(), memory.event()
        self._packed = True

    def leave(self) -> None:
        """Copy to the host, in a stream; the caller records `on_host` after it."""
        self._packed = False
        self._memory.copy(self._landing, self.tensor)

    def enter(self) -> None:
        """Copy from the host, in a stream; the caller records `on_device` after it."""
        self._memory.copy(self.tensor, self._landing)

    def clear(self) -> torch.Tensor:
        """Implements Slot.clear."""
        self.on_device.wait()  # of the last run
        return self._host.clear()

    @property
    def identity(self) -> int:
        """Implements Slot.identity."""
        return self._host.identity

    def message(self, identity: int) -> torch.Tensor:
        """Implements Slot.message."""
        self.on_host.wait()
        if not self._packed:
            used = self.layout.bound
            if not self.layout.fixed:
                self._host.array[:] = self._landing.numpy()
                used = self._landing.numpy()[: self.layout.header].view(np.int64).copy()
            self._host.fill(used)
            self._packed = True
        self._measure()
        return self._host.message(identity)

    def numbers(self) -> torch.Tensor:
        """Implements Slot.numbers."""
        self.on_host.wait()
        return self._host.tensor

    def take_message(self, received: int | None) -> None:
        """Implements Slot.take_message."""
        self._host.take_message(received)
        self._measure()
        if not self.layout.fixed:
            self.layout.spread(self._host.array, self._host.contents, self._landing.numpy())

    def _measure(self) -> None:
        self.size, self.spared = self._host.size, self._host.spared


def _stored(wire: Bytes) -> Ints:
    """The int64 at the beginning."""
    return wire[:8].view(np.int64)


def _checksum(wire: Bytes) -> int:
    return zlib.crc32(wire[CHECKSUM:].data)
