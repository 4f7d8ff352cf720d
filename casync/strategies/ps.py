"""Parameter server on the workers: every rank owns parts. `push`, then `pull`.

The owner may encode with another codec than the workers (`Part.down`). Each side keeps the error
feedback of its own codec; with raw on one side only the other direction is compressed, as in MXNet.
"""

from __future__ import annotations

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Codec
from casync.stages import Item, Setting, Stage, work
from casync.strategies import Result, pull, push, refuse_single_encoder
from casync.topology import Spread, Topology

SPREADS: Spread = "ranks"
TWO_WAY = True
SHARES = False
RESULT: Result = "mean"


def refuses(codec: Codec, down: Codec) -> str | None:
    """Accepts codecs whose owner side may encode again."""
    return refuse_single_encoder(codec, down, "ps")


def build(b: Builder, part: Part, topology: Topology) -> None:
    """The owner adds in rank order, encodes the average once, and broadcasts."""
    push.build(b, part, topology)
    pull.build(b, part, topology, average=True)


def stages(item: Item, s: Setting) -> tuple[Stage, ...]:
    """Ranks send all but their own parts to owners, which add, encode once and send back."""
    n = s.topology.world_size
    others, own = (n - 1) / n, 1 / n
    sent = [stage.waiting(item.busiest) for stage in s.spread(item.payload * others)]
    size, parts = item.gradient * others, item.parts * others
    return (
        work((s.codec.encode, size, s.at_once(parts, size))),
        *sent,
        s.merge_and_encode(item, n - 1, own),
        *sent,
        work((s.codec.decode, size, s.by_halves(parts, size, n - 1))),
    )
