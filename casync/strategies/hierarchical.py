"""Raw inside a node, compressed between nodes: `hierarchical_push`, then `hierarchical_pull`.

The leaders, one in every node, of which one is the part's owner, average as `ps` does; each passes
the owner's payload, unchanged, to its node. So the traffic between nodes is that of one rank per
node, whatever the ranks inside. Parts are spread so that all ranks lead, and all nodes own, equally
much.
"""

from __future__ import annotations

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Codec
from casync.stages import INSIDE, Item, Setting, Stage, transfer, work
from casync.strategies import (
    Result,
    hierarchical_pull,
    hierarchical_push,
    refuse_partial_sums,
)
from casync.topology import Spread, Topology

SPREADS: Spread = "nodes"
TWO_WAY = True
SHARES = False
RESULT: Result = "mean"


def refuses(codec: Codec, down: Codec) -> str | None:
    """Accepts the codecs of `ps`: leaders encode once, and the owner again."""
    return refuse_partial_sums(codec, down, "hierarchical")


def build(b: Builder, part: Part, topology: Topology) -> None:
    """Reduce inside the nodes, run `ps` between the leaders, and broadcast inside the nodes."""
    hierarchical_push.build(b, part, topology)
    hierarchical_pull.build(b, part, topology, average=True)


def stages(item: Item, s: Setting) -> tuple[Stage, ...]:
    """Raw to the node's leader, `ps` between the M leaders of a chunk, payloads back inside."""
    m, members = len(s.topology.nodes), s.topology.largest
    led, inside = 1 / members, (members - 1) / members
    far = led * (m - 1) / m
    crossing = s.between(item.payload * far, m - 1).waiting(item.busiest)
    size, peers = item.gradient * far, s.topology.world_size - 1
    return (
        transfer(s.costs.inside, item.gradient * inside, members - 1, INSIDE),
        work((s.codec.encode, size, s.at_once(item.parts * far, size))),
        crossing,
        s.merge_and_encode(item, m - 1, led / m),
        crossing,
        transfer(s.costs.inside, item.payload * inside, members - 1, INSIDE),
        work((s.codec.decode, item.gradient, s.by_halves(item.parts, item.gradient, peers))),
    )
