"""Ring: partial sums travel once around, decoded, added and encoded at every hop.

A part's trip starts behind its owner and ends there; the owner's payload then goes around
unchanged. Every rank encodes a part exactly once, always at the same hop, so one residual per
rank and part is enough: the owner's encode, too, uses the worker state.
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
    """Needs a codec that may encode at every hop."""
    return refuse_single_encoder(codec, "ring")


def build(b: Builder, part: Part) -> Iterator[None]:
    """Reduce-scatter, then all-gather."""
    n, owner = b.world_size, part.owner
    for hop in range(1, n):
        rank = (owner + hop) % n
        payload = b.encode(rank, part, "worker")
        b.send(payload, part, rank, (rank + 1) % n, channel=0)
        b.merge((rank + 1) % n, part, payload)
        yield
    mean = b.encode(owner, part, "worker", average=True, writeback=True)
    for hop in range(1, n):
        rank = (owner + hop) % n
        b.send(mean, part, (rank - 1) % n, rank, channel=1)
        b.decode(rank, part, mean)
        yield
