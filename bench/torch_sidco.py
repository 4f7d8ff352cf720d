"""SIDCo's first stage in plain torch, after the authors' code: thresholds of fitted curves.

At most four times the wanted share is sent, as the specs have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from bench.torch_common import Encode, Method, Payload, fed, scattered, sent

RATIO = 0.01


def _exponential(size: Tensor) -> Tensor:
    return -math.log(RATIO) * size.mean()


def _pareto(size: Tensor) -> Tensor:
    """Of a generalized Pareto distribution of this mean and variance."""
    mean = size.mean()
    share = mean * mean / size.var(unbiased=False)
    k, scale = (share - 1) / 2, mean * (share + 1) / 2
    return scale * (1 - RATIO**k) / k


def _gamma(size: Tensor) -> Tensor:
    """Of a gamma distribution by its mean and the mean of logarithms."""
    mean = size.mean()
    s = mean.log() - (size + 1e-16).log().mean()
    shape = (3 - s + ((s - 3) ** 2 + 24 * s).sqrt()) / (12 * s)
    return mean / shape * _exceeded(shape.double())


def _exceeded(shape: Tensor) -> Tensor:
    """What a gamma variable (scale 1) exceeds with probability RATIO, by Newton's method."""
    x = -(math.log(RATIO) + torch.lgamma(shape)).clamp(max=-0.1)
    for _ in range(8):
        density = ((shape - 1) * x.log() - x - torch.lgamma(shape)).exp()
        x = x + (torch.special.gammaincc(shape, x) - RATIO) / density
    return x.float()


def _encode(threshold: Callable[[Tensor], Tensor]) -> Encode:
    def encode(x: Tensor, residual: Tensor | None) -> Payload:
        p = fed(x, residual)
        size = p.abs()
        most = ceil(4 * p.numel() * RATIO) + 8
        return sent(p, (size >= threshold(size)).nonzero().view(-1)[:most], residual)

    return encode


SIDCO = {
    "sidco_e": Method(_encode(_exponential), scattered),
    "sidco_p": Method(_encode(_pareto), scattered),
    "sidco_gp": Method(_encode(_gamma), scattered),
}
