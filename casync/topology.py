"""Nodes and their ranks: links between nodes are slow, links within a node fast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Literal, TypeAlias

from casync.errors import PlanError

__all__ = ["Spread", "Topology"]

#: The owners over which a strategy spreads chunks: none, all ranks, or all nodes evenly. With
#: "tensors" an uncut tensor has one owner, and all ranks own equally many.
Spread: TypeAlias = Literal["", "ranks", "nodes", "tensors"]


@dataclass(frozen=True)
class Topology:
    """Ranks grouped by node. Raises PlanError unless each of the ranks 0 to N-1 occurs once."""

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        if ranks != list(range(len(ranks))) or not all(self.nodes) or not ranks:
            raise PlanError(
                f"a topology of {_shown(self.nodes)}: expected nodes that hold ranks 0 to N-1, "
                "each rank once, and no node without ranks"
            )

    @classmethod
    def flat(cls, world_size: int) -> Topology:
        """Every rank is a node of its own."""
        if world_size < 1:
            raise PlanError(f"world size {world_size} is not positive")
        return cls.even(world_size, 1)

    @classmethod
    def even(cls, world_size: int, per_node: int) -> Topology:
        """Nodes of `per_node` consecutive ranks; the last node may have fewer."""
        firsts = range(0, world_size, per_node)
        return cls(tuple(tuple(range(i, min(i + per_node, world_size))) for i in firsts))

    @classmethod
    def of(cls, nodes: Iterable[Iterable[int]]) -> Topology:
        """Nodes ordered by their first ranks, with ranks in order."""
        return cls(tuple(sorted(tuple(sorted(node)) for node in nodes)))

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.world_size)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Node number by rank."""
        numbers = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        return tuple(numbers[rank] for rank in self.ranks)

    @cached_property
    def largest(self) -> int:
        """Number of ranks of the largest node."""
        return max(map(len, self.nodes))

    @cached_property
    def flattened(self) -> Topology:
        """The same ranks, each a node of its own."""
        return Topology.flat(self.world_size)

    @property
    def nested(self) -> bool:
        """True if there are several nodes, and one has several ranks."""
        return 1 < len(self.nodes) < self.world_size

    def leaders(self, owner: int) -> Sequence[int]:
        """A rank of each node: the owner, and in other nodes the one at its place."""
        if self.largest == 1:
            return self.ranks
        place = self.nodes[self.node_of[owner]].index(owner)
        return tuple(node[place % len(node)] for node in self.nodes)

    def numbers(self, only: int | None) -> Sequence[int]:
        """Numbers of all nodes, or of the one that has the rank `only`."""
        return range(len(self.nodes)) if only is None else (self.node_of[only],)

    def turns(self, spread: Spread) -> Sequence[int]:
        """The cycle of ranks that own chunks; with "nodes" every node occurs equally often."""
        if spread != "nodes":
            return self.ranks if spread else ()
        return self._node_turns

    @cached_property
    def _node_turns(self) -> tuple[int, ...]:
        """Successive ranks are on different nodes, and at different places within them."""
        count, places = len(self.nodes), self.largest
        every = lcm(count, places)
        pairs = ((turn % places, (turn + turn // every) % count) for turn in range(count * places))
        return tuple(self.nodes[node][place % len(self.nodes[node])] for place, node in pairs)

    def __str__(self) -> str:
        """Text such as `2 nodes of 4`, or the ranks of each node."""
        if self == Topology.even(self.world_size, self.largest):
            plural = "s" * (len(self.nodes) > 1)
            return f"{len(self.nodes)} node{plural} of {self.largest}"
        return f"nodes {', '.join(str(list(node)) for node in self.nodes)}"


def _shown(nodes: Sequence[Sequence[int]]) -> str:
    texts = [str(list(node)) for node in nodes[:6]]
    return ", ".join([*texts, "..."] if len(nodes) > 6 else texts) or "no nodes"
