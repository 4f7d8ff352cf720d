"""The task graph over all ranks, and the program of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from casync.building.builder import Builder, Waits
from casync.building.parts import Part
from casync.building.tasks import Encode, Reduce, ReduceRound, Send, Task
from casync.codec import Codec
from casync.graph.layout import Layout
from casync.graph.plan import check_codecs
from casync.raw import with_raw
from casync.strategies import groups, load
from casync.topology import Topology

if TYPE_CHECKING:
    import networkx as nx

    Dag: TypeAlias = nx.DiGraph[int]

__all__ = ["Graph", "Program", "build", "build_program", "urgent"]


@dataclass(frozen=True, eq=False)
class Program:
    """Tasks of one rank, in the graph's global order, as flat arrays.

    `waits[i]` counts the tasks of this rank that task i waits for; `unlocks[i]` are the tasks that
    wait for i. A recv waits for nothing here: its buffer is free when the job starts.
    """

    rank: int
    world_size: int
    parts: tuple[Part, ...]
    tasks: tuple[Task, ...]
    waits: tuple[int, ...]
    unlocks: tuple[tuple[int, ...], ...]
    urgent: tuple[bool, ...]  # True if another rank waits for a successor of task i


@dataclass(frozen=True)
class Graph:
    """Tasks of all ranks in one global order; `after[i]` are the positions task i waits for."""

    topology: Topology
    parts: tuple[Part, ...]
    message_bytes: tuple[Mapping[str, int], ...]  # by part and codec: bound, over all rounds
    tasks: tuple[Task, ...]
    after: Waits
    round_bytes: tuple[tuple[int, ...], ...]  # by part: bytes of each of its rounds

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    def bytes_of(self, task: Task) -> int:
        """Bound of the bytes that a send, recv or reduce moves."""
        if isinstance(task, ReduceRound):
            return self.round_bytes[task.part][task.round]
        return self.message_bytes[task.part][task.codec]

    @cached_property
    def dag(self) -> Dag:
        """A networkx graph over positions; node attribute `task`."""
        import networkx as nx

        dag: Dag = nx.DiGraph()
        dag.add_nodes_from((i, {"task": task}) for i, task in enumerate(self.tasks))
        dag.add_edges_from((j, i) for i, after in enumerate(self.after) for j in after)
        return dag

    def slice(self, rank: int) -> Program:
        """The part of the graph that runs on `rank`."""
        mine = [i for i, task in enumerate(self.tasks) if task.rank == rank]
        local = {position: i for i, position in enumerate(mine)}
        tasks = tuple(self.tasks[i] for i in mine)
        after = tuple(tuple(local[j] for j in self.after[i] if j in local) for i in mine)
        return _program(rank, self.world_size, self.parts, tasks, after)


def build(
    parts: Sequence[Part],
    topology: Topology,
    codecs: Mapping[str, Codec],
    *,
    rotates: bool = True,
) -> Graph:
    """The graph that synchronizes `parts` over all ranks; raises PlanError.

    For proofs, pictures and simulation: it grows with the square of the world size. With one rank
    it has no tasks: the bucket is its own average. rotates: True if the messages of a phase have
    slots in which a rank sends to one rank and receives from one; otherwise they share a slot,
    which NCCL schedules itself. All ranks must agree.
    """
    codecs = with_raw(codecs)
    tasks, after = _build(parts, topology, codecs, None, rotates)
    sizes: list[dict[str, int]] = [{} for _ in parts]
    for task in tasks:
        if isinstance(task, Encode) and task.codec not in sizes[task.part]:
            layout = Layout.of(parts[task.part], codecs[task.codec])
            sizes[task.part][task.codec] = layout.size
    rounds = tuple(_rounds(part, codecs[part.codec]) for part in parts)
    return Graph(topology, tuple(parts), tuple(sizes), tasks, after, rounds)


def build_program(
    parts: Sequence[Part],
    topology: Topology,
    codecs: Mapping[str, Codec],
    rank: int,
    *,
    rotates: bool = True,
) -> Program:
    """The program of one rank: `build(...).slice(rank)`, without the rest of the graph."""
    tasks, after = _build(parts, topology, with_raw(codecs), rank, rotates)
    return _program(rank, topology.world_size, tuple(parts), tasks, after)


def _build(
    parts: Sequence[Part],
    topology: Topology,
    codecs: Mapping[str, Codec],
    only: int | None,
    rotates: bool,
) -> tuple[tuple[Task, ...], Waits]:
    b = Builder(topology.world_size, len(parts), only, rotates=rotates)
    for part in parts if topology.world_size > 1 else ():
        check_codecs(part, codecs)
        b.phase = 0
        load(part.strategy).build(b, part, groups(part.strategy, topology))
    return b.ordered()


def _program(
    rank: int, world_size: int, parts: tuple[Part, ...], tasks: tuple[Task, ...], after: Waits
) -> Program:
    unlocks: list[tuple[int, ...]] = [()] * len(tasks)
    for i, before in enumerate(after):
        for j in before:
            unlocks[j] = (*unlocks[j], i)
    waits, first = tuple(map(len, after)), urgent(tasks, unlocks)
    return Program(rank, world_size, parts, tasks, waits, tuple(unlocks), first)


def _rounds(part: Part, codec: Codec) -> tuple[int, ...]:
    """Bytes of each round."""
    return tuple(Layout.of_round(part, codec, number).size for number in range(len(part.rounds)))


def urgent(tasks: Sequence[Task], unlocks: Sequence[Sequence[int]]) -> tuple[bool, ...]:
    """True for each task before a send or reduce: the link must not wait for mere decodes."""
    flags = [isinstance(task, Send | Reduce) for task in tasks]
    for i in reversed(range(len(tasks))):
        flags[i] = flags[i] or any(flags[j] for j in unlocks[i])
    return tuple(flags)
