"""Majority vote at owners: every rank, the owner too, pushes its payload; the owner adds up what
they decode to, encodes the sum once more without state, and broadcasts.

signSGD with majority vote (Bernstein et al. 2018): the sign of a sum of signs, never averaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from casync.rounds import refuse_rounds
from casync.strategies import instead

if TYPE_CHECKING:
    from casync.codec import Codec
    from casync.graph.builder import Builder
    from casync.graph.plan import Part

SPREADS = True


def refuses(codec: Codec | None) -> str | None:
    """Carries codecs that vote."""
    if codec is None:
        return f"strategy 'vote' needs a codec; without one use {instead(None)}"
    if refusal := refuse_rounds(codec, "vote"):
        return refusal
    if not codec.vote:
        return f"codec {codec.name!r} does not vote; use {instead(codec)}"
    return None


def build(b: Builder, part: Part) -> Iterator[None]:
    """Push to the owner, who counts its own vote first and the others in rank order."""
    n, owner = b.world_size, part.owner
    pushed = {}
    for slot in range(1, n):
        rank = (owner - slot) % n
        pushed[rank] = b.encode(rank, part, "worker")
        b.send(pushed[rank], part, rank, owner, channel=0)
        yield
    b.decode(owner, part, b.encode(owner, part, "worker"))
    for rank in sorted(pushed):
        b.merge(owner, part, pushed[rank])
    winner = b.encode(owner, part, "aggregator", writeback=True)
    for slot in range(1, n):
        rank = (owner + slot) % n
        b.send(winner, part, owner, rank, channel=1)
        b.decode(rank, part, winner)
        yield
