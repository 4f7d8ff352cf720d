"""`pull` between nodes: an owner sends its payload to one rank of each, which passes it on inside.

The payload is encoded once and decoded by every rank, so all hold the same bits, and a link between
nodes carries it once for each node, whatever the ranks inside.
"""

from __future__ import annotations

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Codec
from casync.stages import INSIDE, Item, Setting, Stage, transfer, work
from casync.strategies import Result, pull
from casync.topology import Spread, Topology

SPREADS: Spread = "ranks"
TWO_WAY = False
SHARES = False
RESULT: Result = "owner's"


def refuses(codec: Codec, down: Codec) -> str | None:
    """Accepts the codecs of `pull`."""
    return pull.refuses(codec, down)


def build(b: Builder, part: Part, topology: Topology, *, average: bool = False) -> None:
    """The owner encodes and broadcasts to the leaders, and these to their nodes. average: a sum
    becomes the mean."""
    leaders, payload = topology.leaders(part.owner), b.encode_owned(part, average=average)
    b.broadcast(part, leaders, part.owner, payload)
    last = b.phase
    for number in topology.numbers(b.only):
        b.phase = last
        b.broadcast(part, topology.nodes[number], leaders[number], payload)


def stages(item: Item, s: Setting) -> tuple[Stage, ...]:
    """An owner's parts to the other leaders, then payloads inside, which all others decode."""
    n, m, members = s.topology.world_size, len(s.topology.nodes), s.topology.largest
    own, parts = item.gradient / n, item.parts / n
    size, others = own * (n - 1), parts * (n - 1)
    return (
        work((s.codec.encode, own, s.at_once(parts, own))),
        s.between(item.payload * (m - 1) / n, m - 1).waiting(item.busiest),
        transfer(s.costs.inside, item.payload * (members - 1) / members, members - 1, INSIDE),
        work((s.codec.decode, size, s.by_halves(others, size, n - 1))),
    )
