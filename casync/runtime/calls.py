"""A codec call: its payloads, and their pieces of the bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from casync.codec import DeviceCodec, Ints
from casync.runtime.payloads import Payloads

__all__ = ["Call"]


class Call:
    """A codec call, made once: values that are the same in every step are prepared here."""

    def __init__(
        self,
        payloads: Payloads,
        turns: Sequence[Sequence[int]],
        tables: Sequence[Ints],
        codec: DeviceCodec | None,
        *,
        repeats: bool = True,
    ) -> None:
        """turns: numbers of payloads, one for each table, whose rows are their pieces; later turns
        are added to the first. codec: that of a device; None on the host. repeats: True if the
        table gets a row for each turn of a piece, one after the other; otherwise the call gets
        places of shape [k, m].
        """
        numbers = [number for turn in turns for number in turn]
        self._slots = [payloads.by_payload[number] for number in numbers]
        self._bases = [payloads.base[number] for number in numbers]
        self.array: Any = payloads.arena
        if len(numbers) == 1:
            self.array, self._bases = self._slots[0].array, [0]
        if codec is not None:
            self.array = codec.view(self.array)
        self._hold: Callable[[Ints], Ints] = _same if codec is None else codec.hold
        self._turns, rows = len(turns), np.concatenate(tables)
        self._repeats = repeats and len(turns) > 1
        self.table = self._hold(np.repeat(rows, len(turns), axis=0) if self._repeats else rows)
        self._ends = np.cumsum([len(table) for table in tables]).tolist()
        self._last: dict[str, tuple[list[Ints], Ints]] = {}  # results of _cached
        fixed = all(slot.layout.fixed for slot in self._slots)
        self._known = (self._at(), self._used()) if fixed else None

    def places(self) -> tuple[Ints, dict[str, Ints]]:
        """Slot.places for all pieces."""
        if self._known is not None:
            return self._known[0], {}
        pairs = [slot.places() for slot in self._slots]
        at = self._cached("places", [at for at, _ in pairs], self._in_arena)
        return at, {
            name: self._cached(name, [more[name] for _, more in pairs], _concatenate)
            for name in pairs[0][1]
        }

    def fill(self, used: Any) -> None:
        """Take the used bytes of a new encode of all payloads."""
        begin = 0
        for slot, end in zip(self._slots, self._ends, strict=True):
            slot.fill(used[begin:end])
            begin = end

    def contents(self) -> tuple[Ints, Any]:
        """First byte of each piece's payload, and its used bytes."""
        return self._known or (self._at(), self._used())

    def _at(self) -> Ints:
        return self._cached("at", [slot.contents[0] for slot in self._slots], self._in_arena)

    def _cached(self, name: str, arrays: list[Ints], join: Callable[[list[Ints]], Ints]) -> Ints:
        """`join(arrays)`, cached until the arrays change: rooms seldom do."""
        known = self._last.get(name)
        if known is None or any(a is not b for a, b in zip(known[0], arrays, strict=True)):
            known = self._last[name] = arrays, self._hold(join(arrays))
        return known[1]

    def _used(self) -> Any:
        if len(self._slots) == 1:
            return self._slots[0].contents[1]
        every: list[Any] = [slot.contents[1] for slot in self._slots]
        if isinstance(every[0], torch.Tensor):
            return torch.cat(every)
        used = self._interleave(np.concatenate(every))
        return self._hold(used) if all(slot.layout.fixed for slot in self._slots) else used

    def _in_arena(self, every: Sequence[Ints]) -> Ints:
        """Places relative to the arena."""
        if len(every) == 1:
            return every[0]
        pairs = zip(every, self._bases, strict=True)
        return self._interleave(np.concatenate([at + base for at, base in pairs]))

    def _interleave(self, numbers: Ints) -> Ints:
        """Numbers of all turns: a row per turn, or a piece's turns one after the other."""
        if self._turns == 1:
            return numbers
        rows = numbers.reshape(self._turns, -1)
        return rows.T.ravel() if self._repeats else rows


def _same(numbers: Ints) -> Ints:
    return numbers


def _concatenate(every: Sequence[Ints]) -> Ints:
    return every[0] if len(every) == 1 else np.concatenate(every)
