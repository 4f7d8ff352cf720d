"""The least size of messages, by the measured link.

A message costs its latency, however few its bytes, so it should have at least the bytes that the
link moves in that time. An owner's share of a bucket is a message; so if a bucket would give owners
less, a share of the model is that large. If there are so few owners that each gets more of a bucket
anyway, shares remain small, and owners have equally much of each bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from casync.codec import FLOAT_BYTES
from casync.cost import Costs
from casync.graph.plan import BATCH_BYTES
from casync.graph.shares import LEAST_BYTES, SMALL_BYTES
from hipress.plan.workload import BUCKET

if TYPE_CHECKING:
    from casync.codec import Codec

__all__ = ["least_share"]

_SAMPLE = 1 << 20  # elements


def least_share(costs: Costs, codec: Codec, owners: int) -> int:
    """Least bytes of gradient in an owner's share of a model, for `share_out`.

    A power of two, so that another measurement of the same link gives the same owners.
    """
    line = costs.to(1).line
    if line.per_byte <= 0 or line.latency <= 0:  # no measurement
        return LEAST_BYTES
    payload = line.latency / line.per_byte
    gradient = payload * FLOAT_BYTES * _SAMPLE / max(1, codec.payload_bytes(_SAMPLE))
    rounded = 1 << max(0, round(gradient).bit_length() - 1)
    least = min(max(rounded, SMALL_BYTES), BATCH_BYTES)
    return least if owners * least > BUCKET else min(least, LEAST_BYTES)
