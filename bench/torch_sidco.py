"""SIDCo in plain torch, after the authors' code: thresholds of curves fitted in stages.

As in the specs' defaults, each threshold corrects a part of the last call's error, and at most four
times the wanted share is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor

from bench.torch_common import Encode, Method, Payload, fed, scattered, sent

RATIO = 0.01
#: share that the first of several stages keeps, and share of an error that is corrected
FIRST, CORRECT = 0.25, 0.3
#: returns the threshold above which a share of the magnitudes lies
Fit = Callable[[Tensor, float], Tensor]


def _exponential(size: Tensor, share: float) -> Tensor:
    return -math.log(share) * size.mean()


def _pareto(size: Tensor, share: float) -> Tensor:
    """The parameters of a generalized Pareto distribution with this mean and variance."""
    mean = size.mean()
    ratio = mean * mean / size.var(unbiased=False)
    k, scale = (ratio - 1) / 2, mean * (ratio + 1) / 2
    return scale * (1 - share**k) / k


def _gamma(size: Tensor, share: float) -> Tensor:
    """The shape of a gamma distribution with this mean and mean of logarithms."""
    mean = size.mean()
    s = mean.log() - (size + 1e-16).log().mean()
    shape = (3 - s + ((s - 3) ** 2 + 24 * s).sqrt()) / (12 * s)
    return mean / shape * _exceeded(shape.double(), share)


def _exceeded(shape: Tensor, share: float) -> Tensor:
    """The value that a gamma variable exceeds with this probability, by Newton's method."""
    x = -(math.log(share) + torch.lgamma(shape)).clamp(max=-0.1)
    for _ in range(8):
        density = ((shape - 1) * x.log() - x - torch.lgamma(shape)).exp()
        x = x + (torch.special.gammaincc(shape, x) - share) / density
    return x.float()


def _encode(first: Fit, later: Fit, stages: int) -> Encode:
    each = (RATIO / FIRST) ** (1 / (stages - 1))

    def encode(x: Tensor, state: Tensor | None) -> Payload:
        n = x.numel()
        residual, aim = (None, x.new_zeros(1)) if state is None else (state[:n], state[n : n + 1])
        p = fed(x, residual)
        size = p.abs()
        threshold = first(size, FIRST)
        for _ in range(stages - 1):
            tail = size[size >= threshold]
            if len(tail) > 1:
                threshold = threshold + later(tail - threshold, each)
        most = ceil(4 * n * RATIO) + 8
        index = (size >= threshold * aim.exp()).nonzero().view(-1)[:most]
        got = max(len(index) / (n * RATIO), 0.05)
        aim.add_(CORRECT / -math.log(RATIO) * math.log(got)).clamp_(-1, 1)
        return sent(p, index, residual)

    return encode


SIDCO = {
    "sidco_e": Method(_encode(_exponential, _exponential, 2), scattered, states=2),
    "sidco_p": Method(_encode(_pareto, _pareto, 3), scattered, states=2),
    "sidco_gp": Method(_encode(_gamma, _pareto, 3), scattered, states=2),
}
