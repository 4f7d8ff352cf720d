"""Shared by the plain-torch compressors: error feedback, and packing of small integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Payload = tuple[Tensor, ...]
_POWERS = (81, 27, 9, 3, 1)  # powers of 3: weights of the five trits in a byte
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


def following(method: Method, share: float) -> Method:
    """A method for differences from a reference, which takes up a share of what they decode to."""

    def encode(x: Tensor, reference: Tensor | None) -> Payload:
        payload = method.encode(x if reference is None else x - reference, None)
        if reference is not None:
            reference.add_(method.decode(payload, len(x)), alpha=share)
        return payload

    return Method(encode, method.decode)


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


def pack_trits(codes: Tensor) -> Tensor:
    """Codes of 0, 1 and 2, five in a byte; uint8."""
    powers = torch.tensor(_POWERS, dtype=torch.uint8, device=codes.device)
    packed: Tensor = (rows(codes, 5) * powers).sum(1, dtype=torch.uint8)
    return packed


def unpack_trits(packed: Tensor, n: int) -> Tensor:
    """The n codes in packed bytes, uint8."""
    powers = torch.tensor(_POWERS, dtype=torch.uint8, device=packed.device)
    codes: Tensor = packed.view(-1, 1) // powers % 3
    return codes.view(-1)[:n]


def rows(x: Tensor, size: int) -> Tensor:
    """x as rows of `size`, the last one filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % size)).view(-1, size)


def sent(p: Tensor, index: Tensor, residual: Tensor | None) -> Payload:
    """Positions and values; the sent elements of the residual become zero."""
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
