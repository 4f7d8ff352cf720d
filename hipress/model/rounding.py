"""Arithmetic of torch with the same bits on every processor, for values that ranks must share.

torch's kernels round `a + f * b` once or twice, and add the elements of a tensor in an order of
their own, by the processor's instructions and the number of threads. Single operations are always
rounded alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK_BITS = 20  # elements that are added at once, as a power of two


def add_product(target: Tensor, values: Tensor, factor: float) -> None:
    """Add factor * values to target, each product rounded by itself; in float32 at least."""
    target.add_((values.float() if values.dtype.itemsize < 4 else values) * factor)


def total(values: Tensor) -> float:
    """The sum of a tensor of numbers from zero on, within 2^-42 of its largest element for each
    element: in whole numbers, whose sum has no order."""
    top = float(values.max()) if values.numel() else 0.0
    if not 0.0 < top < math.inf:
        return top
    factor = 2.0 ** (62 - CHUNK_BITS - math.frexp(top)[1])
    chunks = torch.split(values.reshape(-1), 1 << CHUNK_BITS)
    wholes = ((chunk.double() * factor).round().to(torch.int64).sum() for chunk in chunks)
    return sum(int(whole) for whole in wholes) / factor
