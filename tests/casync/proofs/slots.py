"""Dry run of transports without tags, such as NCCL. See [Note: slots] in tasks.py.

On each rank one stream runs its slots in order. A slot's group is posted when the groups before it
are complete and its sends are encoded. Messages between two ranks match by their order alone, and
both sides must name the same bytes. A group is complete when all groups that it meets are posted:
until then it blocks its stream.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NoReturn

from casync.building.tasks import Recv, Reduce, Send, Task
from casync.errors import DeadlockError
from casync.graph.graph import Graph

__all__ = ["Run", "check_pair", "raise_stuck"]


def check_pair(one: Task | None, other: Task | None) -> None:
    """Raise DeadlockError unless both sides name the same payload."""
    if one is None or other is None:
        task = one or other
        assert task is not None
        raise DeadlockError(f"`{task.text()}` has no counterpart", (task.text(),))
    if (one.payload, one.part, one.codec) != (other.payload, other.part, other.codec):
        texts = (one.text(), other.text())
        raise DeadlockError(f"`{texts[0]}` meets `{texts[1]}`", texts)


def raise_stuck(graph: Graph, order: Iterable[int]) -> NoReturn:
    """Raise DeadlockError with the tasks that did not run; only with a cycle, if there is one."""
    import networkx as nx

    done = set(order)
    stuck = [i for i in range(len(graph.tasks)) if i not in done]
    try:
        cycle = [i for i, _ in nx.find_cycle(graph.dag.subgraph(stuck))]
    except nx.NetworkXNoCycle:
        texts = tuple(graph.tasks[i].text() for i in stuck)
        shown = "; ".join(texts[:8]) + ("; ..." if len(texts) > 8 else "")
        raise DeadlockError(f"{len(stuck)} tasks cannot run: {shown}", texts) from None
    texts = tuple(graph.tasks[i].text() for i in cycle)
    raise DeadlockError("tasks wait for each other: " + " <- ".join(texts), texts)


class Run:
    """Streams of all ranks. `order`: tasks that can run, in order. A group is (rank, slot)."""

    def __init__(self, graph: Graph) -> None:
        self.order: list[int] = []
        self._tasks = graph.tasks
        self._unlocks: list[list[int]] = [[] for _ in graph.tasks]
        self._waits = [0] * len(graph.tasks)
        for i, after in enumerate(graph.after):
            for j in (j for j in after if graph.tasks[j].rank == graph.tasks[i].rank):
                self._unlocks[j].append(i)
                self._waits[i] += 1
        self._groups = _groups(graph.tasks)
        self._partners = _partners(graph, self._groups)
        self._unposted = {group: len(met) for group, met in self._partners.items()}  # not posted
        self._streams = [
            deque(sorted(group for group in self._groups if group[0] == rank))
            for rank in range(graph.world_size)
        ]
        self._posted: set[tuple[int, int]] = set()
        self._drive()

    def _drive(self) -> None:
        first = [i for i, waits in enumerate(self._waits) if waits == 0]
        for i in first:
            if not isinstance(self._tasks[i], Send | Recv | Reduce):
                self._finish(i)
        for rank in range(len(self._streams)):
            self._post(rank)

    def _finish(self, first: int) -> None:
        """Run a task, and all tasks that can run then on its rank's compute lane."""
        ready = deque([first])
        while ready:
            i = ready.popleft()
            self.order.append(i)
            for j in self._unlocks[i]:
                self._waits[j] -= 1
                if self._waits[j] == 0 and not isinstance(self._tasks[j], Send | Recv | Reduce):
                    ready.append(j)

    def _post(self, rank: int) -> None:
        """Post the group at the head of a stream, if ready, and complete what that allows."""
        pending = deque([rank])
        while pending:
            stream = self._streams[pending.popleft()]
            if not stream or stream[0] in self._posted or not self._ready(stream[0]):
                continue
            group = stream[0]
            self._posted.add(group)
            for other in (group, *self._partners[group]):
                self._unposted[other] -= other != group
                if other in self._posted and self._unposted[other] == 0:
                    self._complete(other)
                    pending.append(other[0])

    def _ready(self, group: tuple[int, int]) -> bool:
        return all(self._waits[i] == 0 for i in self._groups[group])

    def _complete(self, group: tuple[int, int]) -> None:
        self._streams[group[0]].popleft()
        for i in self._groups[group]:
            self._finish(i)


def _groups(tasks: Sequence[Task]) -> dict[tuple[int, int], list[int]]:
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        if isinstance(task, Send | Recv | Reduce):
            groups[task.rank, task.slot].append(i)
    return groups


def _partners(
    graph: Graph, groups: dict[tuple[int, int], list[int]]
) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """Groups that each group meets; messages and collectives match by their order."""
    sent: dict[tuple[int, int], list[Task]] = defaultdict(list)
    received: dict[tuple[int, int], list[Task]] = defaultdict(list)
    reduced: dict[tuple[int, ...], dict[int, list[Task]]] = defaultdict(lambda: defaultdict(list))
    for group in sorted(groups):
        for task in (graph.tasks[i] for i in groups[group]):
            match task:
                case Send():
                    sent[task.rank, task.peer].append(task)
                case Recv():
                    received[task.peer, task.rank].append(task)
                case Reduce():
                    reduced[task.ranks][task.rank].append(task)
    met: dict[tuple[int, int], set[tuple[int, int]]] = {group: set() for group in groups}
    for key in sorted(sent.keys() | received.keys()):
        for pair in zip_longest(sent[key], received[key]):
            _meet(met, pair)
    for ranks, by_rank in reduced.items():
        for members in zip_longest(*(by_rank[rank] for rank in ranks)):
            _meet(met, members)
    return met


def _meet(met: dict[tuple[int, int], set[tuple[int, int]]], members: Sequence[Task | None]) -> None:
    """Let the groups of a message or reduce meet; DeadlockError if their tasks do not match."""
    kinds = [m for m in members if isinstance(m, Send | Recv | Reduce)]
    if len(kinds) < len(members) or isinstance(kinds[0], Send | Recv):
        check_pair(*(members if len(members) == 2 else (kinds[0], None)))
    elif len({(m.part, m.codec, _to(m)) for m in kinds}) > 1:
        texts = tuple(m.text() for m in kinds)
        raise DeadlockError(f"`{texts[0]}` meets `{texts[-1]}`", texts)
    places = {(m.rank, m.slot) for m in kinds}
    for place in places:
        met[place] |= places - {place}


def _to(task: Task) -> tuple[int, ...]:
    return task.to if isinstance(task, Reduce) else ()
