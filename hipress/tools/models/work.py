"""Amount of work, independent of a device's speed: operations, bytes, kernels.

A roofline: a matrix product or a convolution takes the time of its operations or of its bytes,
whichever is longer; all else takes the time of its bytes; and a kernel at least its launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

__all__ = ["NOTHING", "Speed", "Work"]


@dataclass(frozen=True)
class Work:
    """Sums over kernels. Bytes as for float32."""

    flops: float = 0.0  # of products and convolutions
    product_bytes: float = 0.0  # read and written by products and convolutions
    other_bytes: float = 0.0  # read and written by all other kernels
    kernels: float = 0.0

    def __add__(self, other: Work) -> Work:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Work(*(mine + theirs for mine, theirs in pairs))

    def times(self, factor: float) -> Work:
        """The work `factor` times."""
        return Work(*(factor * each for each in astuple(self)))

    @staticmethod
    def total(works: Iterable[Work]) -> Work:
        """The sum of all works."""
        whole = Work()
        for each in works:
            whole += each
        return whole


NOTHING = Work()


@dataclass(frozen=True)
class Speed:
    """Speeds that a device reaches in training."""

    flops: float  # per second, of products and convolutions
    bandwidth: float  # bytes a second of the memory
    launch: float = 5e-6  # least seconds of a kernel
    width: float = 1.0  # bytes of a number over those of a float32: 0.5 for bfloat16

    def seconds(self, work: Work) -> float:
        """Seconds for this work."""
        product = max(work.flops / self.flops, self.width * work.product_bytes / self.bandwidth)
        other = self.width * work.other_bytes / self.bandwidth
        return product + other + self.launch * work.kernels
