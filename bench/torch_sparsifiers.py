"""Sparsifiers in plain torch, as in published torch code (GRACE)."""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from bench.torch_common import Method, Payload, fed, following, scattered, sent


def _encode_topk(x: Tensor, residual: Tensor | None) -> Payload:
    p = fed(x, residual)
    index = p.abs().topk(max(1, p.numel() // 100), sorted=False).indices
    return sent(p, index, residual)


def _encode_graddrop(x: Tensor, residual: Tensor | None) -> Payload:
    """Elements beyond a threshold from a 1% sample; at most twice as many as wanted."""
    p = fed(x, residual)
    size = p.abs()
    threshold = _sampled(size, max(200, p.numel() // 100), 0.01)
    return _above(p, size, threshold, residual, most=2 * max(1, p.numel() // 100) + 8)


def _sampled(size: Tensor, count: int, ratio: float) -> Tensor:
    """The threshold above which `ratio` of a random sample lies."""
    sample = size[torch.randint(size.numel(), (count,), device=size.device)]
    return sample.topk(max(1, int(count * ratio))).values[-1]


def _above(
    p: Tensor,
    size: Tensor,
    threshold: Tensor | float,
    residual: Tensor | None,
    most: int | None = None,
) -> Payload:
    """The first elements, at most `most`, whose magnitude reaches the threshold."""
    return sent(p, (size >= threshold).nonzero().view(-1)[:most], residual)


def _encode_dgc(x: Tensor, states: Tensor | None) -> Payload:
    """The 0.1% largest of the momentum-corrected sum; at most 1.3 times as many."""
    n = x.numel()
    u, v = (torch.zeros_like(x), torch.zeros_like(x)) if states is None else states.view(2, -1)
    u.mul_(0.9).add_(x)
    v.add_(u)
    size = v.abs()
    index = (size >= _corrected(size)).nonzero().view(-1)[: ceil(1.3 * max(1, n * 0.001)) + 8]
    values = v[index]
    u[index] = 0
    v[index] = 0
    return index.int(), values


def _corrected(size: Tensor) -> Tensor:
    """A sampled threshold, lowered if it keeps too few, exact if it keeps too many."""
    n = size.numel()
    k = max(1, n // 1000)
    threshold = _sampled(size, max(2000, n // 100), 0.001)
    count = int((size >= threshold).sum())
    for _ in range(10):
        if count >= 0.8 * k:
            break
        threshold = threshold * 0.8
        count = int((size >= threshold).sum())
    return size.topk(k).values[-1] if count > 1.3 * k else threshold


def _encode_threshold(x: Tensor, residual: Tensor | None) -> Payload:
    p = fed(x, residual)
    return _above(p, p.abs(), 0.01, residual)


def _encode_adaptive_threshold(x: Tensor, residual: Tensor | None) -> Payload:
    p = fed(x, residual)
    size = p.abs()
    return _above(p, size, size.max() / 2, residual)


def _encode_qsparse(x: Tensor, residual: Tensor | None) -> Payload:
    """The kept elements as 8 bit levels of their norm."""
    p = fed(x, residual)
    index = p.abs().topk(max(1, p.numel() // 100), sorted=False).indices
    values = p[index]
    norm = values.norm()
    level = (values.abs() / norm * 127 + torch.rand_like(values)).floor_() * values.sign()
    if residual is not None:
        residual.copy_(p)
        residual[index] -= level * (norm / 127)
    return index.int(), level.to(torch.int8), norm


def _decode_qsparse(payload: Payload, n: int) -> Tensor:
    index, level, norm = payload
    return scattered((index, level.float() * (norm / 127)), n)


def _encode_redsync(x: Tensor, residual: Tensor | None) -> Payload:
    """A threshold bisected between mean and largest magnitude, as in GRACE; at most 4%."""
    p = fed(x, residual)
    size = p.abs()
    k, mean, top = max(1, p.numel() // 100), size.mean(), size.max()
    low, high, threshold = 0.0, 1.0, mean
    for _ in range(3):
        middle = (low + high) / 2
        threshold = mean + middle * (top - mean)
        count = int((size >= threshold).sum())
        if count <= k:
            high = middle
        elif count >= 2 * k:
            low = middle
        else:
            break
    return _above(p, size, threshold, residual, most=4 * k)


def _encode_gaussiank(x: Tensor, residual: Tensor | None) -> Payload:
    """A threshold from a normal distribution, corrected at most ten times; at most 4%."""
    p = fed(x, residual)
    size = p.abs()
    k = max(1, p.numel() // 100)
    threshold = size.mean() + size.std(unbiased=False) * 2.5758293035489004
    for _ in range(10):
        count = int((size >= threshold).sum())
        if count < 2 * k / 3:
            threshold = threshold * 0.5
        elif count > 4 * k / 3:
            threshold = threshold * 1.5
        else:
            break
    return _above(p, size, threshold, residual, most=4 * k)


def _encode_wangni(x: Tensor, residual: Tensor | None) -> Payload:
    """Elements kept with probability p by magnitude, and divided by p."""
    size = x.abs()
    k = x.numel() / 100
    scale = k / size.sum()
    for _ in range(2):
        sure = size * scale >= 1
        scale = torch.maximum(scale, (k - sure.sum()) / size[~sure].sum())
    p = (size * scale).clamp_(max=1)
    index = (torch.rand_like(p) < p).nonzero().view(-1)
    return index.int(), x[index] / p[index]


SPARSIFIERS = {
    "threshold": Method(_encode_threshold, scattered),
    "adaptive_threshold": Method(_encode_adaptive_threshold, scattered),
    "qsparse": Method(_encode_qsparse, _decode_qsparse),
    "redsync": Method(_encode_redsync, scattered),
    "gaussiank": Method(_encode_gaussiank, scattered),
    "wangni": Method(_encode_wangni, scattered),
    "topk": Method(_encode_topk, scattered),
    "graddrop": Method(_encode_graddrop, scattered),
    "dgc": Method(_encode_dgc, scattered, states=2),
    "ef21": following(Method(_encode_topk, scattered), 1.0),
}
