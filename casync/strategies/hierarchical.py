"""Raw inside a node, compressed between nodes.

A part has a leader in every node. Ranks give their leader their values, raw, in messages or by the
native reduce-scatter (NCCL: one for all parts of a bucket, whatever their leaders). The leaders, of
which one is the part's owner, average as `ps` does; each passes the owner's payload, unchanged, to
its node. So the traffic between nodes is that of one rank per node, whatever the ranks inside.
Parts are spread so that all ranks lead, and all nodes own, equally much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from casync.raw import RAW
from casync.stages import INSIDE, Item, Setting, Stage, transfer, work
from casync.strategies import refuse_partial_sums

if TYPE_CHECKING:
    from casync.building.builder import Builder
    from casync.building.parts import Part
    from casync.codec import Codec
    from casync.strategies import Result
    from casync.topology import Spread, Topology

SPREADS: Spread = "nodes"
TWO_WAY = True
SHARES = False
RESULT: Result = "mean"


def refuses(codec: Codec, down: Codec) -> str | None:
    """Accepts the codecs of `ps`: leaders encode once, and the owner again."""
    return refuse_partial_sums(codec, down, "hierarchical")


def owners(part: Part, world_size: int) -> tuple[int, ...]:
    """The part's owner."""
    return (part.owner,)


def build(b: Builder, part: Part, topology: Topology) -> None:
    """Reduce inside the nodes, run `ps` between the leaders, and broadcast inside the nodes."""
    owner, inside = part.owner, b.past(0, topology.largest - 1)
    place = topology.nodes[topology.node_of[owner]].index(owner)
    leaders = [node[place % len(node)] for node in topology.nodes]
    mine = [topology.node_of[rank] for rank in b.ranks] if b.only is not None else None
    numbers = range(len(leaders)) if mine is None else mine
    b.phase = 0
    if b.rotates:
        for number in numbers:
            b.phase = 0
            for payload in b.gather(part, topology.nodes[number], leaders[number], RAW):
                b.merge(leaders[number], part, payload)
    else:
        _reduce(b, part, topology, leaders, numbers)
    b.phase = inside
    for payload in b.gather(part, leaders, owner, part.codec):
        b.merge(owner, part, payload)
    mean = b.encode_owned(part, average=True)
    b.broadcast(part, leaders, owner, mean)
    last = b.phase
    for number in numbers:
        b.phase = last
        b.broadcast(part, topology.nodes[number], leaders[number], mean)


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
