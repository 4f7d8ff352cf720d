"""Sparsifiers that send codes or means, and codes by quantile, in plain torch.

Positions stay int32, where the specs write gaps or golomb streams: decoded values are the
same, payloads are longer, and coding takes no time.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from bench.torch_common import Method, Payload, fed, keep, pack, rows, scattered, sent, unpack


def _encode_stc(x: Tensor, residual: Tensor | None) -> Payload:
    """The 1% largest, each as plus or minus their mean magnitude."""
    p = fed(x, residual)
    index = p.abs().topk(max(1, ceil(p.numel() * 0.01)), sorted=False).indices
    values = p[index]
    size, negative = values.abs().mean(), values < 0
    _lose(p, index, torch.where(negative, -size, size), residual)
    return index.int(), negative, size


def _decode_stc(payload: Payload, n: int) -> Tensor:
    index, negative, size = payload
    return scattered((index, torch.where(negative, -size, size)), n)


def _lose(p: Tensor, index: Tensor, values: Tensor, residual: Tensor | None) -> None:
    """Replace the residual by p without the values at their positions."""
    if residual is not None:
        residual.copy_(p)
        residual[index] -= values


def _encode_adaq(x: Tensor, residual: Tensor | None) -> Payload:
    """Elements of each sign beyond a threshold from a 1% sample, each as the mean of its sign."""
    p = fed(x, residual)
    above, below = _largest(p), _largest(-p)
    high, low = _mean(p, above), _mean(p, below)
    index = (above | below).nonzero().view(-1)[: ceil(p.numel() * 0.02) + 8]
    positive = above[index]
    _lose(p, index, torch.where(positive, high, low), residual)
    return index.int(), positive, high, low


def _largest(p: Tensor) -> Tensor:
    """A mask of about the 1% largest of the positive elements."""
    n = p.numel()
    count = min(n, max(ceil(n * 0.01), 1000))
    sample = p[torch.randint(n, (count,), device=p.device)].clamp_(min=0)
    positive = p > 0
    k = max(1, int(0.01 * count * int(positive.sum()) / n))
    return positive & (p >= sample.topk(k).values[-1])


def _mean(p: Tensor, mask: Tensor) -> Tensor:
    values = p[mask]
    return values.sum() / max(1, len(values))


def _decode_adaq(payload: Payload, n: int) -> Tensor:
    index, positive, high, low = payload
    return scattered((index, torch.where(positive, high, low)), n)


def _encode_adacomp(x: Tensor, residual: Tensor | None) -> Payload:
    """Elements that one more gradient would raise to the largest of their 512; at most half."""
    p = fed(x, residual)
    binned = rows(p, 512)
    top = binned.abs().amax(1, keepdim=True)
    mask = (rows(p + x, 512).abs() >= top) & (binned != 0)
    index = mask.view(-1).nonzero().view(-1)[: ceil(p.numel() * 0.5)]
    return sent(p, index, residual)


def _encode_dithering(x: Tensor, residual: Tensor | None) -> Payload:
    """Fifteen levels of the largest magnitude, rounded at random; zeros are not sent."""
    scale = x.abs().max()
    level = (x.abs() * (15 / scale) + torch.rand_like(x)).floor_()
    index = level.nonzero().view(-1)
    return index.int(), (level[index] - 1).to(torch.uint8), x[index] < 0, scale


def _decode_dithering(payload: Payload, n: int) -> Tensor:
    index, code, negative, scale = payload
    size = (code.float() + 1) * (scale / 15)
    return scattered((index, torch.where(negative, -size, size)), n)


def _encode_sketch(x: Tensor, residual: Tensor | None) -> Payload:
    """For each element, one of 64 bins of equally many elements; and the bins' means."""
    n = x.numel()
    at = torch.arange(1, 64, device=x.device) * n // 64
    code = torch.bucketize(x, x.sort().values[at], right=True)
    count = code.bincount(minlength=64).clamp_(min=1)
    means = torch.zeros(64, device=x.device).index_add_(0, code, x) / count
    return means, code.to(torch.uint8)


def _decode_sketch(payload: Payload, n: int) -> Tensor:
    means, code = payload
    return means[code.int()]


def _encode_inceptionn(x: Tensor, residual: Tensor | None) -> Payload:
    """32 bits for magnitudes from one on, 16 from 2**-5, 8 from 2**-10, none below."""
    p = fed(x, residual)
    size = p.abs()
    tag = (size >= 2**-10).to(torch.uint8) + (size >= 2**-5) + (size >= 1)
    x16, x8 = p[tag == 2], p[tag == 1]
    half = (x16 * 2**14).to(torch.int16)  # never zero: its sign is that of the value
    small = (x8.abs() * 2**6).to(torch.uint8) + 128 * (x8 < 0)
    payload = pack(tag, 2), p[tag == 3], half, small.to(torch.uint8)
    keep(residual, p, _decode_inceptionn(payload, p.numel()))
    return payload


def _decode_inceptionn(payload: Payload, n: int) -> Tensor:
    packed, wide, half, small = payload
    tag, out = unpack(packed, 2, n), torch.zeros(n, device=wide.device)
    size = (small & 127).float().clamp_(min=0.5) / 2**6  # a zero stands for half a step
    out[tag == 3] = wide
    out[tag == 2] = half.float() / 2**14
    out[tag == 1] = torch.where(small >= 128, -size, size)
    return out


SPARSE_CODES = {
    "inceptionn": Method(_encode_inceptionn, _decode_inceptionn),
    "stc": Method(_encode_stc, _decode_stc),
    "adaq": Method(_encode_adaq, _decode_adaq),
    "adacomp": Method(_encode_adacomp, scattered),
    "dithering": Method(_encode_dithering, _decode_dithering),
    "sketch": Method(_encode_sketch, _decode_sketch),
}
