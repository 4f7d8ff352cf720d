"""The owner's values go to all, as in an all-gather, encoded once.

The owner overwrites its own values by what the others decode, so all ranks hold the same bits.
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
RESULT: Result = "owner's"


def refuses(codec: Codec, down: Codec) -> str | None:
    """Accepts every codec that encodes a rank's values once."""
    return refuse_special(codec, "pull")


def build(b: Builder, part: Part, topology: Topology, *, average: bool = False) -> None:
    """The owner encodes, as an aggregator, and broadcasts. average: a sum becomes the mean."""
    b.broadcast(part, topology.ranks, part.owner, b.encode_owned(part, average=average))


def stages(item: Item, s: Setting) -> tuple[Stage, ...]:
    """An owner encodes its parts and sends them to all others, which decode them."""
    n = s.topology.world_size
    own, parts = item.gradient / n, item.parts / n
    sent = s.spread(item.payload * (n - 1) / n)
    size, others = own * (n - 1), parts * (n - 1)
    return (
        work((s.codec.encode, own, s.at_once(parts, own))),
        *(stage.waiting(item.busiest) for stage in sent),
        work((s.codec.decode, size, s.by_halves(others, size, n - 1))),
    )
