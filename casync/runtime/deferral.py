"""Error feedback of pieces that no rank used in a step.

[Note: deferred feedback] A caller may drop averages of tensors that no rank used in a step (DDP
does, with find_unused_parameters), and the residuals that were sent would be lost with them. So, if
asked for, the residuals of a piece wait while the input of its encode is zero: a worker's while its
gradient is zero, those of an aggregator or a ring's hop while the sum that has arrived is. If no
rank used the tensor, all ranks keep them. If one did, ranks with nonzero input apply theirs, and
the others' come later: none waits for ever, since an encode of zeros adds nothing to those that
wait. On a device, flags in its memory mark zeros, so that no host waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from casync.codec import Ints, State
from casync.memory import Memory

__all__ = ["Deferral", "Deferred", "DeviceDeferral", "as_torch", "restore"]

Deferred = list[tuple[Any, Any]]  # parts of states, and their deferred values
_FIRST = 64  # elements: most used pieces have a nonzero value among them


class Deferral:
    """Defers the named states for pieces of a task's input, as given by its table."""

    def __init__(self, names: Sequence[str], table: Ints) -> None:
        self._names, self._rows = names, table.tolist()

    def idle(self, x: Any) -> list[tuple[int, int]]:
        """States of the pieces of x that are zero as a whole: start, length."""
        states = []
        for start, length, _, _, first in self._rows:
            piece = x[start : start + length]
            if not piece[:_FIRST].any() and not piece.any():
                states.append((first, length))
        return states

    def defer(self, x: Any, state: State) -> Deferred:
        """Zero these states for idle pieces; return the deferred values for `restore`."""
        deferred: Deferred = []
        for first, length in self.idle(x):
            states = (state[name][first : first + length] for name in self._names)
            deferred += [(each, each.copy()) for each in states if each.any()]
        for each, _ in deferred:
            each[:] = 0
        return deferred


class DeviceDeferral(Deferral):
    """Deferral on a device: in a stream, without looking at values on the host."""

    def __init__(
        self, names: Sequence[str], table: Ints, memory: Memory, scratch: torch.Tensor
    ) -> None:
        """scratch: float32, as large as the states of all pieces."""
        super().__init__(names, table)
        flags = memory.zeros(2 * len(table), torch.bool)
        self._flags = [(one[:1], one[1:]) for one in flags.view(-1, 2)]
        self._scratch = scratch

    def defer(self, x: Any, state: State) -> Deferred:
        """Implements Deferral.defer. For pieces in use, `restore` adds -0.0: no number changes."""
        deferred, at = Deferred(), 0
        for (start, length, _, _, first), (used, unused) in zip(
            self._rows, self._flags, strict=True
        ):
            torch.any(x[start : start + length], 0, keepdim=True, out=used)
            torch.logical_not(used, out=unused)
            for name in self._names:
                piece = as_torch(state[name][first : first + length])
                waiting = self._scratch[at : at + length].view(piece.dtype)[:length]
                waiting.copy_(piece).masked_fill_(used, -0.0)
                piece.masked_fill_(unused, 0.0)
                deferred.append((piece, waiting))
                at += length
        return deferred


def restore(deferred: Deferred) -> None:
    """Add the deferred values back."""
    for piece, before in deferred:
        as_torch(piece).add_(as_torch(before))


def as_torch(array: npt.NDArray[Any] | torch.Tensor) -> torch.Tensor:
    """A view as a tensor; uint16 holds the bits of bfloat16, which NumPy lacks."""
    if isinstance(array, torch.Tensor):
        return array.view(torch.bfloat16) if array.dtype == torch.uint16 else array
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
