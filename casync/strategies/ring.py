"""Ring: partial sums travel once around, decoded, added and encoded at every hop.

A part's trip starts behind its owner and ends there; the owner's payload then goes around
unchanged. Every rank encodes a part exactly once, always at the same hop: the owner as an
aggregator, the others as workers.
"""

from __future__ import annotations

from collections.abc import Iterable

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Codec
from casync.stages import Item, Setting, Stage, transfer, work
from casync.strategies import Result, refuse_partial_sums
from casync.topology import Spread, Topology

SPREADS: Spread = "ranks"
TWO_WAY = True
SHARES = False
RESULT: Result = "mean"


def refuses(codec: Codec, down: Codec, name: str) -> str | None:
    """Accepts codecs that may encode at every hop, and whose numbers can hold the sum."""
    return refuse_partial_sums(codec, down, name)


def build(b: Builder, part: Part, topology: Topology) -> None:
    """Reduce-scatter, then all-gather."""
    n, owner = b.world_size, part.owner
    for hop in _hops(b, owner + 1):
        b.phase = hop
        rank, following = (owner + hop + 1) % n, (owner + hop + 2) % n
        payload = b.encode(rank, part, part.codec, "worker")
        b.send(payload, part, rank, following, channel=0)
        b.merge(following, part, payload)
    b.phase = n - 1
    mean = b.encode_owned(part, average=True)
    for hop in _hops(b, owner):
        b.phase = n - 1 + hop
        rank = (owner + hop + 1) % n
        b.send(mean, part, (rank - 1) % n, rank, channel=1)
        b.decode(rank, part, mean)


def _hops(b: Builder, start: int) -> Iterable[int]:
    """Hops of a trip of n - 1 hops from rank `start` that begin or end at a rank that is built."""
    n = b.world_size
    if b.only is None:
        return range(n - 1)
    place = (b.only - start) % n
    return [hop for hop in (place - 1, place) if 0 <= hop < n - 1]


def stages(item: Item, s: Setting) -> tuple[Stage, ...]:
    """N-1 hops, each of which decodes, adds and encodes, and N-1 that only decode."""
    n = s.topology.world_size
    share = (n - 1) / n
    sent = transfer(s.costs.to(1), item.payload * share, n - 1)
    return (
        work((s.codec.encode, item.gradient / n, item.parts / n)),
        sent,
        work((s.codec.hop, item.gradient * share, item.parts * share)),
        sent,
        work((s.codec.decode, item.gradient * share, item.parts * share)),
    )
