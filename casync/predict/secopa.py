"""SeCoPa, selective compression and partitioning, as published (HiPress, SOSP'21); for comparison.

With m gradient bytes in K partitions, N ranks and compression rate r::

    T_orig(m, K) = alpha T_send(m/K)
    T_cpr(m, K)  = alpha T_send(r m/K) + beta T_enc(m/K) + gamma T_dec(r m/K)

beta and gamma count codec calls that do not overlap a transmission. More partitions than ranks go
in ceil(K/N) batches, each of which sends and decodes like one; of a parameter server's encodes, K
counts all. A gradient is compressed if and only if min_K T_cpr < min_K T_orig. "auto" uses
timeline.py instead, in which gradients share link and cores with each other and the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["STRATEGIES", "Choice", "Curves", "choose", "compressed", "uncompressed"]

Curve: TypeAlias = Callable[[float], float]  # bytes -> seconds


@dataclass(frozen=True)
class Curves:
    """Measured curves, in seconds."""

    send: Curve  # by bytes sent
    encode: Curve  # by bytes of gradient
    decode: Curve  # by bytes of payload
    rate: float  # payload bytes per gradient byte


@dataclass(frozen=True)
class Choice:
    """SeCoPa's choice for a gradient."""

    compress: bool
    partitions: int
    seconds: float


@dataclass(frozen=True)
class _Counts:
    """Counts of a batch, by its ranks and partitions; with `total`, `beta` is of all batches."""

    alpha: Callable[[int, int], int]
    beta: Callable[[int, int], int]
    gamma: Callable[[int, int], int]
    total: bool = False


STRATEGIES: Mapping[str, _Counts] = {
    "ring": _Counts(lambda n, k: 2 * (n - 1), lambda n, k: n, lambda n, k: n),
    "ps": _Counts(lambda n, k: 2 * n, lambda n, k: k + 1, lambda n, k: n + 1, total=True),
    # servers on the workers
    "colocated": _Counts(lambda n, k: 2 * (n - 1), lambda n, k: k, lambda n, k: n, total=True),
}


def uncompressed(size: float, partitions: int, ranks: int, strategy: str, curves: Curves) -> float:
    """T_orig: seconds for `size` bytes."""
    alpha = STRATEGIES[strategy].alpha(ranks, partitions)
    return _batches(partitions, ranks) * alpha * curves.send(size / partitions)


def compressed(size: float, partitions: int, ranks: int, strategy: str, curves: Curves) -> float:
    """T_cpr: seconds for `size` bytes."""
    counts, batches = STRATEGIES[strategy], _batches(partitions, ranks)
    alpha, beta, gamma = (
        count(ranks, partitions) for count in (counts.alpha, counts.beta, counts.gamma)
    )
    chunk = size / partitions
    encodes = beta if counts.total else batches * beta
    return (
        batches * alpha * curves.send(curves.rate * chunk)
        + encodes * curves.encode(chunk)
        + batches * gamma * curves.decode(curves.rate * chunk)
    )


def choose(
    size: float, ranks: int, strategy: str, curves: Curves, most: int | None = None
) -> Choice:
    """Decide if `size` bytes are compressed, and into how many partitions; of equals the fewest.

    most: largest number of partitions to try; four times the ranks by default.
    """
    tried = range(1, (4 * ranks if most is None else most) + 1)
    plain, coded = (
        min((_rounded(way(size, k, ranks, strategy, curves)), k) for k in tried)
        for way in (uncompressed, compressed)
    )
    if coded[0] < plain[0]:
        return Choice(True, coded[1], coded[0])
    return Choice(False, plain[1], plain[0])


def _rounded(seconds: float) -> float:
    """Seconds rounded to 9 digits, so that equal sums compare equal."""
    return float(f"{seconds:.9g}")


def _batches(partitions: int, ranks: int) -> int:
    return math.ceil(partitions / ranks)
