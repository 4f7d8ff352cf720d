"""Compressors of matrices in plain torch."""

from __future__ import annotations

from math import ceil, sqrt

import torch
from torch import Tensor

from bench.torch_common import Method, Payload, fed, keep, pack, rows, unpack

RANK = 2
#: ATOMO's: most triples that are sent, columns of the matrix
TRIPLES, COLUMNS = 3, 64
#: SparseLoCo's: elements of a chunk, those that are sent, bins of the codebook, decay
CHUNK, SENT, BINS, DECAY = 4096, 64, 4, 0.95


def _width(n: int) -> int:
    return ceil(sqrt(n))


def _encode_powersgd(x: Tensor, states: Tensor | None) -> Payload:
    """A power iteration from the last right factor; states are the residual and that factor.

    This is one rank alone, so its factors are their own means (Vogels et al. 2019).
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
    """At most three triples of singular vectors; probabilities follow from singular values."""
    n = x.numel()
    m = rows(x, min(COLUMNS, _width(n)))
    u, size, vt = torch.linalg.svd(m, full_matrices=False)
    p = (size * (TRIPLES / size.sum())).clamp_(max=1)
    at = _chosen(p)
    return u[:, at], vt.T[:, at] * (size / p)[at]


def _chosen(p: Tensor) -> Tensor:
    """Positions drawn systematically: u, u + 1, ... on the line of added probabilities."""
    u = torch.rand((), device=p.device)
    combs = (torch.nn.functional.pad(p.cumsum(0), (1, 0)) - u).ceil()
    return combs.diff().nonzero().view(-1)[:TRIPLES]


def _decode_atomo(payload: Payload, n: int) -> Tensor:
    left, right = payload
    return (left @ right.T).view(-1)[:n]


def _encode_sparseloco(x: Tensor, residual: Tensor | None) -> Payload:
    """The largest of every chunk, in bins over six standard deviations, and the bins' means."""
    g = x if residual is None else x + DECAY * residual
    width = min(CHUNK, x.numel())
    m = rows(g, width)
    at = m.abs().topk(min(SENT, width), dim=1, sorted=False).indices
    v = m.gather(1, at)
    bins = ((v - v.mean()) / (6 * v.std(correction=0) / BINS)).round() + BINS // 2
    code = bins.clamp(0, BINS - 1).long()
    number = code.view(-1).bincount(minlength=BINS).clamp(min=1)
    book = torch.zeros(BINS, device=x.device).index_add_(0, code.view(-1), v.view(-1)) / number
    payload = at.short(), pack(code.byte().view(-1), 2), book
    keep(residual, g, _decode_sparseloco(payload, x.numel()))
    return payload


def _decode_sparseloco(payload: Payload, n: int) -> Tensor:
    at, packed, book = payload
    values = book[unpack(packed, 2, at.numel()).long()].view(at.shape)
    out = torch.zeros(len(at), min(CHUNK, n), device=at.device)
    return out.scatter_(1, at.long(), values).view(-1)[:n]


LOW_RANK = {
    "sparseloco": Method(_encode_sparseloco, _decode_sparseloco),
    "powersgd": Method(_encode_powersgd, _decode_powersgd, states=2),
    "atomo": Method(_encode_atomo, _decode_atomo),
}
