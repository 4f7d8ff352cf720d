"""Gossip: parameters travel to neighbours only, as in CHOCO-SGD (Koloskova et al. 2019).

Every rank encodes the difference between its parameters and its neighbours' estimate of them, sends
it to the neighbours, and updates its copies of their estimates from their payloads. The bucket is
unchanged: the caller then moves its parameters towards those of the neighbours, without further
messages. Ranks have different parameters by design. The argument after the colon selects the
neighbours: `gossip:ring`, `gossip:torus` or `gossip:complete`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from casync.building.builder import Builder
from casync.building.parts import Part
from casync.codec import Codec
from casync.errors import PlanError
from casync.estimates import Estimate
from casync.strategies import Result, instead
from casync.topology import Spread, Topology

__all__ = ["LINKS", "Grid", "grid"]

SPREADS: Spread = ""
TWO_WAY = False
SHARES = False
RESULT: Result = "own"
stages = None  # not predicted

LINKS = ("ring", "torus", "complete")


def refuses(codec: Codec, down: Codec, name: str) -> str | None:
    """Accepts estimates of parameters only."""
    if isinstance(codec, Estimate):
        return None
    return (
        f"strategy 'gossip' averages parameters with those of neighbours, not gradients, as codec "
        f"{codec.name!r} is asked to; see hipress.Gossip, or use {instead(codec)}"
    )


def build(b: Builder, part: Part, topology: Topology) -> None:
    """In each turn a rank sends to one neighbour and updates its estimate of another."""
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
    """Ranks in rows and columns whose ends are joined. A move leads from each rank to one of its
    neighbours; no two moves lead to the same one."""

    rows: int
    columns: int
    moves: tuple[tuple[int, int], ...]  # rows, columns

    def after(self, rank: int, move: tuple[int, int]) -> int:
        """The rank to which a move leads from `rank`."""
        row, column = divmod(rank, self.columns)
        return (row + move[0]) % self.rows * self.columns + (column + move[1]) % self.columns

    def before(self, rank: int, move: tuple[int, int]) -> int:
        """The rank from which a move leads to `rank`."""
        return self.after(rank, (-move[0], -move[1]))

    def neighbours(self, rank: int) -> Sequence[int]:
        """Sorted neighbours of a rank. The relation is mutual; all ranks have equally many."""
        return sorted(self.after(rank, move) for move in self.moves)


@cache
def grid(links: str, world_size: int) -> Grid:
    """The grid of linked ranks; raises PlanError for an unknown name or an unsuited world size.

    ring: two neighbours each. torus: the grid of `world_size` ranks that is closest to a square,
    four neighbours each, or three in a grid of two rows. complete: all other ranks.
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
    """Drop moves that lead nowhere, or to the same rank as another move."""
    distinct = dict.fromkeys((down % rows, along % columns) for down, along in moves)
    return Grid(rows, columns, tuple(move for move in distinct if any(move)))
