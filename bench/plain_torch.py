"""Eleven compressors in simple plain torch, the baseline of `python -m bench.codecs`.

They are written for clarity and ordinary speed (in place if that is natural), as in published torch
code (GRACE), packed like ours, with the default parameters of the spec of the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, sqrt

import torch
from torch import Tensor

RANK = 2  # of powersgd
Payload = tuple[Tensor, ...]
#: encode(x, state) -> payload; the state (float32 [states * n], or None) is updated in place
Encode = Callable[[Tensor, Tensor | None], Payload]
#: decode(payload, n) -> float32 [n]
Decode = Callable[[Payload, int], Tensor]


@dataclass(frozen=True)
class Method:
    """A compressor in plain torch, with a spec's default parameters."""

    encode: Encode
    decode: Decode
    #: per-element states, for a spec that keeps any
    states: int = 1


def fed(x: Tensor, residual: Tensor | None) -> Tensor:
    """The gradient plus the residual."""
    return x if residual is None else x + residual


def keep(residual: Tensor | None, x: Tensor, decoded: Tensor) -> None:
    """Replace the residual by the error of this step."""
    if residual is not None:
        torch.sub(x, decoded, out=residual)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Small codes packed into bytes; uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    packed: Tensor = (rows(codes, len(shifts)) << shifts).sum(1, dtype=torch.uint8)
    return packed


def unpack(packed: Tensor, bits: int, n: int) -> Tensor:
    """The n codes in packed bytes, uint8."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (packed.view(-1, 1) >> shifts) & (2**bits - 1)
    return codes.view(-1)[:n]


def rows(x: Tensor, size: int) -> Tensor:
    """x as rows of `size`, the last one filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % size)).view(-1, size)


def _encode_fp16(x: Tensor, residual: Tensor | None) -> Payload:
    return (x.half(),)


def _encode_bf16(x: Tensor, residual: Tensor | None) -> Payload:
    return (x.bfloat16(),)


def _decode_cast(payload: Payload, n: int) -> Tensor:
    return payload[0].to(torch.float32, copy=True)


def _encode_onebit(x: Tensor, residual: Tensor | None) -> Payload:
    p = fed(x, residual)
    scale, negative = p.abs().mean(), p < 0
    keep(residual, p, torch.where(negative, -scale, scale))
    return scale, pack(negative.to(torch.uint8), 1)


def _decode_onebit(payload: Payload, n: int) -> Tensor:
    scale, packed = payload
    return torch.where(unpack(packed, 1, n).bool(), -scale, scale)


def _encode_onebit_group(x: Tensor, residual: Tensor | None) -> Payload:
    n, p = x.numel(), rows(fed(x, residual), 1024)
    scale, negative = p.abs().mean(1, keepdim=True), p < 0
    keep(residual, p.view(-1)[:n], torch.where(negative, -scale, scale).view(-1)[:n])
    return scale, pack(negative.to(torch.uint8).view(-1), 1)


def _decode_onebit_group(payload: Payload, n: int) -> Tensor:
    scale, packed = payload
    negative = unpack(packed, 1, scale.numel() * 1024).view(-1, 1024).bool()
    return torch.where(negative, -scale, scale).view(-1)[:n]


def _encode_int4_group(x: Tensor, residual: Tensor | None) -> Payload:
    p = rows(x, 64)
    top = p.abs().amax(1, keepdim=True).bfloat16().float()
    codes = ((p * (7 / top) + torch.rand_like(p)).floor_() + 7).clamp_(0, 15).to(torch.uint8)
    return top.bfloat16(), pack(codes.view(-1), 4)


def _decode_int4_group(payload: Payload, n: int) -> Tensor:
    top, packed = payload
    codes = unpack(packed, 4, top.numel() * 64).view(-1, 64)
    return ((codes.float() - 7) * (top.float() / 7)).view(-1)[:n]


def _encode_int8_group(x: Tensor, residual: Tensor | None) -> Payload:
    p = rows(x, 256)
    top = p.abs().amax(1, keepdim=True).bfloat16().float()
    codes = ((p * (127 / top) + torch.rand_like(p)).floor_() + 127).clamp_(0, 255)
    return top.bfloat16(), codes.to(torch.uint8).view(-1)


def _decode_int8_group(payload: Payload, n: int) -> Tensor:
    top, codes = payload
    return ((codes.view(-1, 256).float() - 127) * (top.float() / 127)).view(-1)[:n]


def _encode_terngrad(x: Tensor, residual: Tensor | None) -> Payload:
    limit = 2.5 * x.std(unbiased=False)
    clipped = x.clamp(-limit, limit)
    scale = clipped.abs().max()
    fires = torch.rand_like(x) * scale < clipped.abs()
    return scale, pack((clipped.sign() * fires + 1).to(torch.uint8), 2)


def _decode_terngrad(payload: Payload, n: int) -> Tensor:
    scale, packed = payload
    return (unpack(packed, 2, n).float() - 1) * scale


def _encode_qsgd(x: Tensor, residual: Tensor | None) -> Payload:
    p = rows(x, 128)
    norm = p.norm(dim=1, keepdim=True)
    level = (p.abs() / norm * 127 + torch.rand_like(p)).floor_()
    return norm, (127 + level * p.sign()).to(torch.uint8).view(-1)


def _decode_qsgd(payload: Payload, n: int) -> Tensor:
    norm, codes = payload
    return ((codes.view(-1, 128).float() - 127) * (norm / 127)).view(-1)[:n]


def _encode_topk(x: Tensor, residual: Tensor | None) -> Payload:
    p = fed(x, residual)
    index = p.abs().topk(max(1, p.numel() // 100), sorted=False).indices
    values = p[index]
    if residual is not None:
        residual.copy_(p)
        residual[index] = 0
    return index.int(), values


def scattered(payload: Payload, n: int) -> Tensor:
    """Values at their positions, zero elsewhere."""
    index, values = payload[:2]
    out = torch.zeros(n, device=values.device)
    out[index.long()] = values.float()
    return out


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


def _sampled(size: Tensor, count: int, ratio: float) -> Tensor:
    """The threshold above which `ratio` of a random sample lies."""
    sample = size[torch.randint(size.numel(), (count,), device=size.device)]
    return sample.topk(max(1, int(count * ratio))).values[-1]


def _encode_powersgd(x: Tensor, states: Tensor | None) -> Payload:
    """A power iteration from the last right factor; states are the residual and that factor.

    This is one rank alone, so its factors are their own means (Vogels et al. 2019).
    """
    n = x.numel()
    width = ceil(sqrt(n))
    residual, warm = (None, None) if states is None else (states[:n], states[n : n + RANK * width])
    g = fed(x, residual)
    p = rows(g, width) @ _start(warm, width, x)
    left = _basis(p)
    q = rows(g, width).T @ left
    if warm is not None:
        warm.copy_(q.view(-1))
    keep(residual, g, (left @ q.T).view(-1)[:n])
    return p, q


def _basis(m: Tensor) -> Tensor:
    q: Tensor = torch.linalg.qr(m).Q
    return q


def _start(warm: Tensor | None, width: int, x: Tensor) -> Tensor:
    if warm is None or not warm.any():
        return _basis(torch.randn(width, RANK, device=x.device))
    return _basis(warm.view(width, RANK))


def _decode_powersgd(payload: Payload, n: int) -> Tensor:
    p, q = payload
    return (_basis(p) @ q.T).view(-1)[:n]


METHODS: dict[str, Method] = {
    "bf16": Method(_encode_bf16, _decode_cast),
    "dgc": Method(_encode_dgc, scattered, states=2),
    "fp16": Method(_encode_fp16, _decode_cast),
    "int4_group": Method(_encode_int4_group, _decode_int4_group),
    "int8_group": Method(_encode_int8_group, _decode_int8_group),
    "onebit": Method(_encode_onebit, _decode_onebit),
    "onebit_group": Method(_encode_onebit_group, _decode_onebit_group),
    "powersgd": Method(_encode_powersgd, _decode_powersgd, states=2),
    "qsgd": Method(_encode_qsgd, _decode_qsgd),
    "terngrad": Method(_encode_terngrad, _decode_terngrad),
    "topk": Method(_encode_topk, scattered),
}
