"""Parameter server on the workers: every rank owns parts. `push`, then `pull`.

The owner may encode with another codec than the workers (`Part.down`). Each side keeps the error
feedback of its own codec; with raw on one side only the other direction is compressed, as in MXNet.

Over nodes (`hierarchical`) it is raw inside a node, compressed between nodes: the traffic between
nodes is that of one rank per node, whatever the ranks inside. Parts are spread so that all ranks
lead, and all nodes own, equally much.
"""

from __future__ import annotations

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Codec
from casync.stages import Item, Setting, Stage, work
from casync.strategies import (
    Result,
    over_nodes,
    pull,
    push,
    refuse_partial_sums,
    refuse_single_encoder,
)
from casync.topology import Spread, Topology

SPREADS: Spread = "nodes"
TWO_WAY = True
SHARES = False
RESULT: Result = "mean"


def refuses(codec: Codec, down: Codec, name: str) -> str | None:
    """Accepts codecs whose owner side may encode again; over nodes those that can carry sums."""
    refuse = refuse_partial_sums if over_nodes(name) else refuse_single_encoder
    return refuse(codec, down, name)


def build(b: Builder, part: Part, topology: Topology) -> None:
    """The owner adds in rank order, encodes the average once, and broadcasts."""
    push.build(b, part, topology)
    pull.build(b, part, topology, average=True)


def stages(item: Item, s: Setting) -> tuple[Stage, ...]:
    """Raw to the node's leader; leaders send all but their own parts to owners, which add, encode
    once and send back; payloads inside."""
    far, decoded = s.far, 1.0 if s.groups.largest > 1 else s.far
    sent = [stage.waiting(item.busiest) for stage in s.spread(item.payload * far)]
    size, parts = item.gradient * far, item.parts * far
    read, each = item.gradient * decoded, item.parts * decoded
    return (
        *s.inside(item.gradient),
        work((s.codec.encode, size, s.at_once(parts, size))),
        *sent,
        s.merge_and_encode(item, s.peers, 1 / len(s.groups.nodes) / s.groups.largest),
        *sent,
        *s.inside(item.payload),
        work((s.codec.decode, read, s.by_halves(each, read, s.topology.world_size - 1))),
    )
