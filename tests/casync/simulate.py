"""Predicted time of graphs on a cluster: the executor's lanes as a discrete-event simulation.

Each rank has one compute lane, which picks tasks as the executor does, and one full-duplex link. A
message occupies the sender's outgoing side for bytes / bandwidth; then, as switches and sockets
buffer, the receiver's incoming side as soon as that is free.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from casync.building.tasks import Encode, Recv, Reduce, Send, Task
from casync.codec import FLOAT_BYTES
from casync.graph.graph import Graph, Program

__all__ = ["Cluster", "simulate"]


@dataclass(frozen=True)
class Cluster:
    """Equal ranks, each of a node of its own, with one codec."""

    bandwidth: float  # of a link: bytes per second, each direction
    encode: float  # bytes of float32 gradient per second
    decode: float  # bytes of float32 gradient per second; also of merges


def simulate(graphs: Sequence[Graph], cluster: Cluster, ready: Sequence[float]) -> float:
    """Run graphs (one per bucket, in the order of submission) on the cluster; seconds until all
    tasks have ended.

    ready: seconds at which each bucket's gradients are ready, on all ranks.
    """
    simulation = _Simulation(graphs, cluster, ready)
    simulation.run()
    return simulation.clock


class _Simulation:
    def __init__(self, graphs: Sequence[Graph], cluster: Cluster, ready: Sequence[float]) -> None:
        self._graphs, self._cluster = graphs, cluster
        ranks = graphs[0].world_size
        self._programs = [[g.slice(r) for r in range(ranks)] for g in graphs]
        self._waits = [[list(p.waits) for p in job] for job in self._programs]
        self._recvs = _recvs(self._programs)
        self.clock, self._number = 0.0, 0
        self._agenda: list[tuple[float, int, int, int, int]] = []  # end, number, graph, rank, task
        self._lane: list[list[tuple[bool, int, int]]] = [[] for _ in range(ranks)]
        self._computing = [False] * ranks
        self._out, self._in = [0.0] * ranks, [0.0] * ranks  # when that side of a link is free
        self._sends: dict[tuple[int, int, int], deque[tuple[int, int]]] = defaultdict(deque)
        self._may_send: set[tuple[int, int, int]] = set()
        for graph, at in enumerate(ready):
            self._later(at, graph, -1, -1)

    def run(self) -> None:
        while self._agenda:
            self.clock, _, graph, rank, task = heapq.heappop(self._agenda)
            if rank < 0:
                self._start(graph)
            else:
                self._end(graph, rank, task)

    def _later(self, at: float, graph: int, rank: int, task: int) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (at, self._number, graph, rank, task))

    def _start(self, graph: int) -> None:
        for rank, program in enumerate(self._programs[graph]):
            for i, task in enumerate(program.tasks):
                if isinstance(task, Send):
                    self._sends[rank, task.peer, task.channel].append((graph, i))
            for i, waits in enumerate(program.waits):
                if waits == 0:
                    self._release(graph, rank, i)

    def _release(self, graph: int, rank: int, i: int) -> None:
        program = self._programs[graph][rank]
        task = program.tasks[i]
        assert not isinstance(task, Reduce)
        if isinstance(task, Send):
            self._may_send.add((graph, rank, i))
            self._transfer(rank, task)
        elif not isinstance(task, Recv):
            heapq.heappush(self._lane[rank], (not program.urgent[i], graph, i))
            self._compute(rank)

    def _compute(self, rank: int) -> None:
        """Begin the most urgent ready task, if the lane is free."""
        if self._computing[rank] or not self._lane[rank]:
            return
        _, graph, i = heapq.heappop(self._lane[rank])
        program, task = self._programs[graph][rank], self._programs[graph][rank].tasks[i]
        rate = self._cluster.encode if isinstance(task, Encode) else self._cluster.decode
        seconds = program.parts[task.part].elements * FLOAT_BYTES / rate
        self._computing[rank] = True
        self._later(self.clock + seconds, graph, rank, i)

    def _transfer(self, rank: int, task: Send) -> None:
        """Start the transfers at the head of the peer's channel."""
        order = self._sends[rank, task.peer, task.channel]
        while order and (order[0][0], rank, order[0][1]) in self._may_send:
            graph, i = order.popleft()
            seconds = self._seconds(graph, self._programs[graph][rank].tasks[i])
            self._out[rank] = max(self.clock, self._out[rank]) + seconds
            self._later(self._out[rank], graph, rank, i)

    def _arrive(self, graph: int, task: Send) -> None:
        """Occupy the receiver's side, cut-through unless other messages keep it busy."""
        end = max(self.clock, self._in[task.peer] + self._seconds(graph, task))
        self._in[task.peer] = end
        self._later(end, graph, task.peer, self._recvs[graph, task.peer, task.payload])

    def _seconds(self, graph: int, task: Task) -> float:
        return self._graphs[graph].bytes_of(task) / self._cluster.bandwidth

    def _end(self, graph: int, rank: int, i: int) -> None:
        program = self._programs[graph][rank]
        task = program.tasks[i]
        if isinstance(task, Send):
            self._arrive(graph, task)
        for following in program.unlocks[i]:
            self._waits[graph][rank][following] -= 1
            if self._waits[graph][rank][following] == 0:
                self._release(graph, rank, following)
        if not isinstance(task, Send | Recv):
            self._computing[rank] = False
            self._compute(rank)


def _recvs(jobs: Sequence[Sequence[Program]]) -> dict[tuple[int, int, int], int]:
    """Position of a recv in its rank's program, by (graph, rank, payload)."""
    return {
        (graph, rank, task.payload): i
        for graph, programs in enumerate(jobs)
        for rank, program in enumerate(programs)
        for i, task in enumerate(program.tasks)
        if isinstance(task, Recv)
    }
