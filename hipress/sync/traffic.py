"""What a module's steps took, besides what the executor counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from casync.codec import FLOAT_BYTES
from hipress import compat
from hipress.sync.buckets import BucketPlan


@dataclass
class Traffic:
    """Sums since the engine was made."""

    steps: int = 0  # in this process; Engine.step survives a checkpoint
    gradient_bytes: int = 0  # of all dense buckets
    compressed_bytes: int = 0  # of these, what codecs took
    raw_bytes: int = 0  # of dense buckets that went to DDP's own all-reduce
    mixed_bytes: int = 0  # what else executors sum natively, as it travels
    sparse_bytes: int = 0  # of sparse gradients: indices and values
    exposed_seconds: float = 0.0  # the backward pass was over and waited

    def count(self, plan: BucketPlan | None, buffer: torch.Tensor) -> None:
        """A bucket, before it is reduced: an all-reduce gives a sparse buffer other rows."""
        if buffer.is_sparse:
            self.sparse_bytes += compat.sparse_bytes(buffer)
            return
        self.gradient_bytes += buffer.nbytes
        if plan is None:
            self.raw_bytes += buffer.nbytes
        else:
            self.compressed_bytes += plan.compressed * buffer.element_size()
            size = FLOAT_BYTES if plan.units else buffer.element_size()
            self.mixed_bytes += (buffer.numel() - plan.compressed) * size
