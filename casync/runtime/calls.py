"""A codec call: its payloads, and their pieces of the bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from casync.codec import Ints
from casync.runtime.payloads import Payloads

__all__ = ["Call"]


class Call:
    """A codec call, made once: values that are the same in every step are prepared here."""

    def __init__(
        self,
        payloads: Payloads,
        turns: Sequence[Sequence[int]],
        tables: Sequence[Ints],
        hold: Callable[[Ints], Ints],
        *,
        repeats: bool = True,
    ) -> None:
        """turns: numbers of payloads, one for each table, whose rows are their pieces; later turns
        are added to the first. hold: DeviceCodec.hold. repeats: True if the table gets a row for
        each turn of a piece, one after the other; otherwise the call gets places of shape [k, m].
        """
        numbers = [number for turn in turns for number in turn]
        self._slots = [payloads.by_payload[number] for number in numbers]
        self._bases = [payloads.base[number] for number in numbers]
        self.array: Any = payloads.arena
        if len(numbers) == 1:
            self.array, self._bases = self._slots[0].array, [0]
        self._hold, self._turns, rows = hold, len(turns), np.concatenate(tables)
        self._repeats = repeats and len(turns) > 1
        self.table = hold(np.repeat(rows, len(turns), axis=0) if self._repeats else rows)
        self._ends = np.cumsum([len(table) for table in tables]).tolist()
        fixed = all(slot.layout.fixed for slot in self._slots)
        self._known = (self._at(), self._used()) if fixed else None

    def places(self) -> tuple[Ints, dict[str, Ints]]:
        """Slot.places for all pieces."""
        if self._known is not None:
            return self._known[0], {}
        if len(self._slots) == 1:
            return self._slots[0].places()
        found = [slot.places() for slot in self._slots]
        at = self._based([at for at, _ in found])
        names = found[0][1].keys()
        return at, {name: np.concatenate([more[name] for _, more in found]) for name in names}

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
        if len(self._slots) == 1:
            return self._slots[0].contents[0]
        at = self._based([slot.contents[0] for slot in self._slots])
        return self._hold(at) if all(slot.layout.fixed for slot in self._slots) else at

    def _used(self) -> Any:
        if len(self._slots) == 1:
            return self._slots[0].contents[1]
        every: list[Any] = [slot.contents[1] for slot in self._slots]
        if isinstance(every[0], torch.Tensor):
            return torch.cat(every)
        used = self._shaped(np.concatenate(every))
        return self._hold(used) if all(slot.layout.fixed for slot in self._slots) else used

    def _based(self, every: Sequence[Ints]) -> Ints:
        """Places relative to the arena."""
        pairs = zip(every, self._bases, strict=True)
        return self._shaped(np.concatenate([at + base for at, base in pairs]))

    def _shaped(self, numbers: Ints) -> Ints:
        """Numbers of all turns: a row per turn, or a piece's turns one after the other."""
        if self._turns == 1:
            return numbers
        rows = numbers.reshape(self._turns, -1)
        return rows.T.ravel() if self._repeats else rows
