"""A payload's buffer, as NumPy and as torch see it."""

from __future__ import annotations

import torch

from casync.codec import Bytes, Ints
from casync.messages import Layout

__all__ = ["Slot"]


class Slot:
    """A payload's buffer on this rank, with the same memory as a torch tensor."""

    __slots__ = ("array", "contents", "layout", "source", "tensor")

    def __init__(self, layout: Layout, source: int) -> None:
        self.layout = layout
        self.array: Bytes = layout.buffer()
        self.tensor = torch.from_numpy(self.array)
        self.contents = layout.whole
        self.source = source  # rank it comes from

    def clear(self) -> torch.Tensor:
        """The memory, ready to receive into."""
        self.layout.clear(self.array)
        return self.tensor

    def fill(self, used: Ints) -> None:
        """Just encoded."""
        self.contents = self.layout.pack(self.array, used)

    def arrived(self, received: int) -> int:
        """Just received; returns the message's length, raises PayloadError."""
        self.contents = self.layout.unpack(self.array, received)
        return self.contents[2]

    def message(self) -> torch.Tensor:
        """The bytes that travel."""
        return self.tensor[: self.contents[2]]
