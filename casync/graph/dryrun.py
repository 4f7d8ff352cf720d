"""Runs a graph symbolically over all ranks: proves that it cannot deadlock, counts bytes.

The lanes are those of the executor: sends FIFO per peer and channel, reduces FIFO, anything ready
on the compute lane. Running a task only ever enables others, so if one order gets through, all do.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass

from casync.errors import DeadlockError
from casync.graph.graph import Graph
from casync.graph.tasks import Decode, Merge, Recv, Reduce, ReduceRound, Send, Task

__all__ = ["DryRun", "dry_run"]


@dataclass(frozen=True)
class DryRun:
    """What a step moves, by rank. Bytes are bounds where a codec's payloads vary in length."""

    bytes_sent: tuple[int, ...]
    bytes_received: tuple[int, ...]
    bytes_reduced: tuple[int, ...]  # given to the native all-reduce
    messages: tuple[int, ...]  # sent
    tasks: tuple[int, ...]
    order: tuple[int, ...]  # one order of all tasks that works: the proof


def dry_run(graph: Graph) -> DryRun:
    """Raises DeadlockError with the cycle, unmatched or stuck tasks."""
    _check_cycle(graph)
    _check_messages(graph)
    _check_reduces(graph)
    order = _execute(graph)
    return DryRun(
        _sum(graph, Send), _sum(graph, Recv), _sum(graph, Reduce), _count(graph, Send),
        _count(graph, object), order,
    )  # fmt: skip


def _sum(graph: Graph, kind: type) -> tuple[int, ...]:
    totals = [0] * graph.world_size
    for task in graph.tasks:
        if isinstance(task, kind):
            totals[task.rank] += graph.bytes_of(task)
    return tuple(totals)


def _count(graph: Graph, kind: type) -> tuple[int, ...]:
    totals = Counter(task.rank for task in graph.tasks if isinstance(task, kind))
    return tuple(totals[rank] for rank in range(graph.world_size))


def _check_cycle(graph: Graph) -> None:
    import networkx as nx

    try:
        cycle = nx.find_cycle(graph.dag)
    except nx.NetworkXNoCycle:
        return
    texts = tuple(graph.tasks[edge[0]].text() for edge in cycle)
    raise DeadlockError("tasks wait for each other: " + " <- ".join(texts), texts)


def _check_messages(graph: Graph) -> None:
    """Both sides of every channel must see the same payloads in the same order."""
    sent: dict[tuple[int, int, int], deque[Task]] = defaultdict(deque)
    received: dict[tuple[int, int, int], deque[Task]] = defaultdict(deque)
    for task in graph.tasks:
        if isinstance(task, Send):
            sent[task.rank, task.peer, task.channel].append(task)
        elif isinstance(task, Recv):
            received[task.peer, task.rank, task.channel].append(task)
    for key in sorted(sent.keys() | received.keys()):
        _match(sent[key], received[key])


def _match(sent: deque[Task], received: deque[Task]) -> None:
    while sent or received:
        pair = [queue.popleft() for queue in (sent, received) if queue]
        if len(pair) == 1:
            raise DeadlockError(f"`{pair[0].text()}` has no counterpart", (pair[0].text(),))
        if (pair[0].payload, pair[0].part) != (pair[1].payload, pair[1].part):
            texts = (pair[0].text(), pair[1].text())
            raise DeadlockError(f"`{texts[0]}` meets `{texts[1]}`", texts)


def _check_reduces(graph: Graph) -> None:
    """All ranks must reduce the same parts in the same order."""
    orders: list[list[tuple[int | str, ...]]] = [[] for _ in range(graph.world_size)]
    for task in graph.tasks:
        if isinstance(task, Reduce):
            more = (task.round, task.op) if isinstance(task, ReduceRound) else ()
            orders[task.rank].append((task.part, *more))
    for rank, order in enumerate(orders):
        if order != orders[0]:
            raise DeadlockError(f"rank {rank} reduces parts {order}, rank 0 {orders[0]}")


def _execute(graph: Graph) -> tuple[int, ...]:
    """Run what can run until nothing is left."""
    run = _Run(graph)
    if len(run.order) < len(graph.tasks):
        done = set(run.order)
        stuck = tuple(t.text() for i, t in enumerate(graph.tasks) if i not in done)
        shown = "; ".join(stuck[:8]) + ("; ..." if len(stuck) > 8 else "")
        raise DeadlockError(f"{len(stuck)} tasks cannot run: {shown}", stuck)
    return tuple(run.order)


class _Run:
    """Lanes and payloads of all ranks. `order`: the tasks that ran."""

    def __init__(self, graph: Graph) -> None:
        self.order: list[int] = []
        self._graph = graph
        self._waits = [len(after) for after in graph.after]
        self._unlocks: list[list[int]] = [[] for _ in graph.tasks]
        self._lanes: dict[object, deque[int]] = defaultdict(deque)
        self._has: set[tuple[int, int]] = set()
        for i, after in enumerate(graph.after):
            for j in after:
                self._unlocks[j].append(i)
            self._lanes[_lane(i, graph.tasks[i])].append(i)
        self._drive(deque(i for i, waits in enumerate(self._waits) if waits == 0))

    def _drive(self, ready: deque[int]) -> None:
        while ready:
            lane = self._lanes[_lane(ready[0], self._graph.tasks[ready.popleft()])]
            while lane and self._waits[lane[0]] == 0:
                ready.extend(self._finish(lane.popleft()))

    def _finish(self, i: int) -> list[int]:
        self._touch(self._graph.tasks[i])
        self.order.append(i)
        for j in self._unlocks[i]:
            self._waits[j] -= 1
        return [j for j in self._unlocks[i] if self._waits[j] == 0]

    def _touch(self, task: Task) -> None:
        """A payload must be on the rank before it is read there."""
        if isinstance(task, Send | Decode | Merge) and (task.rank, task.payload) not in self._has:
            raise DeadlockError(f"`{task.text()}` may run before its payload is there")
        self._has.add((task.rank, task.payload))


def _lane(i: int, task: Task) -> object:
    if isinstance(task, Send):
        return task.rank, task.peer, task.channel
    if isinstance(task, Reduce):
        return task.rank, "reduce"
    return i
