"""Values are summed at their owners, as in a reduce-scatter; half of `ps`.

Over nodes, a part has a leader in every node, of which one is the owner. Ranks give their leader
their values, raw, in messages or by the native reduce-scatter (NCCL: one for all parts of a bucket,
whatever their leaders). The other leaders encode the sum of their node, and send it to the owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Codec
from casync.raw import RAW
from casync.stages import Item, Setting, Stage, work
from casync.strategies import Result, over_nodes, refuse_overflow, refuse_special
from casync.topology import Spread, Topology

SPREADS: Spread = "ranks"
TWO_WAY = False
SHARES = False
RESULT: Result = "sum at owner"


def refuses(codec: Codec, down: Codec, name: str) -> str | None:
    """Accepts every codec that encodes once; over nodes those that can carry the sum of a node."""
    refusal = refuse_special(codec, name)
    return refusal or (refuse_overflow(codec, name) if over_nodes(name) else None)


def build(b: Builder, part: Part, topology: Topology) -> None:
    """Reduce inside the nodes; then leaders encode and send to the owner, which adds in order."""
    inside, leaders = b.past(0, topology.largest - 1), topology.leaders(part.owner)
    numbers = topology.numbers(b.only)
    b.phase = 0
    if b.rotates:
        for number in numbers:
            b.phase = 0
            for payload in b.gather(part, topology.nodes[number], leaders[number], RAW):
                b.merge(leaders[number], part, payload)
    elif topology.largest > 1:
        _reduce(b, part, topology, leaders, numbers)
    b.phase = inside
    for payload in b.gather(part, leaders, part.owner, part.codec):
        b.merge(part.owner, part, payload)


def _reduce(
    b: Builder, part: Part, topology: Topology, leaders: Sequence[int], numbers: Iterable[int]
) -> None:
    """Reduce natively inside each node of several ranks; leaders take the sum."""
    raw: dict[int, int] = {}
    every = {part.owner, *b.others(part.owner, leaders)}  # ranks named by later payloads
    every |= {rank for number in numbers for rank in topology.nodes[number] if rank in b.ranks}
    for rank in every:
        if len(topology.nodes[topology.node_of[rank]]) > 1:
            raw[rank] = b.encode(rank, part, RAW, "worker")
    for number in numbers:
        node, leader = topology.nodes[number], leaders[number]
        there = {rank: raw[rank] for rank in node if rank in raw and rank in b.ranks}
        if there:
            b.reduce(part, there, node, to=(leader,))
        if leader in there:
            b.decode(leader, part, there[leader])


def stages(item: Item, s: Setting) -> tuple[Stage, ...]:
    """Raw to the node's leader; leaders encode and send all but their own parts to owners."""
    size, parts = item.gradient * s.far, item.parts * s.far
    return (
        *s.inside(item.gradient),
        work((s.codec.encode, size, s.at_once(parts, size))),
        *(stage.waiting(item.busiest) for stage in s.spread(item.payload * s.far)),
        work((s.codec.decode, size, s.by_halves(parts, size, s.peers))),
    )
