"""Compressors to signs and thresholds in plain torch, as in published torch code."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.torch_common import Method, Payload, fed, keep, pack, unpack


def _bits(mask: Tensor) -> Tensor:
    return pack(mask.to(torch.uint8), 1)


def _signs(packed: Tensor, n: int) -> Tensor:
    return 1 - 2 * unpack(packed, 1, n).float()


def _encode_signsgd(x: Tensor, state: Tensor | None) -> Payload:
    return (_bits(x < 0),)


def _decode_signsgd(payload: Payload, n: int) -> Tensor:
    return _signs(payload[0], n)


class _Signum:
    """A momentum that begins with the first step's gradient."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, x: Tensor, momentum: Tensor | None) -> Payload:
        if momentum is None:
            return (_bits(x < 0),)
        if self.step == 0:
            momentum.copy_(x)
        else:
            momentum.mul_(0.9).add_(x, alpha=0.1)
        self.step += 1
        return (_bits(momentum < 0),)


def _encode_efsignsgd(x: Tensor, residual: Tensor | None) -> Payload:
    p = fed(x, residual)
    scale, negative = p.abs().mean(), p < 0
    keep(residual, p, torch.where(negative, -scale, scale))
    return scale, _bits(negative)


def _decode_efsignsgd(payload: Payload, n: int) -> Tensor:
    scale, packed = payload
    return _signs(packed, n) * scale


def _encode_onebit_sgd(x: Tensor, residual: Tensor | None) -> Payload:
    p = fed(x, residual)
    negative = p < 0
    m0, m1 = p[negative].mean(), p[~negative].mean()
    keep(residual, p, torch.where(negative, m0, m1))
    return m0, m1, _bits(negative)


def _decode_onebit_sgd(payload: Payload, n: int) -> Tensor:
    m0, m1, packed = payload
    return torch.where(unpack(packed, 1, n).bool(), m0, m1)


def _encode_mxnet_1bit(x: Tensor, residual: Tensor | None) -> Payload:
    p = fed(x, residual)
    above = p > 0
    keep(residual, p, 2 * above.float() - 1)
    return (_bits(above),)


def _decode_mxnet_1bit(payload: Payload, n: int) -> Tensor:
    return -_signs(payload[0], n)


def _encode_mxnet_2bit_auto(x: Tensor, residual: Tensor | None) -> Payload:
    p = fed(x, residual)
    t = 2**0.5 * p.abs().mean()
    positive, negative = p >= t, p <= -t
    keep(residual, p, t * (positive.float() - negative.float()))
    return t, pack(positive.to(torch.uint8) + 2 * negative.to(torch.uint8), 2)


def _decode_mxnet_2bit_auto(payload: Payload, n: int) -> Tensor:
    t, packed = payload
    codes = unpack(packed, 2, n)
    return t * ((codes == 1).float() - (codes == 2).float())


def signs() -> dict[str, Method]:
    """New methods; some treat their first step specially."""
    return {
        "signsgd": Method(_encode_signsgd, _decode_signsgd),
        "signum": Method(_Signum(), _decode_signsgd),
        "efsignsgd": Method(_encode_efsignsgd, _decode_efsignsgd),
        "onebit_sgd": Method(_encode_onebit_sgd, _decode_onebit_sgd),
        "mxnet_1bit": Method(_encode_mxnet_1bit, _decode_mxnet_1bit),
        "mxnet_2bit_auto": Method(_encode_mxnet_2bit_auto, _decode_mxnet_2bit_auto),
    }
