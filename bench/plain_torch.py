"""Compressors as one would write them in plain torch, the baseline of `python -m bench.codecs`.

Each is `encode(x, residual) -> payload tensors`; a residual, where a method keeps one, is updated.
They are written for clarity and ordinary speed (in-place where that is natural), not packed where
packing in torch costs more than it saves, as published torch code does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Payload = tuple[Tensor, ...]
Encode = Callable[[Tensor, Tensor | None], Payload]
_BITS = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)


def _fed(x: Tensor, residual: Tensor | None) -> Tensor:
    return x if residual is None else x + residual


def _keep(residual: Tensor | None, x: Tensor, decoded: Tensor) -> None:
    if residual is not None:
        torch.sub(x, decoded, out=residual)


def _pack_bits(mask: Tensor) -> Tensor:
    return (mask.view(-1, 8) * _BITS).sum(1, dtype=torch.uint8)


def _pack(codes: Tensor, bits: int) -> Tensor:
    per = 8 // bits
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (codes.view(-1, per) << shifts).sum(1, dtype=torch.uint8)


def none(x: Tensor, residual: Tensor | None) -> Payload:
    """A copy."""
    return (x.clone(),)


def fp16(x: Tensor, residual: Tensor | None) -> Payload:
    """Cast."""
    return (x.half(),)


def bf16(x: Tensor, residual: Tensor | None) -> Payload:
    """Cast."""
    return (x.bfloat16(),)


def onebit(x: Tensor, residual: Tensor | None) -> Payload:
    """Sign and mean magnitude."""
    p = _fed(x, residual)
    scale, negative = p.abs().mean(), p < 0
    _keep(residual, p, torch.where(negative, -scale, scale))
    return scale, _pack_bits(negative)


def onebit_group(x: Tensor, residual: Tensor | None) -> Payload:
    """Sign and mean magnitude of rows of 1024."""
    p = _fed(x, residual).view(-1, 1024)
    scale, negative = p.abs().mean(1, keepdim=True), p < 0
    _keep(residual, p.view(-1), torch.where(negative, -scale, scale).view(-1))
    return scale, _pack_bits(negative)


def int4_group(x: Tensor, residual: Tensor | None) -> Payload:
    """Stochastic 4 bit in rows of 64."""
    rows = x.view(-1, 64)
    top = rows.abs().amax(1, keepdim=True).bfloat16().float()
    codes = (
        (rows * (7 / top) + torch.rand_like(rows)).floor_().add_(7).clamp_(0, 15).to(torch.uint8)
    )
    return top.bfloat16(), _pack(codes, 4)


def mxnet_2bit(x: Tensor, residual: Tensor | None) -> Payload:
    """Ternary by a threshold."""
    p = _fed(x, residual)
    positive, negative = p >= 0.5, p <= -0.5
    codes = positive.to(torch.uint8) + 2 * negative.to(torch.uint8)
    _keep(residual, p, 0.5 * (positive.float() - negative.float()))
    return (_pack(codes, 2),)


def terngrad(x: Tensor, residual: Tensor | None) -> Payload:
    """Stochastic ternary."""
    limit = 2.5 * x.std(unbiased=False)
    clipped = x.clamp(-limit, limit)
    scale = clipped.abs().max()
    fires = torch.rand_like(x) * scale < clipped.abs()
    return scale, _pack((clipped.sign() * fires + 1).to(torch.uint8), 2)


def terngrad_uniform(x: Tensor, residual: Tensor | None) -> Payload:
    """Stochastic uniform, 2 bit."""
    low, high = x.aminmax()
    gap = (high - low) / 3
    codes = ((x - low) / gap + torch.rand_like(x)).floor_().clamp_(0, 3).to(torch.uint8)
    return low, gap, _pack(codes, 2)


def topk(x: Tensor, residual: Tensor | None) -> Payload:
    """1% largest."""
    p = _fed(x, residual)
    index = p.abs().topk(max(1, p.numel() // 100), sorted=False).indices
    return _sent(p, index, residual)


def graddrop(x: Tensor, residual: Tensor | None) -> Payload:
    """1% largest, threshold from a 1% sample."""
    p = _fed(x, residual)
    sample = p.abs()[torch.randint(p.numel(), (max(200, p.numel() // 100),))]
    threshold = sample.topk(max(1, sample.numel() // 100)).values[-1]
    return _sent(p, (p.abs() >= threshold).nonzero().view(-1), residual)


def _sent(p: Tensor, index: Tensor, residual: Tensor | None) -> Payload:
    if residual is not None:
        residual.copy_(p)
        residual[index] = 0
    return index.int(), p[index]


def dgc(x: Tensor, residual: Tensor | None) -> Payload:
    """0.1% largest of the momentum-corrected sum, as GRACE's torch code does it."""
    u, v = (torch.zeros_like(x), torch.zeros_like(x)) if residual is None else residual.view(2, -1)
    u.mul_(0.9).add_(x)
    v.add_(u)
    size = v.abs()
    sample = size[torch.randint(x.numel(), (max(2000, x.numel() // 100),))]
    threshold = sample.topk(max(1, sample.numel() // 1000)).values[-1]
    index = (size >= threshold).nonzero().view(-1)
    values = v[index]
    u[index] = 0
    v[index] = 0
    return index.int(), values


ENCODERS: dict[str, Encode] = {
    f.__name__: f
    for f in (none, fp16, bf16, onebit, onebit_group, int4_group, mxnet_2bit, terngrad,
              terngrad_uniform, topk, graddrop, dgc)
}  # fmt: skip
