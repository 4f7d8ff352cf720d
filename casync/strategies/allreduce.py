"""The native collective: for raw values, and for payloads that add without decoding.

A codec with rounds has several payloads, each based on the sum of the one before.
"""

from __future__ import annotations

from casync import rounds
from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Codec
from casync.stages import Item, Setting, Stage, work
from casync.strategies import Result, instead, refuse_vote
from casync.topology import Spread, Topology

SPREADS: Spread = ""
TWO_WAY = False
SHARES = True
RESULT: Result = "mean"


def refuses(codec: Codec, down: Codec, name: str) -> str | None:
    """Accepts additive codecs and those with rounds."""
    if codec.rounds:
        return None
    if codec.vote:
        return refuse_vote(codec, name)
    if codec.additive is None:
        return (
            f"payloads of codec {codec.name!r} do not add, which strategy {name!r} needs; "
            f"use {instead(codec)}"
        )
    if not codec.fixed:
        return f"codec {codec.name!r} is additive but of varying length; use strategy 'exchange'"
    return None


def build(b: Builder, part: Part, topology: Topology) -> None:
    """Scale by 1/N, sum natively, decode."""
    if part.rounds:
        rounds.build(b, part)
        return
    payloads = {rank: b.encode(rank, part, part.codec, "worker", average=True) for rank in b.ranks}
    b.reduce(part, payloads, topology.ranks)
    for rank, payload in payloads.items():
        b.decode(rank, part, payload)


def stages(item: Item, s: Setting) -> tuple[Stage, ...]:
    """Stages of an all-reduce; each round takes an equal share of the encode and of the payload."""
    share = 1 / item.rounds
    calls = s.at_once(item.parts, item.gradient) if item.rounds == 1 else item.parts * share
    each = (
        work((s.codec.encode, item.gradient * share, calls)),
        s.reduce(item.payload * share, item.parts, item.additive),
    )
    return (*each * item.rounds, work((s.codec.decode, item.gradient, item.parts)))
