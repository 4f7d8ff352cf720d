"""The sum ends at its owner, as in a reduce-scatter; other ranks' buckets stay as they are.

The owner adds its own values without encoding them. With `pull` after it, an average: see `ps`.
"""

from __future__ import annotations

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Codec
from casync.stages import Item, Setting, Stage, work
from casync.strategies import Result, refuse_special
from casync.topology import Spread, Topology

SPREADS: Spread = "ranks"
TWO_WAY = False
SHARES = False
RESULT: Result = "sum at owner"


def refuses(codec: Codec, down: Codec) -> str | None:
    """Accepts every codec that encodes a rank's values once."""
    return refuse_special(codec, "push")


def build(b: Builder, part: Part, topology: Topology) -> None:
    """All other ranks encode and send to the owner, which adds in rank order."""
    for payload in b.gather(part, topology.ranks, part.owner, part.codec):
        b.merge(part.owner, part, payload)


def stages(item: Item, s: Setting) -> tuple[Stage, ...]:
    """Ranks encode and send all but their own parts to owners, which add."""
    n = s.topology.world_size
    size, parts = item.gradient * (n - 1) / n, item.parts * (n - 1) / n
    sent = s.spread(item.payload * (n - 1) / n)
    return (
        work((s.codec.encode, size, s.at_once(parts, size))),
        *(stage.waiting(item.busiest) for stage in sent),
        work((s.codec.decode, size, s.by_halves(parts, size, n - 1))),
    )
