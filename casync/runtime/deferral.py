"""What error feedback keeps of pieces that nobody used.

[Note: deferred feedback] A caller may drop averages of tensors that no rank used in a step (DDP
does, with find_unused_parameters), and what was sent of residuals would go with them. So the
residuals of a piece wait, where asked for, while the input of its encode is zero: a worker's while
its gradient is, those of an aggregator and of a ring's hop while the sum of what has arrived is. If
no rank used the tensor, all keep them. If one did, those that it passes apply theirs, and the
others' come late: none waits for ever, since an encode of zeros adds nothing to what waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from casync.codec import Floats, Ints, State

__all__ = ["Deferred", "as_torch", "defer", "restore", "zero_pieces"]

Deferred = list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]
_FIRST = 64  # elements: most pieces that are used have a value among them


def zero_pieces(x: Floats, table: Ints) -> list[tuple[int, int]]:
    """Where in the state arrays the pieces of x are that are zero as a whole: start, length."""
    found = []
    for start, length, _, _, state in table.tolist():
        piece = x[start : start + length]
        if not piece[:_FIRST].any() and not piece.any():
            found.append((state, length))
    return found


def defer(state: State, names: Sequence[str], pieces: Sequence[tuple[int, int]]) -> Deferred:
    """Have zeros in these flat arrays at these pieces; what was there, for `restore`."""
    deferred: Deferred = []
    for name in names:
        for start, length in pieces:
            piece = state[name][start : start + length]
            if piece.any():
                deferred.append((piece, piece.copy()))
                piece[:] = 0
    return deferred


def restore(deferred: Deferred) -> None:
    """Add what was deferred."""
    for piece, before in deferred:
        as_torch(piece).add_(as_torch(before))


def as_torch(array: npt.NDArray[Any] | torch.Tensor) -> torch.Tensor:
    """A view as a tensor; uint16 holds the bits of bfloat16, which NumPy lacks."""
    if isinstance(array, torch.Tensor):
        return array.view(torch.bfloat16) if array.dtype == torch.uint16 else array
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
