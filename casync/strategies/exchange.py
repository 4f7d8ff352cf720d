"""Every rank encodes once, and decodes and adds up every rank's payload; for sparse payloads.

The sum runs in rank order on every rank, the own payload included, so results are identical.
"""

from __future__ import annotations

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Codec
from casync.stages import Item, Setting, Stage, work
from casync.strategies import Result, refuse_special
from casync.topology import Spread, Topology

SPREADS: Spread = ""
TWO_WAY = False
SHARES = True
RESULT: Result = "mean"


def refuses(codec: Codec, down: Codec, name: str) -> str | None:
    """Accepts every codec that averages in one exchange."""
    return refuse_special(codec, name)


def build(b: Builder, part: Part, topology: Topology) -> None:
    """Exchange all payloads, then add them up. In each turn a rank sends to one other rank."""
    n = b.world_size
    payloads = [b.encode(rank, part, part.codec, "worker", average=True) for rank in range(n)]
    for distance in range(1, n):
        b.phase = b.turn(0, distance - 1)
        for rank in sorted({(r - back) % n for r in b.ranks for back in (0, distance)}):
            b.send(payloads[rank], part, rank, (rank + distance) % n, channel=0)
    for rank in b.ranks:
        b.decode(rank, part, payloads[0])
        for payload in payloads[1:]:
            b.merge(rank, part, payload)


def stages(item: Item, s: Setting) -> tuple[Stage, ...]:
    """Every rank encodes once and decodes all payloads."""
    n = s.topology.world_size
    return (
        work((s.codec.encode, item.gradient, s.at_once(item.parts, item.gradient))),
        *s.spread(item.payload * (n - 1)),
        work((s.codec.decode, item.gradient * n, item.parts * (1 + n.bit_length()))),
    )
