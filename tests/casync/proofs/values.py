"""Proof of values: which ranks' contributions, and how often, each bucket holds in the end.

A symbolic run: a rank's piece of a part is a sum of terms, at first its own values, once. Encodes
copy it, merges add, decodes replace, reduces sum over ranks; what codecs lose is left out. In the
end a strategy's `RESULT` must be there: on every rank, in every part.

The run takes one order. So it also checks that tasks wait for each other if one of them writes a
piece that the other uses: then all orders give the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

from casync.building.parts import Part
from casync.building.tasks import (
    Decode,
    DecodeRounds,
    Encode,
    Follow,
    Merge,
    Recv,
    Reduce,
    ReduceRound,
    Send,
    Task,
)
from casync.errors import PlanError
from casync.graph.graph import Graph
from casync.strategies import load, over_nodes

__all__ = ["check_values"]

Terms: TypeAlias = dict[int, float]  # by rank: how often its values are in a sum


def check_values(graph: Graph, order: Iterable[int]) -> None:
    """Raise PlanError unless buckets end as strategies say, in whatever order tasks may run.

    order: in which all tasks can run.
    """
    run = _Run(graph)
    for i in order:
        run.take(i, graph.tasks[i])
    for (rank, number), terms in run.buckets.items():
        part, n = graph.parts[number], graph.world_size
        wanted = _wanted(part, rank, n) if n > 1 else {rank: 1.0}
        if wanted is None:
            continue
        _compare(f"part {number} ({part.strategy})", rank, terms, wanted)
    for (rank, number, peer), terms in run.followed.items():
        _compare(f"part {number}, the copy of rank {peer}", rank, terms, {peer: 1.0})


def _wanted(part: Part, rank: int, n: int) -> Terms | None:
    """None: anything."""
    match load(part.strategy).RESULT:
        case "mean":
            return dict.fromkeys(range(n), 1 / n)
        case "majority":
            return dict.fromkeys(range(n), 1.0)
        case "sum at owner" if rank == part.owner:
            return dict.fromkeys(range(n), 1.0)
        case "sum at owner" if over_nodes(part.strategy):
            return None  # leaders of nodes hold their sums
        case "owner's":
            return {part.owner: 1.0}
    return {rank: 1.0}


def _compare(what: str, rank: int, terms: Terms, wanted: Terms) -> None:
    if terms != wanted:
        raise PlanError(f"{what}: rank {rank} ends with {_text(terms)}, not with {_text(wanted)}")


class _Run:
    """The terms of buckets and payloads so far."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._n = graph, graph.world_size
        self.buckets: dict[tuple[int, int], Terms] = {  # by rank and part
            (rank, part): {rank: 1.0} for part in range(len(graph.parts)) for rank in range(self._n)
        }
        self.followed: dict[tuple[int, int, int], Terms] = defaultdict(dict)  # rank, part, peer
        self._payloads: dict[tuple[int, int], Terms] = {}  # by rank and payload
        self._sums: dict[tuple[object, ...], Terms] = {}  # of reduces
        self._writer: dict[tuple[int, int], int] = {}  # by rank and part: the last to write
        self._readers: dict[tuple[int, int], list[int]] = defaultdict(list)  # since then

    def take(self, i: int, task: Task) -> None:
        """Run a task."""
        key, place = (task.rank, task.payload), (task.rank, task.part)
        if isinstance(task, Send):
            return
        if isinstance(task, Recv):
            self._payloads[key] = self._payloads[task.peer, task.payload]
        elif isinstance(task, Reduce):
            self._payloads[key] = self._sum(i, task)
        elif isinstance(task, Follow):
            copy = self.followed[(*place, task.peer)]
            copy.update(_add(copy, self._payloads[key]))
        elif isinstance(task, Encode):
            self._check_waits(i, task, writes=task.writeback)
            terms = self.buckets[place]
            self._payloads[key] = self._divide(terms) if task.average else terms
            if task.writeback:
                self.buckets[place] = self._payloads[key]
        elif isinstance(task, Decode | Merge):
            self._check_waits(i, task, writes=True)
            terms = self._payloads[key]
            if isinstance(task, Merge):
                terms = _add(self.buckets[place], terms)
            self.buckets[place] = self._divide(terms) if isinstance(task, DecodeRounds) else terms

    def _divide(self, terms: Terms) -> Terms:
        """A share of each rank."""
        return {rank: times / self._n for rank, times in terms.items()}

    def _sum(self, i: int, task: Reduce) -> Terms:
        """The sum of the payloads that this reduce waits for, the same on all its ranks."""
        number = task.round if isinstance(task, ReduceRound) else None
        key = task.part, task.ranks, task.to, task.slot, number
        if key not in self._sums:
            every = [self._graph.tasks[j] for j in self._graph.after[i]]
            total: Terms = {}
            for each in (each for each in every if isinstance(each, Encode)):
                total = _add(total, self._payloads[each.rank, each.payload])
            self._sums[key] = total
        return self._sums[key]

    def _check_waits(self, i: int, task: Task, *, writes: bool) -> None:
        """Raise PlanError if a task may overtake one that uses the same piece of the bucket."""
        place, after = (task.rank, task.part), self._graph.after[i]
        before = [self._writer[place]] if place in self._writer else []
        if writes:
            before = self._readers.pop(place, before)
            self._writer[place] = i
        else:
            self._readers[place].append(i)
        for j in before:
            if j not in after:
                raise PlanError(f"`{task.text()}` may run before `{self._graph.tasks[j].text()}`")


def _add(one: Terms, other: Terms) -> Terms:
    return one | {rank: one.get(rank, 0.0) + times for rank, times in other.items()}


def _text(terms: Terms) -> str:
    """Text such as "ranks 0, 1 x 0.5 and rank 2 x 1"."""
    ranks: dict[float, list[int]] = defaultdict(list)
    for rank, times in sorted(terms.items()):
        ranks[times].append(rank)
    return " and ".join(
        f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some))} x {times:g}"
        for times, some in ranks.items()
    )
