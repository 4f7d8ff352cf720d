"""Averages of differences: see [Note: differences].

[Note: differences] With `feedback: difference` (EF21, DIANA) a rank sends the compressed
difference of its gradient from a reference, which takes up a share of what was sent. All ranks hold
the mean of all references, and add it to the mean of the decoded differences. It takes up the same
share of that, and so stays the mean of references, up to rounding in float32. This needs every rank
to decode every payload. If a gradient is not finite, its rank's reference stays and others move,
and no rank can tell their mean: then mean and references become zero, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from casync.runtime.deferral import as_torch
from hipress.model.rounding import add_product
from hipress.plan.codecs import MEAN, REFERENCE

__all__ = ["Differences"]

State = Mapping[str, Any]  # arrays of a codec's side, by name


@dataclass(frozen=True)
class Differences:
    """Elements of a bucket whose payloads are of differences."""

    codec: str
    share: float  # of a decoded difference, taken up by references
    start: int  # first element in the bucket
    length: int
    state: int  # first element in the states

    def add_mean(self, bucket: torch.Tensor, state: State) -> None:
        """Add the mean of references to the mean of differences, in place; then update the mean."""
        piece = bucket[self.start : self.start + self.length]
        own = slice(self.state, self.state + self.length)
        mean, reference = (as_torch(state[name][own]) for name in (MEAN, REFERENCE))
        total = mean + piece
        if self.share == 1:
            mean.copy_(total)
        else:
            add_product(mean, piece, self.share)
        piece.copy_(total)
        wrong = torch.linalg.vector_norm(total, torch.inf).isfinite().logical_not()
        if wrong.is_cuda or wrong:  # the host of a device does not wait
            mean.masked_fill_(wrong, 0)
            reference.masked_fill_(wrong, 0)
