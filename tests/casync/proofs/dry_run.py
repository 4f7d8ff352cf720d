"""Symbolic run of a graph over all ranks: proves that it cannot deadlock and that buckets end as
their strategies say (values.py), and counts bytes.

With the semantics "gloo" lanes are those of the executor: receives wait for nothing, sends are FIFO
per peer and channel, reduces FIFO per group of ranks, and any ready task runs on the compute lane.
"rendezvous" is that of NCCL, see slots.py. In both, running a task only ever enables others,
so if one order completes, all do.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, TypeAlias

from casync.building.tasks import Encode, Recv, Reduce, ReduceRound, Send, Task
from casync.errors import DeadlockError
from casync.graph.graph import Graph
from tests.casync.proofs import slots
from tests.casync.proofs.values import check_values

__all__ = ["DryRun", "Semantics", "dry_run"]

Semantics: TypeAlias = Literal["gloo", "rendezvous"]


@dataclass(frozen=True)
class DryRun:
    """Traffic of a step, by rank. Bytes are bounds if a codec's payloads vary in length."""

    bytes_sent: tuple[int, ...]
    bytes_received: tuple[int, ...]
    bytes_reduced: tuple[int, ...]  # given to the native all-reduce
    bytes_between: tuple[int, ...]  # by node: sent to other nodes
    messages: tuple[int, ...]  # sent
    tasks: tuple[int, ...]
    order: tuple[int, ...]  # an order in which all tasks run: the proof


def dry_run(graph: Graph, semantics: Semantics = "gloo") -> DryRun:
    """Run a graph. Raises DeadlockError with the cycle, or the unmatched or stuck tasks, and
    PlanError if a bucket would end with wrong values."""
    if semantics == "gloo":
        _check_messages(graph)
        _check_reduces(graph)
    run = Run(graph) if semantics == "gloo" else slots.Run(graph)
    order = tuple(run.order)
    if len(order) < len(graph.tasks):
        slots.raise_stuck(graph, order)
    _check_payloads(graph, order)
    check_values(graph, order)
    return DryRun(
        _sum(graph, Send), _sum(graph, Recv), _sum(graph, Reduce), _between(graph),
        _count(graph, Send), _count(graph, object), order,
    )  # fmt: skip


def _sum(graph: Graph, kind: type) -> tuple[int, ...]:
    totals = [0] * graph.world_size
    for task in graph.tasks:
        if isinstance(task, kind):
            totals[task.rank] += graph.bytes_of(task)
    return tuple(totals)


def _between(graph: Graph) -> tuple[int, ...]:
    node_of, totals = graph.topology.node_of, [0] * len(graph.topology.nodes)
    for task in graph.tasks:
        if isinstance(task, Send) and node_of[task.rank] != node_of[task.peer]:
            totals[node_of[task.rank]] += graph.bytes_of(task)
    return tuple(totals)


def _count(graph: Graph, kind: type) -> tuple[int, ...]:
    totals = Counter(task.rank for task in graph.tasks if isinstance(task, kind))
    return tuple(totals[rank] for rank in range(graph.world_size))


def _check_messages(graph: Graph) -> None:
    """Check that both sides of every channel see the same payloads in the same order."""
    sent: dict[tuple[int, int, int], deque[Task]] = defaultdict(deque)
    received: dict[tuple[int, int, int], deque[Task]] = defaultdict(deque)
    for task in graph.tasks:
        if isinstance(task, Send):
            sent[task.rank, task.peer, task.channel].append(task)
        elif isinstance(task, Recv):
            received[task.peer, task.rank, task.channel].append(task)
    for key in sorted(sent.keys() | received.keys()):
        for pair in zip_longest(sent[key], received[key]):
            slots.check_pair(*pair)


def _check_reduces(graph: Graph) -> None:
    """Check that all members of a group reduce the same parts in the same order."""
    orders: dict[tuple[int, ...], dict[int, list[tuple[int | str, ...]]]] = {}
    for task in graph.tasks:
        if isinstance(task, Reduce):
            more = (task.round, task.op) if isinstance(task, ReduceRound) else ()
            group = orders.setdefault(task.ranks, {rank: [] for rank in task.ranks})
            group[task.rank].append((task.part, *task.to, *more))
    for ranks, group in orders.items():
        for rank, order in group.items():
            if order != group[ranks[0]]:
                first = f"rank {ranks[0]} {group[ranks[0]]}"
                raise DeadlockError(f"rank {rank} reduces parts {order}, {first}")


def _check_payloads(graph: Graph, order: tuple[int, ...]) -> None:
    """Check that a rank has a payload, of the right codec, before a task reads it."""
    has: dict[tuple[int, int], str] = {}
    for i in order:
        task = graph.tasks[i]
        key = (task.rank, task.payload)
        if isinstance(task, Encode | Recv):
            has[key] = task.codec
        elif has.get(key) != task.codec:
            raise DeadlockError(f"`{task.text()}` may run before its payload is there")


class Run:
    """Lanes of all ranks. `order`: the tasks that can run, in an order in which they do."""

    def __init__(self, graph: Graph) -> None:
        self.order: list[int] = []
        self._graph = graph
        self._waits = [len(after) for after in graph.after]
        self._unlocks: list[list[int]] = [[] for _ in graph.tasks]
        self._lanes: dict[object, deque[int]] = defaultdict(deque)
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
        self.order.append(i)
        for j in self._unlocks[i]:
            self._waits[j] -= 1
        return [j for j in self._unlocks[i] if self._waits[j] == 0]


def _lane(i: int, task: Task) -> object:
    if isinstance(task, Send):
        return task.rank, task.peer, task.channel
    if isinstance(task, Reduce):
        return task.rank, "reduce"
    return i
