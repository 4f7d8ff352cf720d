"""All-gather: everybody encodes once and decodes everybody; for sparse payloads.

The sum runs in rank order on every rank, the own payload included, so results are identical.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from casync.rounds import refuse_rounds
from casync.strategies import instead, refuse_vote

if TYPE_CHECKING:
    from casync.codec import Codec
    from casync.graph.builder import Builder
    from casync.graph.plan import Part

SPREADS = False


def refuses(codec: Codec | None) -> str | None:
    """Carries every codec that averages in one go."""
    if codec is None:
        return f"strategy 'allgather' needs a codec; without one use {instead(None)}"
    if refusal := refuse_rounds(codec, "allgather"):
        return refusal
    return refuse_vote(codec, "allgather") if codec.vote else None


def build(b: Builder, part: Part) -> Iterator[None]:
    """Exchange all payloads, then add them up."""
    n = b.world_size
    payloads = [b.encode(rank, part, "worker", average=True) for rank in range(n)]
    for slot in range(1, n):
        for rank in range(n):
            b.send(payloads[rank], part, rank, (rank + slot) % n, channel=0)
        yield
    for rank in range(n):
        b.decode(rank, part, payloads[0])
        for payload in payloads[1:]:
            b.merge(rank, part, payload)
