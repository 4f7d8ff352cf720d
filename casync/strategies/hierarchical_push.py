"""`push` between nodes, raw inside them: the sum ends at its owner; others may hold partial sums.

A part has a leader in every node, of which one is the owner. Ranks give their leader their values,
raw, in messages or by the native reduce-scatter (NCCL: one for all parts of a bucket, whatever
their leaders). The other leaders encode the sum of their node, and send it to the owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Codec
from casync.raw import RAW
from casync.stages import INSIDE, Item, Setting, Stage, transfer, work
from casync.strategies import Result, push
from casync.topology import Spread, Topology

SPREADS: Spread = "ranks"
TWO_WAY = False
SHARES = False
RESULT: Result = "sum at owner only"


def refuses(codec: Codec, down: Codec) -> str | None:
    """Accepts the codecs of `push` that can carry the sum of a node."""
    refusal = push.refuses(codec, down)
    if refusal is None and codec.additive == "float16":
        return (
            f"codec {codec.name!r} sends float16, in which the sum of a node may overflow where a "
            "rank's values do not; use strategy 'push', or bfloat16"
        )
    return refusal


def build(b: Builder, part: Part, topology: Topology) -> None:
    """Reduce inside the nodes; then leaders encode and send to the owner, which adds."""
    inside, leaders = b.past(0, topology.largest - 1), topology.leaders(part.owner)
    numbers = topology.numbers(b.only)
    b.phase = 0
    if b.rotates:
        for number in numbers:
            b.phase = 0
            for payload in b.gather(part, topology.nodes[number], leaders[number], RAW):
                b.merge(leaders[number], part, payload)
    else:
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
    """Raw to the node's leader, `push` between the M leaders of a chunk."""
    m, members = len(s.topology.nodes), s.topology.largest
    far, inside = (m - 1) / m / members, (members - 1) / members
    size, parts = item.gradient * far, item.parts * far
    return (
        transfer(s.costs.inside, item.gradient * inside, members - 1, INSIDE),
        work((s.codec.encode, size, s.at_once(parts, size))),
        s.between(item.payload * far, m - 1).waiting(item.busiest),
        work((s.codec.decode, size, s.by_halves(parts, size, m - 1))),
    )
