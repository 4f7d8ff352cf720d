"""Sparsifiers in plain torch, as published torch code (GRACE) writes them."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.torch_common import Method, Payload, fed, scattered, sent


def _encode_topk(x: Tensor, residual: Tensor | None) -> Payload:
    p = fed(x, residual)
    index = p.abs().topk(max(1, p.numel() // 100), sorted=False).indices
    return sent(p, index, residual)


def _encode_graddrop(x: Tensor, residual: Tensor | None) -> Payload:
    """Threshold from a 1% sample."""
    p = fed(x, residual)
    size = p.abs()
    threshold = _sampled(size, max(200, p.numel() // 100), 0.01)
    return sent(p, (size >= threshold).nonzero().view(-1), residual)


def _sampled(size: Tensor, count: int, ratio: float) -> Tensor:
    """The threshold above which `ratio` of a random sample lies."""
    sample = size[torch.randint(size.numel(), (count,), device=size.device)]
    return sample.topk(max(1, int(count * ratio))).values[-1]


def _encode_dgc(x: Tensor, states: Tensor | None) -> Payload:
    """0.1% largest of the momentum-corrected sum."""
    u, v = (torch.zeros_like(x), torch.zeros_like(x)) if states is None else states.view(2, -1)
    u.mul_(0.9).add_(x)
    v.add_(u)
    size = v.abs()
    threshold = _sampled(size, max(2000, x.numel() // 100), 0.001)
    index = (size >= threshold).nonzero().view(-1)
    values = v[index]
    u[index] = 0
    v[index] = 0
    return index.int(), values


SPARSIFIERS = {
    "topk": Method(_encode_topk, scattered),
    "graddrop": Method(_encode_graddrop, scattered),
    "dgc": Method(_encode_dgc, scattered, states=2),
}
