"""The least size of a message, from measurements of the link.

A message costs its latency for any number of bytes, so it should have at least the bytes that the
link moves in that time. The latency is the share of one peer in an exchange with all peers at once,
and the engine's own time for a message. An owner's share of the model is one message of a bucket,
if the bucket has a single one for it. Shares above LEAST_BYTES do not pay: few owners would have
all of a bucket, and the others would wait for them.
"""

from __future__ import annotations

from casync.codec import FLOAT_BYTES, Codec
from casync.cost import Costs
from casync.graph.shares import LEAST_BYTES, SMALL_BYTES

__all__ = ["least_share"]

_SAMPLE = 1 << 20  # elements
_POST = 1e-5  # seconds of the engine for a message, without the transport: python -m bench.bulk


def least_share(costs: Costs, codec: Codec, owners: int) -> int:
    """The least bytes of gradient in an owner's share of the model, for `share_out`.

    A power of two, so that another measurement of the same link gives the same owners.
    """
    peers = min(costs.exchange, key=lambda known: abs(known - owners + 1))
    line = costs.exchange[peers].line
    if line.per_byte <= 0:  # not measured
        return LEAST_BYTES
    payload = (line.latency / peers + _POST) / line.per_byte
    gradient = payload * FLOAT_BYTES * _SAMPLE / max(1, codec.payload_bytes(_SAMPLE))
    rounded = 1 << max(0, round(gradient).bit_length() - 1)
    return min(max(rounded, SMALL_BYTES), LEAST_BYTES)
