"""Compressors in plain torch whose random draws all ranks share: generators seeded by the step.

The payload holds the step, which a codec's decode gets as an argument.
"""

from __future__ import annotations

from math import pi, sqrt

import torch
from torch import Tensor

from bench.torch_common import Method, Payload, fed, keep, pack, sent, unpack

#: THC's: elements that are mixed, bits of a code
BLOCK, BITS = 16384, 4
#: quantile of the standard normal distribution at 1 - 0.03125 / 2
QUANTILE = 2.1538746940614555


def _generator(step: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(step)


class _RandomK:
    """1% of the elements, the same on all ranks; only values travel."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, x: Tensor, residual: Tensor | None) -> Payload:
        step, self.step = self.step, self.step + 1
        p = fed(x, residual)
        _, values = sent(p, _positions(p.numel(), step, p.device), residual)
        return values, torch.tensor(step)


class _Cocktail:
    """The largest 10% of 10% of the elements that are the same on all ranks, in four bits."""

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, x: Tensor, residual: Tensor | None) -> Payload:
        step, self.step = self.step, self.step + 1
        p = fed(x, residual)
        drawn = p[_positions(p.numel(), step, p.device, 10).sort().values]
        at = drawn.abs().topk(max(1, p.numel() // 100), sorted=False).indices.sort().values
        scale = drawn[at].abs().amax()
        codes = ((drawn[at] / scale * 7).round() + 7).to(torch.uint8)
        if codes.numel() % 2:
            codes = torch.cat([codes, codes.new_zeros(1)])
        payload = scale, at.int(), pack(codes, 4), torch.tensor(step)
        if residual is not None:
            keep(residual, p, _decode_cocktail(payload, p.numel()))
        return payload


def _decode_cocktail(payload: Payload, n: int) -> Tensor:
    scale, at, packed, step = payload
    places = _positions(n, int(step), at.device, 10).sort().values[at.long()]
    out = torch.zeros(n, device=at.device)
    out[places] = (unpack(packed, 4, len(at)).float() - 7) * (scale / 7)
    return out


def _positions(n: int, step: int, device: torch.device, share: int = 100) -> Tensor:
    """Draw a position from each of k equal stretches of a circle of n with a random start.

    Each position has probability k / n, as with torch.randperm(n)[:k], for k draws instead of n.
    """
    k, generator = max(1, n // share), _generator(step, device)
    ends = torch.arange(k + 1, device=device) * n // k
    low, size = ends[:-1], ends.diff()
    at = low + (torch.rand(k, device=device, generator=generator) * size).long()
    return (at + torch.randint(n, (1,), device=device, generator=generator)) % n


def _decode_randomk(payload: Payload, n: int) -> Tensor:
    values, step = payload
    out = torch.zeros(n, device=values.device)
    out[_positions(n, int(step), values.device)] = values
    return out


class _Thc:
    """Rotated at random, then rounded at random to 16 steps; 3% of the elements exceed their range.

    This is one rank alone, so its scale is that of all ranks.
    """

    def __init__(self) -> None:
        self.step = 0

    def __call__(self, x: Tensor, residual: Tensor | None) -> Payload:
        step, self.step = self.step, self.step + 1
        p = fed(x, residual)
        sign = _signs(p.numel(), step, p.device)
        y = _rotated(sign * p, BLOCK)
        top = y.abs().mean() * (sqrt(pi / 2) * QUANTILE)
        codes = ((y + top) * (_LEVELS / 2 / top) + torch.rand_like(y)).clamp_(0, _LEVELS)
        codes = codes.to(torch.uint8)
        keep(residual, p, _restored(codes, top, sign))
        return top, pack(codes, BITS), torch.tensor(step)


_LEVELS = 2**BITS - 1


def _signs(n: int, step: int, device: torch.device) -> Tensor:
    generator = _generator(step, device)
    draw = torch.randint(0, 2, (n,), dtype=torch.float32, device=device, generator=generator)
    return draw.mul_(2).sub_(1)


def _rotated(x: Tensor, block: int) -> Tensor:
    """Each whole block mixed, the rest in blocks of half the size, and so on."""
    whole = x.numel() - x.numel() % block
    mixed = _hadamard(x[:whole].view(-1, block)).view(-1)
    return mixed if whole == x.numel() else torch.cat([mixed, _rotated(x[whole:], block // 2)])


def _hadamard(m: Tensor) -> Tensor:
    """The orthonormal fast Walsh-Hadamard transform of each row, its length a power of two."""
    y, h = m * sqrt(1 / m.shape[1]), 1
    while h < m.shape[1]:
        pairs = y.view(-1, 2, h)
        difference = pairs[:, 0] - pairs[:, 1]
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] = difference
        h *= 2
    return y


def _restored(codes: Tensor, top: Tensor, sign: Tensor) -> Tensor:
    return sign * _rotated(codes.float() * (2 / _LEVELS * top) - top, BLOCK)


def _decode_thc(payload: Payload, n: int) -> Tensor:
    top, packed, step = payload
    return _restored(unpack(packed, BITS, n), top, _signs(n, int(step), packed.device))


def shared() -> dict[str, Method]:
    """New methods, which count their steps from zero."""
    return {
        "cocktail": Method(_Cocktail(), _decode_cocktail),
        "randomk": Method(_RandomK(), _decode_randomk),
        "thc": Method(_Thc(), _decode_thc),
    }
