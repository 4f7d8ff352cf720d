"""Predicted times of graphs on a cluster: the executor's lanes as a discrete-event simulation.

Each rank has one compute lane, which picks tasks as the executor does, and one full-duplex link
inside its node; each node has one link to other nodes. A message occupies the sender's outgoing
side for bytes / bandwidth; then, as switches and sockets buffer, the receiver's incoming side as
soon as that is free; it arrives a latency later. The native all-reduce occupies all links for the
time of a ring, at the speed of its slowest link.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from casync.building.tasks import Decode, Encode, Recv, Reduce, ReduceRound, Send, Task
from casync.codec import FLOAT_BYTES
from casync.graph.fusion import in_place
from casync.graph.graph import Graph, Program
from casync.raw import RAW
from casync.topology import Topology

__all__ = ["Cluster", "CodecSpeed", "Link", "Timeline", "simulate"]

_Way: TypeAlias = tuple[str, int]


@dataclass(frozen=True)
class CodecSpeed:
    """Speed of a codec on one rank's compute lane."""

    encode: float  # bytes of float32 gradient per second
    decode: float  # bytes of float32 gradient per second; also of merges
    launch: float = 0.0  # seconds per call


@dataclass(frozen=True)
class Link:
    """A link between two ranks, as each of its messages sees it."""

    bandwidth: float  # bytes per second, each direction
    latency: float  # fixed seconds per message


@dataclass(frozen=True)
class Cluster:
    """Equal ranks on equal nodes."""

    between: Link  # between nodes; a node's ranks share it
    codecs: Mapping[str, CodecSpeed]
    inside: Link = Link(1e10, 1e-5)  # inside a node
    raw: CodecSpeed = CodecSpeed(5e9, 5e9)
    payload_share: float = 1.0  # share of the messages' bounds that really travels


@dataclass(frozen=True)
class Timeline:
    """Result of a simulation. Times in seconds since the first graph's start."""

    makespan: float
    finished: tuple[float, ...]  # by graph: end of its last task on any rank
    compute_seconds: tuple[float, ...]  # by rank: seconds with a busy compute lane
    link_seconds: tuple[float, ...]  # by node: seconds with a busy link to other nodes, outgoing
    events: tuple[tuple[int, str, float, float], ...]  # graph, task text, begin, end


def simulate(graphs: Sequence[Graph], cluster: Cluster, ready: Sequence[float] = ()) -> Timeline:
    """Run graphs (one per bucket, in the order of submission) on the cluster.

    ready: seconds at which each bucket's gradients are ready, on all ranks; by default 0.
    """
    simulation = _Simulation(graphs, cluster, list(ready) or [0.0] * len(graphs))
    simulation.run()
    return simulation.timeline()


class _Simulation:
    def __init__(self, graphs: Sequence[Graph], cluster: Cluster, ready: Sequence[float]) -> None:
        self._graphs, self._cluster = graphs, cluster
        self._topology = graphs[0].topology if graphs else Topology.flat(1)
        ranks = self._topology.world_size
        self._programs = [[g.slice(r) for r in range(g.world_size)] for g in graphs]
        self._in_place = {p: in_place(p) for job in self._programs for p in job}
        self._waits = [[list(p.waits) for p in job] for job in self._programs]
        self._recvs = _recvs(self._programs)
        self._clock, self._number = 0.0, 0
        self._agenda: list[tuple[float, int, int, int, int]] = []  # end, number, graph, rank, task
        self._lane: list[list[tuple[bool, int, int]]] = [[] for _ in range(ranks)]
        self._computing = [False] * ranks
        # time at which that side of a way is free; a way is a rank's inside its node, or a node's
        self._out: dict[_Way, float] = defaultdict(float)
        self._in: dict[_Way, float] = defaultdict(float)
        self._sends: dict[tuple[int, int, int], deque[tuple[int, int]]] = defaultdict(deque)
        self._may_send: set[tuple[int, int, int]] = set()
        self._reduces: dict[tuple[int, int, int, tuple[int, ...]], list[tuple[int, int]]]
        self._reduces = defaultdict(list)
        self._begin: dict[tuple[int, int, int], float] = {}
        self._events: list[tuple[int, str, float, float]] = []
        self._finished = [0.0] * len(graphs)
        self._compute_seconds = [0.0] * ranks
        self._link_seconds = [0.0] * len(self._topology.nodes)
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
        task = program.tasks[i]
        speed = self._cluster.raw if task.codec == RAW else self._cluster.codecs[task.codec]
        if isinstance(task, Decode) and task.payload in self._in_place[program]:
            return 0.0
        rate = speed.encode if isinstance(task, Encode) else speed.decode
        size = program.parts[task.part].elements * FLOAT_BYTES
        return speed.launch + size / rate

    def _transfer(self, rank: int, task: Send) -> None:
        """Start the transfers at the head of the peer's channel."""
        order = self._sends[rank, task.peer, task.channel]
        link, way, _ = self._link(rank, task.peer)
        while order and (order[0][0], rank, order[0][1]) in self._may_send:
            graph, i = order.popleft()
            size = self._bytes(graph, self._programs[graph][rank].tasks[i])
            begin = max(self._clock, self._out[way])
            end = begin + size / link.bandwidth
            self._out[way] = end
            self._busy(way, end - begin)
            self._begin[graph, rank, i] = begin
            self._later(end, graph, rank, i)

    def _arrive(self, graph: int, task: Send) -> None:
        """Occupy the receiver's side, cut-through unless other messages keep it busy."""
        link, _, way = self._link(task.rank, task.peer)
        seconds = self._bytes(graph, task) / link.bandwidth
        end = max(self._clock, self._in[way] + seconds)
        self._in[way] = end
        recv = self._recvs[graph, task.peer, task.payload]
        self._begin[graph, task.peer, recv] = end - seconds
        self._later(end + link.latency, graph, task.peer, recv)

    def _link(self, source: int, target: int) -> tuple[Link, _Way, _Way]:
        """The link between two ranks, the source's outgoing way and the target's incoming way."""
        one, other = self._topology.node_of[source], self._topology.node_of[target]
        if one == other:
            return self._cluster.inside, ("rank", source), ("rank", target)
        return self._cluster.between, ("node", one), ("node", other)

    def _busy(self, way: _Way, seconds: float) -> None:
        if way[0] == "node":
            self._link_seconds[way[1]] += seconds

    def _bytes(self, graph: int, task: Task) -> float:
        return self._graphs[graph].bytes_of(task) * self._cluster.payload_share

    def _gather(self, graph: int, rank: int, i: int, task: Reduce) -> None:
        """Start the native collective when all its ranks have arrived."""
        number = task.round if isinstance(task, ReduceRound) else 0
        there = self._reduces[graph, task.part, number, task.ranks]
        there.append((rank, i))
        n = len(task.ranks)
        if len(there) < n:
            return
        links = [
            self._link(*pair)
            for pair in zip(task.ranks, (*task.ranks[1:], task.ranks[0]), strict=True)
        ]
        ways = [*dict.fromkeys(way for _, out, into in links for way in (out, into))]
        begin = max(self._clock, *(max(self._out[way], self._in[way]) for way in ways))
        ways_round = 2 if task.to == task.ranks else 1  # else the sum need not be gathered
        share = ways_round * (n - 1) / n * self._graphs[graph].bytes_of(task)
        link = min((link for link, *_ in links), key=lambda each: each.bandwidth)
        end = begin + share / link.bandwidth + ways_round * (n - 1) * link.latency
        for way in ways:
            self._out[way] = self._in[way] = end
            self._busy(way, end - begin)
        for member, position in there:
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
