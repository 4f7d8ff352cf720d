"""Low-rank compressors in plain torch."""

from __future__ import annotations

from math import ceil, sqrt

import torch
from torch import Tensor

from bench.torch_common import Method, Payload, fed, keep, rows

RANK = 2
#: ATOMO's: most triples that are sent, columns of the matrix
TRIPLES, COLUMNS = 3, 64


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


def _encode_atomo(x: Tensor, states: Tensor | None) -> Payload:
    """Triples of singular vectors, drawn with chances by their singular values, three at most."""
    n = x.numel()
    m = rows(x, min(COLUMNS, _width(n)))
    u, size, vt = torch.linalg.svd(m, full_matrices=False)
    p = (size * (TRIPLES / size.sum())).clamp_(max=1)
    at = _chosen(p)
    return u[:, at], vt.T[:, at] * (size / p)[at]


def _chosen(p: Tensor) -> Tensor:
    """Positions by their chances, systematically: those at u, u + 1, ... on the chances' line."""
    u = torch.rand((), device=p.device)
    combs = (torch.nn.functional.pad(p.cumsum(0), (1, 0)) - u).ceil()
    return combs.diff().nonzero().view(-1)[:TRIPLES]


def _decode_atomo(payload: Payload, n: int) -> Tensor:
    left, right = payload
    return (left @ right.T).view(-1)[:n]


LOW_RANK = {
    "powersgd": Method(_encode_powersgd, _decode_powersgd, states=2),
    "atomo": Method(_encode_atomo, _decode_atomo),
}
