"""How small a message may be, by what was measured of the link.

A message costs its latency however few bytes it has, so the bytes that the link moves meanwhile are
the least that is worth one. The latency is that of an exchange with all peers at once, for each of
them: over gloo each message takes a core some time, over NCCL all share one launch. An owner's
share of a model is a message in a bucket that has one of it. Shares above LEAST_BYTES are not worth
what they spare: few owners would have all of a bucket, and the others wait for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casync.codec import FLOAT_BYTES
from casync.cost import Costs
from casync.graph.shares import LEAST_BYTES, SMALL_BYTES

if TYPE_CHECKING:
    from casync.codec import Codec

__all__ = ["least_share"]

_SAMPLE = 1 << 20  # elements


def least_share(costs: Costs, codec: Codec, owners: int) -> int:
    """Bytes of gradient in an owner's share of a model, at least: for `share_out`.

    A power of two, so that another measurement of the same link gives the same owners.
    """
    peers = min(costs.exchange, key=lambda known: abs(known - owners + 1))
    line = costs.exchange[peers].line
    if line.per_byte <= 0 or line.latency <= 0:  # nothing is known
        return LEAST_BYTES
    payload = line.latency / peers / line.per_byte
    gradient = payload * FLOAT_BYTES * _SAMPLE / max(1, codec.payload_bytes(_SAMPLE))
    rounded = 1 << max(0, round(gradient).bit_length() - 1)
    return min(max(rounded, SMALL_BYTES), LEAST_BYTES)
