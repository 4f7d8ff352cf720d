"""Quantizers in plain torch, as in published torch code (GRACE), packed like ours."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.torch_common import (
    Method,
    Payload,
    fed,
    following,
    keep,
    pack,
    pack_trits,
    rows,
    unpack,
    unpack_trits,
)


def _encode_none(x: Tensor, residual: Tensor | None) -> Payload:
    return (x.clone(),)


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


def _encode_mxnet_2bit(x: Tensor, residual: Tensor | None) -> Payload:
    p = fed(x, residual)
    positive, negative = p >= 0.5, p <= -0.5
    codes = positive.to(torch.uint8) + 2 * negative.to(torch.uint8)
    keep(residual, p, 0.5 * (positive.float() - negative.float()))
    return (pack(codes, 2),)


def _decode_mxnet_2bit(payload: Payload, n: int) -> Tensor:
    codes = unpack(payload[0], 2, n)
    return 0.5 * ((codes == 1).float() - (codes == 2).float())


def _encode_terngrad(x: Tensor, residual: Tensor | None) -> Payload:
    limit = 2.5 * x.std(unbiased=False)
    clipped = x.clamp(-limit, limit)
    scale = clipped.abs().max()
    fires = torch.rand_like(x) * scale < clipped.abs()
    return scale, pack((clipped.sign() * fires + 1).to(torch.uint8), 2)


def _decode_terngrad(payload: Payload, n: int) -> Tensor:
    scale, packed = payload
    return (unpack(packed, 2, n).float() - 1) * scale


def _encode_terngrad_uniform(x: Tensor, residual: Tensor | None) -> Payload:
    low, high = x.aminmax()
    gap = (high - low) / 3
    codes = ((x - low) / gap + torch.rand_like(x)).floor_().clamp_(0, 3).to(torch.uint8)
    return low, gap, pack(codes, 2)


def _decode_terngrad_uniform(payload: Payload, n: int) -> Tensor:
    low, gap, packed = payload
    return low + unpack(packed, 2, n).float() * gap


def _encode_int8_group(x: Tensor, residual: Tensor | None) -> Payload:
    p = rows(x, 256)
    top = p.abs().amax(1, keepdim=True).bfloat16().float()
    codes = ((p * (127 / top) + torch.rand_like(p)).floor_() + 127).clamp_(0, 255)
    return top.bfloat16(), codes.to(torch.uint8).view(-1)


def _decode_int8_group(payload: Payload, n: int) -> Tensor:
    top, codes = payload
    return ((codes.view(-1, 256).float() - 127) * (top.float() / 127)).view(-1)[:n]


def _encode_int3_group(x: Tensor, residual: Tensor | None) -> Payload:
    p = rows(x, 64)
    top = p.abs().amax(1, keepdim=True).bfloat16().float()
    codes = ((p * (3 / top) + torch.rand_like(p)).floor_() + 3).to(torch.uint8).view(-1)
    return top.bfloat16(), pack(codes >> 2, 1), pack(codes & 3, 2)


def _decode_int3_group(payload: Payload, n: int) -> Tensor:
    top, large, rest = payload
    codes = 4 * unpack(large, 1, top.numel() * 64) + unpack(rest, 2, top.numel() * 64)
    return ((codes.view(-1, 64).float() - 3) * (top.float() / 3)).view(-1)[:n]


def _encode_tern_group(x: Tensor, residual: Tensor | None) -> Payload:
    p = rows(x, 64)
    top = p.abs().amax(1, keepdim=True).bfloat16().float()
    fires = torch.rand_like(p) * top < p.abs()
    return top.bfloat16(), pack_trits((p.sign() * fires + 1).to(torch.uint8).view(-1))


def _decode_tern_group(payload: Payload, n: int) -> Tensor:
    top, packed = payload
    codes = unpack_trits(packed, top.numel() * 64).view(-1, 64)
    return ((codes.float() - 1) * top.float()).view(-1)[:n]


def _encode_ddp_uint8(x: Tensor, residual: Tensor | None) -> Payload:
    low, high = x.aminmax()
    gap = (high - low) / 255
    return low, gap, ((x - low) / gap).round_().to(torch.uint8)


def _decode_ddp_uint8(payload: Payload, n: int) -> Tensor:
    low, gap, codes = payload
    return low + codes.float() * gap


def _encode_qsgd(x: Tensor, residual: Tensor | None) -> Payload:
    p = rows(x, 128)
    norm = p.norm(dim=1, keepdim=True)
    level = (p.abs() / norm * 127 + torch.rand_like(p)).floor_()
    return norm, (127 + level * p.sign()).to(torch.uint8).view(-1)


def _decode_qsgd(payload: Payload, n: int) -> Tensor:
    norm, codes = payload
    return ((codes.view(-1, 128).float() - 127) * (norm / 127)).view(-1)[:n]


def _dettmers_table() -> Tensor:
    """The 128 magnitudes, ascending: a smaller decimal exponent has fewer linear fractions."""
    values = [torch.zeros(1)]
    for k in range(6, -1, -1):
        m = 64 >> k
        values.append(10.0**-k * (0.1 + 0.9 * (torch.arange(m) + 0.5) / m))
    return torch.cat(values)


TABLE = _dettmers_table()
#: a magnitude's bin is the number of edges at or below it
EDGES = torch.cat([torch.tensor([1e-7]), *(
    10.0**-k * (0.1 + 0.9 * torch.arange(64 >> k) / (64 >> k)) for k in range(6, -1, -1)
)])[1:]  # fmt: skip


def _encode_int8_dettmers(x: Tensor, residual: Tensor | None) -> Payload:
    size = x.abs()
    top = size.max()
    bins = torch.bucketize(size / top, EDGES, right=True)
    return top, (bins + 128 * (x < 0)).to(torch.uint8)


def _decode_int8_dettmers(payload: Payload, n: int) -> Tensor:
    top, codes = payload
    values = TABLE[(codes & 127).long()] * top
    return torch.where(codes >= 128, -values, values)


def _encode_natural(x: Tensor, residual: Tensor | None) -> Payload:
    """Powers of two below the one of the largest magnitude of 1024 elements."""
    p = rows(x, 1024)
    exponent = p.abs().frexp().exponent - 1
    top = exponent.amax(1, keepdim=True)
    up = torch.rand_like(p) < torch.ldexp(p.abs(), -exponent) - 1
    e = (exponent + up.int() - top + 126).clamp_(0, 127)
    return top, (e + 128 * (p < 0)).to(torch.uint8).view(-1)


def _decode_natural(payload: Payload, n: int) -> Tensor:
    top, packed = payload
    codes = packed.view(-1, 1024)
    e = (codes & 127).int()
    size = torch.where(e == 0, 0.0, torch.exp2((e - 126 + top).float()))
    return torch.where(codes >= 128, -size, size).view(-1)[:n]


def _encode_threelc(x: Tensor, residual: Tensor | None) -> Payload:
    """Five elements in a byte; runs of zeros are not packed."""
    p = fed(x, residual)
    scale = p.abs().max()
    q = (p / scale).round_()
    keep(residual, p, q * scale)
    return scale, pack_trits((q + 1).to(torch.uint8))


def _decode_threelc(payload: Payload, n: int) -> Tensor:
    scale, packed = payload
    return ((unpack_trits(packed, n).float() - 1) * scale).view(-1)


QUANTIZERS = {
    "none": Method(_encode_none, _decode_cast),
    "fp16": Method(_encode_fp16, _decode_cast),
    "bf16": Method(_encode_bf16, _decode_cast),
    "onebit": Method(_encode_onebit, _decode_onebit),
    "onebit_group": Method(_encode_onebit_group, _decode_onebit_group),
    "int4_group": Method(_encode_int4_group, _decode_int4_group),
    "int8_group": Method(_encode_int8_group, _decode_int8_group),
    "int3_group": Method(_encode_int3_group, _decode_int3_group),
    "tern_group": Method(_encode_tern_group, _decode_tern_group),
    "diana": following(Method(_encode_tern_group, _decode_tern_group), 0.1),
    "int8_dettmers": Method(_encode_int8_dettmers, _decode_int8_dettmers),
    "ddp_uint8": Method(_encode_ddp_uint8, _decode_ddp_uint8),
    "qsgd": Method(_encode_qsgd, _decode_qsgd),
    "natural": Method(_encode_natural, _decode_natural),
    "threelc": Method(_encode_threelc, _decode_threelc),
    "mxnet_2bit": Method(_encode_mxnet_2bit, _decode_mxnet_2bit),
    "terngrad": Method(_encode_terngrad, _decode_terngrad),
    "terngrad_uniform": Method(_encode_terngrad_uniform, _decode_terngrad_uniform),
}
