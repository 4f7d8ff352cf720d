"""Which ranks share a node: between nodes links are slow, within one they are fast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import Literal, TypeAlias

from casync.errors import PlanError

__all__ = ["Spread", "Topology"]

#: over what a strategy spreads the owners of chunks: nothing, all ranks, or all nodes evenly; with
#: "tensors" a tensor that is not cut has one owner, and all ranks own as many as any other
Spread: TypeAlias = Literal["", "ranks", "nodes", "tensors"]


@dataclass(frozen=True)
class Topology:
    """Nodes of ranks. Raises PlanError unless ranks 0 to N-1 are there, each once."""

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        found = sorted(rank for node in self.nodes for rank in node)
        if found != list(range(len(found))) or not all(self.nodes) or not found:
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
        """Nodes of so many neighbours; the last one may have fewer."""
        firsts = range(0, world_size, per_node)
        return cls(tuple(tuple(range(i, min(i + per_node, world_size))) for i in firsts))

    @classmethod
    def of(cls, nodes: Iterable[Iterable[int]]) -> Topology:
        """Nodes in the order of their first ranks, and ranks in order."""
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
        """By rank: the number of its node."""
        numbers = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        return tuple(numbers[rank] for rank in self.ranks)

    @cached_property
    def largest(self) -> int:
        """Ranks of the largest node."""
        return max(map(len, self.nodes))

    @property
    def nested(self) -> bool:
        """True if there are several nodes, and one has several ranks."""
        return 1 < len(self.nodes) < self.world_size

    def turns(self, spread: Spread) -> Sequence[int]:
        """Ranks that own chunks, in turn: with "nodes" each node has as many turns as another."""
        if spread != "nodes":
            return self.ranks if spread else ()
        return self._node_turns

    @cached_property
    def _node_turns(self) -> tuple[int, ...]:
        """Neighbours in turn are in other nodes, and in other places of these."""
        count, places = len(self.nodes), self.largest
        every = lcm(count, places)
        pairs = ((turn % places, (turn + turn // every) % count) for turn in range(count * places))
        return tuple(self.nodes[node][place % len(self.nodes[node])] for place, node in pairs)

    def __str__(self) -> str:
        """Such as `2 nodes of 4`, or the ranks of each node."""
        if self == Topology.even(self.world_size, self.largest):
            return f"{len(self.nodes)} nodes of {self.largest}"
        return f"nodes {', '.join(str(list(node)) for node in self.nodes)}"


def _shown(nodes: Sequence[Sequence[int]]) -> str:
    texts = [str(list(node)) for node in nodes[:6]]
    return ", ".join([*texts, "..."] if len(nodes) > 6 else texts) or "no nodes"
