"""Bytes and times of a module's steps, besides the executor's counters."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from casync.codec import FLOAT_BYTES
from hipress import compat
from hipress.engine.buckets import BucketPlan


@dataclass
class Traffic:
    """Counters of a module's steps: sums since the engine was made."""

    steps: int = 0  # in this process; Engine.step survives a checkpoint
    gradient_bytes: int = 0  # of all dense buckets
    compressed_bytes: int = 0  # of these, compressed by codecs
    raw_bytes: int = 0  # of dense buckets that went to DDP's own all-reduce
    mixed_bytes: int = 0  # summed natively by executors, as sent
    sparse_bytes: int = 0  # of sparse gradients: indices and values
    exposed_seconds: float = 0.0  # waits after the backward pass

    def count(self, plan: BucketPlan | None, buffer: torch.Tensor) -> None:
        """Count a bucket before it is reduced, which changes the rows of a sparse buffer."""
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

    def __sub__(self, earlier: Traffic) -> Traffic:
        """Sums since an earlier copy."""
        return Traffic(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))
