"""Predicts how long graphs take on a cluster: the executor's lanes as a discrete-event simulation.

Per rank one compute lane, which picks as the executor does, and one full-duplex link. A message
holds the sender's outgoing side for bytes / bandwidth, then, as switches and sockets buffer, the
receiver's incoming side as soon as that is free; a latency later it is there. The native
all-reduce holds all links for the time of a ring.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from casync.codec import FLOAT_BYTES
from casync.graph.graph import Graph, Program
from casync.graph.tasks import Encode, Recv, Reduce, ReduceRound, Send

__all__ = ["Cluster", "CodecSpeed", "Timeline", "simulate"]


@dataclass(frozen=True)
class CodecSpeed:
    """One codec on one rank's compute lane."""

    encode: float  # bytes of float32 gradient per second
    decode: float  # likewise, merges too
    launch: float = 0.0  # seconds per call


@dataclass(frozen=True)
class Cluster:
    """Equal ranks on equal links."""

    bandwidth: float  # bytes per second, each direction of each link
    latency: float  # seconds of a message besides its bytes
    codecs: Mapping[str, CodecSpeed]
    raw: CodecSpeed = CodecSpeed(5e9, 5e9)
    payload_share: float = 1.0  # of the messages' bounds that really travels


@dataclass(frozen=True)
class Timeline:
    """What happened. Times in seconds from the first graph's start."""

    makespan: float
    finished: tuple[float, ...]  # by graph: when its last task ended on any rank
    compute_seconds: tuple[float, ...]  # by rank: compute lane busy
    link_seconds: tuple[float, ...]  # by rank: outgoing side busy
    events: tuple[tuple[int, str, float, float], ...]  # graph, task text, begin, end


def simulate(graphs: Sequence[Graph], cluster: Cluster, ready: Sequence[float] = ()) -> Timeline:
    """Run graphs (one per bucket, in the order of submission) on the cluster.

    `ready`: seconds at which each bucket's gradients are there, on all ranks; by default 0.
    """
    simulation = _Simulation(graphs, cluster, list(ready) or [0.0] * len(graphs))
    simulation.run()
    return simulation.timeline()


class _Simulation:
    def __init__(self, graphs: Sequence[Graph], cluster: Cluster, ready: Sequence[float]) -> None:
        self._graphs, self._cluster = graphs, cluster
        ranks = max((g.world_size for g in graphs), default=1)
        self._programs = [[g.slice(r) for r in range(g.world_size)] for g in graphs]
        self._waits = [[list(p.waits) for p in job] for job in self._programs]
        self._recvs = _recvs(self._programs)
        self._clock, self._number = 0.0, 0
        self._agenda: list[tuple[float, int, int, int, int]] = []  # end, number, graph, rank, task
        self._lane: list[list[tuple[bool, int, int]]] = [[] for _ in range(ranks)]
        self._computing = [False] * ranks
        self._out, self._in = [0.0] * ranks, [0.0] * ranks  # when that side of the link is free
        self._sends: dict[tuple[int, int, int], deque[tuple[int, int]]] = defaultdict(deque)
        self._may_send: set[tuple[int, int, int]] = set()
        self._reduces: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
        self._begin: dict[tuple[int, int, int], float] = {}
        self._events: list[tuple[int, str, float, float]] = []
        self._finished = [0.0] * len(graphs)
        self._compute_seconds, self._link_seconds = [0.0] * ranks, [0.0] * ranks
        for graph, at in enumerate(ready):
            self._later(at, graph, -1, -1)

    def run(self) -> None:
        while self._agenda:
            self._clock, _, graph, rank, task = heapq.heappop(self._agenda)
            if rank < 0:
                self._start(graph)
            else:
                self._end(graph, rank, task)

    def timeline(self) -> Timeline:
        return Timeline(
            max(self._finished, default=0.0), tuple(self._finished), tuple(self._compute_seconds),
            tuple(self._link_seconds), tuple(self._events),
        )  # fmt: skip

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
        self._begin[graph, rank, i] = self._clock
        if isinstance(task, Send):
            self._may_send.add((graph, rank, i))
            self._transfer(rank, task)
        elif isinstance(task, Reduce):
            self._gather(graph, rank, i, task)
        elif not isinstance(task, Recv):
            heapq.heappush(self._lane[rank], (not program.urgent[i], graph, i))
            self._compute(rank)

    def _compute(self, rank: int) -> None:
        """Begin the most urgent ready task, if the lane is free."""
        if self._computing[rank] or not self._lane[rank]:
            return
        _, graph, i = heapq.heappop(self._lane[rank])
        seconds = self._cost(self._programs[graph][rank], i)
        self._computing[rank] = True
        self._compute_seconds[rank] += seconds
        self._begin[graph, rank, i] = self._clock
        self._later(self._clock + seconds, graph, rank, i)

    def _cost(self, program: Program, i: int) -> float:
        part = program.parts[program.tasks[i].part]
        speed = self._cluster.raw if part.codec is None else self._cluster.codecs[part.codec]
        rate = speed.encode if isinstance(program.tasks[i], Encode) else speed.decode
        return speed.launch + part.elements * FLOAT_BYTES / rate

    def _transfer(self, rank: int, task: Send) -> None:
        """Give the link what is at the head of the peer's channel."""
        order = self._sends[rank, task.peer, task.channel]
        while order and (order[0][0], rank, order[0][1]) in self._may_send:
            graph, i = order.popleft()
            size = self._bytes(graph, self._programs[graph][rank].tasks[i].part)
            begin = max(self._clock, self._out[rank])
            end = begin + size / self._cluster.bandwidth
            self._out[rank] = end
            self._link_seconds[rank] += end - begin
            self._begin[graph, rank, i] = begin
            self._later(end, graph, rank, i)

    def _arrive(self, graph: int, task: Send) -> None:
        """The receiver's side is cut-through, unless others' messages keep it busy."""
        seconds = self._bytes(graph, task.part) / self._cluster.bandwidth
        end = max(self._clock, self._in[task.peer] + seconds)
        self._in[task.peer] = end
        recv = self._recvs[graph, task.peer, task.payload]
        self._begin[graph, task.peer, recv] = end - seconds
        self._later(end + self._cluster.latency, graph, task.peer, recv)

    def _bytes(self, graph: int, part: int) -> float:
        return self._graphs[graph].message_bytes[part] * self._cluster.payload_share

    def _gather(self, graph: int, rank: int, i: int, task: Reduce) -> None:
        """The native collective begins when all ranks are there."""
        number = task.round if isinstance(task, ReduceRound) else 0
        there = self._reduces[graph, task.part, number]
        there.append((rank, i))
        n = self._graphs[graph].world_size
        if len(there) < n:
            return
        begin = max(self._clock, *self._out, *self._in)
        share = 2 * (n - 1) / n * self._graphs[graph].bytes_of(task)
        end = begin + share / self._cluster.bandwidth + 2 * (n - 1) * self._cluster.latency
        for member, position in there:
            self._out[member] = self._in[member] = end
            self._link_seconds[member] += end - begin
            self._begin[graph, member, position] = begin
            self._later(end, graph, member, position)

    def _end(self, graph: int, rank: int, i: int) -> None:
        program = self._programs[graph][rank]
        task = program.tasks[i]
        begin = self._begin.get((graph, rank, i), self._clock)
        self._events.append((graph, task.text(), begin, self._clock))
        self._finished[graph] = max(self._finished[graph], self._clock)
        if isinstance(task, Send):
            self._arrive(graph, task)
        for following in program.unlocks[i]:
            self._waits[graph][rank][following] -= 1
            if self._waits[graph][rank][following] == 0:
                self._release(graph, rank, following)
        if not isinstance(task, Send | Recv | Reduce):
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
