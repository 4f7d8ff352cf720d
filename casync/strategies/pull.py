"""The owner's values go to all, as in an all-gather, encoded once.

The owner overwrites its own values by what the others decode, so all ranks hold the same bits.
Over nodes, it sends its payload to one rank of each, which passes it on inside: a link between
nodes carries it once, whatever the ranks inside.
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


def refuses(codec: Codec, down: Codec, name: str) -> str | None:
    """Accepts every codec that encodes a rank's values once."""
    return refuse_special(codec, name)


def build(b: Builder, part: Part, topology: Topology, *, average: bool = False) -> None:
    """The owner encodes, as an aggregator, and broadcasts to the leaders, and these to their nodes.
    average: a sum becomes the mean."""
    leaders, payload = topology.leaders(part.owner), b.encode_owned(part, average=average)
    b.broadcast(part, leaders, part.owner, payload)
    last = b.phase
    for number in topology.numbers(b.only):
        b.phase = last
        b.broadcast(part, topology.nodes[number], leaders[number], payload)


def stages(item: Item, s: Setting) -> tuple[Stage, ...]:
    """An owner's parts to the other leaders, then inside the nodes; all others decode them."""
    n = s.topology.world_size
    own, parts = item.gradient / n, item.parts / n
    size, others = own * (n - 1), parts * (n - 1)
    return (
        work((s.codec.encode, own, s.at_once(parts, own))),
        *(stage.waiting(item.busiest) for stage in s.spread(item.payload * s.peers / n)),
        *s.inside(item.payload),
        work((s.codec.decode, size, s.by_halves(others, size, n - 1))),
    )
