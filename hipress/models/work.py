"""How much a device has to do, apart from how fast it is: operations, bytes, kernels.

A roofline: a product of matrices, or a convolution, takes as long as its operations or its bytes,
whichever takes longer; everything else as long as its bytes; and a kernel at least its launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

__all__ = ["NOTHING", "Speed", "Work"]


@dataclass(frozen=True)
class Work:
    """Sums over kernels. Bytes are those of float32."""

    flops: float = 0.0  # of products and convolutions
    product_bytes: float = 0.0  # that these read and write
    other_bytes: float = 0.0  # that all others do
    kernels: float = 0.0

    def __add__(self, other: Work) -> Work:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Work(*(mine + theirs for mine, theirs in pairs))

    def times(self, factor: float) -> Work:
        """Each so many times."""
        return Work(*(factor * each for each in astuple(self)))

    @staticmethod
    def total(works: Iterable[Work]) -> Work:
        """The sum."""
        found = Work()
        for each in works:
            found += each
        return found


NOTHING = Work()


@dataclass(frozen=True)
class Speed:
    """What a device reaches in training."""

    flops: float  # a second, of products and convolutions
    bandwidth: float  # bytes a second of its memory
    launch: float = 5e-6  # seconds that a kernel takes at least
    width: float = 1.0  # bytes of a number over those of a float32: 0.5 for bfloat16

    def seconds(self, work: Work) -> float:
        """How long it takes for this work."""
        product = max(work.flops / self.flops, self.width * work.product_bytes / self.bandwidth)
        other = self.width * work.other_bytes / self.bandwidth
        return product + other + self.launch * work.kernels
