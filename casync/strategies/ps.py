"""Parameter server on the workers: every rank owns parts, workers push, owners broadcast.

In slot s of the push, rank r sends to r + s: no two ranks send to the same one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from casync.strategies import refuse_single_encoder

if TYPE_CHECKING:
    from casync.codec import Codec
    from casync.graph.builder import Builder
    from casync.graph.plan import Part

SPREADS = True


def refuses(codec: Codec | None) -> str | None:
    """Needs a codec that may encode at the owner again."""
    return refuse_single_encoder(codec, "ps")


def build(b: Builder, part: Part) -> Iterator[None]:
    """Push to the owner; it adds in rank order, encodes the average once, and broadcasts."""
    n, owner = b.world_size, part.owner
    pushed = {}
    for slot in range(1, n):
        rank = (owner - slot) % n
        pushed[rank] = b.encode(rank, part, "worker")
        b.send(pushed[rank], part, rank, owner, channel=0)
        yield
    for rank in sorted(pushed):
        b.merge(owner, part, pushed[rank])
    mean = b.encode(owner, part, "aggregator", average=True, writeback=True)
    for slot in range(1, n):
        rank = (owner + slot) % n
        b.send(mean, part, owner, rank, channel=1)
        b.decode(rank, part, mean)
        yield
