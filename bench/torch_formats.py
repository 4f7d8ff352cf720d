"""Number formats in plain torch: stochastic bfloat16, lossless exponents, and microscaling."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bench.torch_common import Method, Payload, fed, keep, pack, rows, unpack

_LARGEST = 0x7F7F0000  # bits of the largest finite bfloat16
_GROUP = 64  # elements that share an exponent


def _encode_bf16_sr(x: Tensor, residual: Tensor | None) -> Payload:
    bits = x.abs().view(torch.int32) + torch.randint(65536, x.shape, dtype=torch.int32)
    size = (bits & -65536).clamp_(max=_LARGEST).view(torch.float32)
    return (torch.where(x.isfinite(), size.copysign(x), x).bfloat16(),)


def _decode_bf16_sr(payload: Payload, n: int) -> Tensor:
    return payload[0].float()


def _encode_lossless(x: Tensor, residual: Tensor | None, *, low: bool) -> Payload:
    bits = (x if low else x.bfloat16().float()).view(torch.int32)
    exponents = rows((bits >> 23) & 255, _GROUP)
    top = exponents.amax(1, keepdim=True)
    far = (top - exponents).clamp_(max=7).view(-1)[: len(x)].to(torch.uint8)
    escaped = exponents.view(-1)[: len(x)][far == 7].to(torch.uint8)
    high = (((bits >> 31) & 1) << 7 | (bits >> 16) & 127).to(torch.uint8)
    rest = ((bits & 65535).to(torch.int32),) if low else ()
    return top.to(torch.uint8), pack(far >> 2, 1), pack(far & 3, 2), high, escaped, *rest


def _decode_lossless(payload: Payload, n: int) -> Tensor:
    top, large, rest, high, escaped, *low = payload
    far = unpack(large, 1, n).int() * 4 + unpack(rest, 2, n).int()
    exponents = rows(top.view(-1).repeat_interleave(_GROUP)[:n].int() - far, 1).view(-1)
    exponents[far == 7] = escaped.int()
    signs, mantissas = (high.int() >> 7) << 31, (high.int() & 127) << 16
    bits = signs | exponents << 23 | mantissas | (low[0] if low else 0)
    return bits.view(torch.float32)


def _exponent(x: Tensor) -> Tensor:
    """The exponent of each element, as a float."""
    return (torch.frexp(x).exponent - 1).float()


def _encode_mx(
    x: Tensor, residual: Tensor | None, *, bits: int, mantissa: int, top: int, low: int
) -> Payload:
    """`bits` per element, of which `mantissa` are the mantissa's; exponents from `low` to `top`."""
    n, p = len(x), rows(fed(x, residual), 32)
    e = (_exponent(p.abs().amax(1, keepdim=True)) - top + 127).clamp_(1, 254)
    size = p.abs() / torch.exp2(e - 127)
    own = _exponent(size).clamp_(low, top)
    step = 2**mantissa
    most = 7 if bits == 4 else 126
    code = (step * (own - low) + (size / torch.exp2(own - mantissa)).round()).clamp_(max=most)
    codes = (code + (p < 0) * 2 ** (bits - 1)).to(torch.uint8).view(-1)
    payload = e.to(torch.uint8), pack(codes, 4) if bits == 4 else codes
    if residual is not None:
        decoded = _decode_mx(payload, n, bits=bits, mantissa=mantissa, low=low)
        keep(residual, p.view(-1)[:n], decoded)
    return payload


def _decode_mx(payload: Payload, n: int, *, bits: int, mantissa: int, low: int) -> Tensor:
    e, packed = payload
    codes = unpack(packed, 4, 32 * len(e)) if bits == 4 else packed
    size, step = codes & (2 ** (bits - 1) - 1), 2**mantissa
    fraction = torch.where(size < step, size, step + (size & (step - 1))).float()
    power = (size >> mantissa).float().clamp_(min=1) + (low - 1 - mantissa)
    values = fraction * torch.exp2(power) * torch.exp2(e.float() - 127).repeat_interleave(32)
    return torch.where(codes >= 2 ** (bits - 1), -values, values)[:n]


def _encode_nvfp4(x: Tensor, residual: Tensor | None) -> Payload:
    n, p = len(x), rows(fed(x, residual), 16)
    unit = (p.abs().amax() / (448 * 6)).clamp_(min=2.0**-126)
    scale = (p.abs().amax(1, keepdim=True) / 6 / unit).to(torch.float8_e4m3fn)
    size = p.abs() / (scale.float() * unit)
    low = _exponent(size).clamp_(0, 2)
    code = (2 * low + (size / torch.exp2(low - 1)).round()).nan_to_num_(7).clamp_(max=7)
    payload = unit, scale, pack((code + (p < 0) * 8).to(torch.uint8).view(-1), 4)
    if residual is not None:
        keep(residual, p.view(-1)[:n], _decode_nvfp4(payload, n))
    return payload


def _decode_nvfp4(payload: Payload, n: int) -> Tensor:
    unit, scale, packed = payload
    codes = unpack(packed, 4, 16 * len(scale))
    both = (scale.float() * unit).view(-1).repeat_interleave(16)
    size = codes & 7
    fraction = torch.where(size < 2, size, 2 + (size & 1)).float()
    values = fraction * torch.exp2((size >> 1).float().clamp_(min=1) - 2) * both
    return torch.where(codes >= 8, -values, values)[:n]


#: NF4's levels, as in bitsandbytes
_NF4 = torch.tensor([
    -1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1,
])  # fmt: skip


def _encode_nf4(x: Tensor, residual: Tensor | None) -> Payload:
    n, p = len(x), rows(fed(x, residual), _GROUP)
    bits = p.abs().amax(1, keepdim=True).view(torch.int32)
    top = ((bits + 65535) & -65536).view(torch.float32)
    levels = _NF4.to(x.device)
    codes = torch.bucketize(p / top, (levels[1:] + levels[:-1]) / 2, out_int32=True, right=True)
    payload = top.bfloat16(), pack(codes.to(torch.uint8).view(-1), 4)
    if residual is not None:
        keep(residual, p.view(-1)[:n], _decode_nf4(payload, n))
    return payload


def _decode_nf4(payload: Payload, n: int) -> Tensor:
    top, packed = payload
    codes = unpack(packed, 4, _GROUP * len(top)).view(-1, _GROUP)
    return (_NF4.to(top.device)[codes.int()] * top.float()).view(-1)[:n]


def _encode_onebit_fine(x: Tensor, residual: Tensor | None) -> Payload:
    n, p = len(x), rows(fed(x, residual), 256)
    scale, negative = p.abs().mean(1, keepdim=True).bfloat16(), p < 0
    keep(residual, p.view(-1)[:n], torch.where(negative, -scale, scale).float().view(-1)[:n])
    return scale, pack(negative.to(torch.uint8).view(-1), 1)


def _decode_onebit_fine(payload: Payload, n: int) -> Tensor:
    scale, packed = payload
    negative = unpack(packed, 1, scale.numel() * 256).view(-1, 256).bool()
    return torch.where(negative, -scale, scale).float().view(-1)[:n]


def _lossless(*, low: bool) -> Method:
    return Method(partial(_encode_lossless, low=low), _decode_lossless)


def _mx(bits: int, mantissa: int, top: int, low: int) -> Method:
    return Method(
        partial(_encode_mx, bits=bits, mantissa=mantissa, top=top, low=low),
        partial(_decode_mx, bits=bits, mantissa=mantissa, low=low),
    )


FORMATS = {
    "bf16_sr": Method(_encode_bf16_sr, _decode_bf16_sr),
    "lossless": _lossless(low=True),
    "lossless_bf16": _lossless(low=False),
    "mxfp4": _mx(4, 1, 2, 0),
    "mxfp8": _mx(8, 3, 8, -6),
    "nf4": Method(_encode_nf4, _decode_nf4),
    "nvfp4": Method(_encode_nvfp4, _decode_nvfp4),
    "onebit_fine": Method(_encode_onebit_fine, _decode_onebit_fine),
}
