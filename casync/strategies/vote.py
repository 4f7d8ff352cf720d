"""Majority vote at owners, as in signSGD (Bernstein et al. 2018).

Every rank, the owner included, pushes its payload; the owner adds the decoded signs, encodes the
sum once more without state, and broadcasts. The result is the sign of a sum, never averaged.
"""

from __future__ import annotations

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Codec
from casync.strategies import Result, instead, refuse_rounds
from casync.topology import Spread, Topology

SPREADS: Spread = "ranks"
TWO_WAY = False
SHARES = False
RESULT: Result = "majority"
stages = None  # not predicted


def refuses(codec: Codec, down: Codec, name: str) -> str | None:
    """Accepts codecs that vote."""
    if refusal := refuse_rounds(codec, name):
        return refusal
    if not codec.vote:
        return f"codec {codec.name!r} does not vote; use {instead(codec)}"
    return None


def build(b: Builder, part: Part, topology: Topology) -> None:
    """Push to the owner, who adds its own vote first and the others in rank order."""
    owner = part.owner
    pushed = b.gather(part, topology.ranks, owner, part.codec)
    b.decode(owner, part, b.encode(owner, part, part.codec, "worker"))
    for payload in pushed:
        b.merge(owner, part, payload)
    winner = b.encode(owner, part, part.codec, "aggregator", writeback=True)
    b.broadcast(part, topology.ranks, owner, winner)
