"""Low-rank compressors in plain torch."""

from __future__ import annotations

from math import ceil, sqrt

import torch
from torch import Tensor

from bench.torch_common import Method, Payload, fed, keep, rows

RANK = 2


def _width(n: int) -> int:
    return ceil(sqrt(n))


def _encode_powersgd(x: Tensor, states: Tensor | None) -> Payload:
    """One power iteration from the last right factor; states are residual, then that factor.

    As one rank runs it, whose factors are their own means (Vogels et al. 2019).
    """
    n = x.numel()
    width = _width(n)
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


LOW_RANK = {"powersgd": Method(_encode_powersgd, _decode_powersgd, states=2)}
