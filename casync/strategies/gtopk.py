"""A tree of merges, each of which keeps the k largest values of the sum: gTop-k (Shi et al. 2019).

Ranks form a binomial tree below a tensor's owner. Each rank adds its children's payloads to its own
gradient, encodes the sum once, and sends that to its parent; the owner's payload, the average, goes
down the tree unchanged. So every message has k values, and a rank takes part in log2(N) of them up
and down, whereas `exchange` makes it receive (N-1) k values.

As in the paper, the k values are selected from whole tensors. Two differences keep every value. The
paper's ranks select before they merge; here unselected values take part in the merge as well. The
paper returns a rejected value to the rank that it came from, unless another rank's value of that
element gets through; here the rank that rejects keeps it, in the residual of its one encode.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Codec
from casync.stages import Item, Setting, Stage, transfer, work
from casync.strategies import Result, refuse_partial_sums
from casync.topology import Spread, Topology

SPREADS: Spread = "tensors"
TWO_WAY = True
SHARES = False
RESULT: Result = "mean"


def refuses(codec: Codec, down: Codec, name: str) -> str | None:
    """Accepts codecs that may encode sums."""
    return refuse_partial_sums(codec, down, name)


def build(b: Builder, part: Part, topology: Topology) -> None:
    """Go up the tree, one level a phase, and down again."""
    n, owner = b.world_size, part.owner
    levels = (n - 1).bit_length()
    edges = list(_edges(n, None if b.only is None else (b.only - owner) % n))
    for level, parent, child in edges:
        b.phase = level
        source, target = (owner + child) % n, (owner + parent) % n
        payload = b.encode(source, part, part.codec, "worker")
        b.send(payload, part, source, target, channel=0)
        b.merge(target, part, payload)
    b.phase = levels
    mean = b.encode_owned(part, average=True)
    for level, parent, child in reversed(edges):
        b.phase = 2 * levels - 1 - level
        target = (owner + child) % n
        b.send(mean, part, (owner + parent) % n, target, channel=1)
        b.decode(target, part, mean)


def _edges(n: int, only: int | None) -> Iterable[tuple[int, int, int]]:
    """(level, parent, child) of the tree over places 0 to n - 1, or of the one place `only`.

    At each level, multiples of twice its distance are parents of the places one distance behind.
    """
    for level in range((n - 1).bit_length()):
        distance = 1 << level
        parents = range(0, n - distance, 2 * distance)
        for parent in parents if only is None else (only, only - distance):
            if parent in parents:
                yield level, parent, parent + distance


def stages(item: Item, s: Setting) -> tuple[Stage, ...]:
    """Stages up a tree, in which ranks with children (half of all) add and encode, and down again.
    A chunk takes a turn per level, while the links carry other chunks."""
    n = s.topology.world_size
    levels, inner, chunks = (n - 1).bit_length(), n // 2 / n, max(1.0, item.parts)
    kind, others = s.costs.to(1), (n - 1) / n
    sent = transfer(kind, item.payload * others, levels)
    turn = kind.line.per_byte * item.payload / chunks
    added = work((s.codec.hop, item.gradient / chunks, 1)).seconds
    up = replace(sent, delay=sent.delay + (levels - 1) * (turn + added))
    down = replace(sent, delay=sent.delay + (levels - 1) * turn)
    leaves, more = 1 - inner, others - inner
    return (
        work((s.codec.encode, item.gradient * leaves, item.parts * leaves)),
        up,
        work(
            (s.codec.decode, item.gradient * more, item.parts * more),
            (s.codec.hop, item.gradient * inner, item.parts * inner),
        ),
        down,
        work((s.codec.decode, item.gradient * others, item.parts * others)),
    )
