"""Parameters to neighbours only: CHOCO-SGD (Koloskova et al. 2019), its communication.

Every rank encodes how its parameters have changed against what its neighbours know of them, sends
that to these, and follows what they send. Its bucket stays as it is: how far parameters then move
towards those of neighbours, which no other rank needs to know, is for who submits them. Ranks
differ by design. Which ranks are neighbours stands behind the colon: `gossip:ring`,
`gossip:torus` or `gossip:complete`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from casync.errors import PlanError
from casync.estimates import Estimate
from casync.strategies import instead

if TYPE_CHECKING:
    from casync.codec import Codec
    from casync.graph.builder import Builder
    from casync.graph.plan import Part
    from casync.topology import Spread, Topology

__all__ = ["LINKS", "Grid", "grid"]

SPREADS: Spread = ""
TWO_WAY = False

LINKS = ("ring", "torus", "complete")


def refuses(codec: Codec, down: Codec) -> str | None:
    """Carries estimates of parameters only."""
    if isinstance(codec, Estimate):
        return None
    return (
        f"strategy 'gossip' averages parameters with those of neighbours, not gradients, as codec "
        f"{codec.name!r} is asked to; see hipress.Gossip, or use {instead(codec)}"
    )


def build(b: Builder, part: Part, topology: Topology) -> None:
    """In a turn each rank sends to one neighbour and follows what another one sends."""
    ranks = grid(part.strategy.partition(":")[2], b.world_size)
    there = {rank for own in b.ranks for rank in (own, *ranks.neighbours(own))}
    payloads = {rank: b.encode(rank, part, part.codec, "worker", number=0) for rank in there}
    for number, move in enumerate(ranks.moves):
        b.phase = b.turn(0, number)
        for source in sorted({at for own in b.ranks for at in (own, ranks.before(own, move))}):
            target = ranks.after(source, move)
            b.send(payloads[source], part, source, target, channel=0)
            b.follow(target, part, payloads[source], source)


@dataclass(frozen=True)
class Grid:
    """Ranks in rows, whose ends meet. A move leads from each rank to one of its neighbours, and no
    two moves to the same one."""

    rows: int
    columns: int
    moves: tuple[tuple[int, int], ...]  # rows, columns

    def after(self, rank: int, move: tuple[int, int]) -> int:
        """To which rank a move leads from this one."""
        row, column = divmod(rank, self.columns)
        return (row + move[0]) % self.rows * self.columns + (column + move[1]) % self.columns

    def before(self, rank: int, move: tuple[int, int]) -> int:
        """From which rank a move leads to this one."""
        return self.after(rank, (-move[0], -move[1]))

    def neighbours(self, rank: int) -> Sequence[int]:
        """As many for every rank, and each the other's."""
        return sorted(self.after(rank, move) for move in self.moves)


@cache
def grid(links: str, world_size: int) -> Grid:
    """How ranks are linked; raises PlanError where so many ranks cannot be, or for an unknown name.

    ring: two neighbours each. torus: the grid of `world_size` ranks that is closest to a square,
    four neighbours each, or three in a grid of two rows. complete: everybody.
    """
    if links == "ring":
        return _grid(1, world_size, [(0, 1), (0, -1)])
    if links == "complete":
        return _grid(1, world_size, [(0, distance) for distance in range(1, world_size)])
    if links != "torus":
        raise PlanError(f"unknown links {links!r} of strategy 'gossip'; one of {', '.join(LINKS)}")
    rows = max(n for n in range(1, world_size + 1) if world_size % n == 0 and n * n <= world_size)
    if rows == 1 < world_size:
        raise PlanError(
            f"{world_size} ranks make no torus, which has at least two rows and two columns; use "
            "a ring, or a number of ranks such as 4, 6, 8 or 9"
        )
    return _grid(rows, world_size // rows, [(0, 1), (0, -1), (1, 0), (-1, 0)])


def _grid(rows: int, columns: int, moves: Sequence[tuple[int, int]]) -> Grid:
    """Without what leads nowhere, or to where another move leads."""
    distinct = dict.fromkeys((down % rows, along % columns) for down, along in moves)
    return Grid(rows, columns, tuple(move for move in distinct if any(move)))
