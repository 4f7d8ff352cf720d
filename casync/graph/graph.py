"""The task graph over all ranks, its text form, and its slice for one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from casync.codec import OPERATIONS, Codec, Operation
from casync.errors import GraphSyntaxError, PlanError
from casync.graph.builder import Builder
from casync.graph.layout import Layout
from casync.graph.plan import Part
from casync.graph.tasks import Recv, Reduce, ReduceRound, Send, Task, parse_task
from casync.strategies import load

if TYPE_CHECKING:
    import networkx as nx

    Dag: TypeAlias = nx.DiGraph[int]

__all__ = ["Graph", "Program", "build"]

_TITLE = "casync graph 1"
_COLOURS = {
    "encode": "gold",
    "decode": "khaki",
    "merge": "orange",
    "send": "skyblue",
    "recv": "lightblue",
    "reduce": "palegreen",
    "encode_round": "gold",
    "reduce_round": "palegreen",
    "decode_rounds": "khaki",
}


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's tasks, in the graph's global order, as flat arrays.

    `waits[i]` counts the tasks of this rank that task i waits for; `unlocks[i]` are the tasks
    that wait for i. A recv waits for nothing here: its buffer is free when the job starts.
    """

    rank: int
    world_size: int
    parts: tuple[Part, ...]
    tasks: tuple[Task, ...]
    waits: tuple[int, ...]
    unlocks: tuple[tuple[int, ...], ...]
    urgent: tuple[bool, ...]  # whether another rank will wait for what follows from task i


@dataclass(frozen=True)
class Graph:
    """Tasks of all ranks in one global order; `after[i]` are the positions task i waits for."""

    world_size: int
    parts: tuple[Part, ...]
    message_bytes: tuple[int, ...]  # by part: bound of its message, or of all its rounds
    tasks: tuple[Task, ...]
    after: tuple[tuple[int, ...], ...]
    round_bytes: tuple[tuple[int, ...], ...] = ()  # by part: of each of its rounds

    def bytes_of(self, task: Task) -> int:
        """Bound of what a send, recv or reduce moves."""
        if isinstance(task, ReduceRound):
            return self.round_bytes[task.part][task.round]
        return self.message_bytes[task.part]

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
        unlocks: list[list[int]] = [[] for _ in mine]
        waits = []
        for i, position in enumerate(mine):
            before = [local[j] for j in self.after[position] if j in local]
            waits.append(len(before))
            for j in before:
                unlocks[j].append(i)
        tasks = tuple(self.tasks[i] for i in mine)
        flat = tuple(tuple(u) for u in unlocks)
        urgent = _urgent(tasks, flat)
        return Program(rank, self.world_size, self.parts, tasks, tuple(waits), flat, urgent)

    def text(self) -> str:
        """The dump format; `Graph.parse` reads it back."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield _TITLE
        yield f"world {self.world_size}"
        for part, size in zip(self.parts, self.message_bytes, strict=True):
            rounds = list(zip(part.rounds, self.round_bytes[part.id], strict=True))
            more = [rounds] if rounds else []
            fields = [part.codec, part.strategy, part.owner, part.rows, size, *more]
            yield f"part {part.id} {json.dumps(fields)}"
        for i, (task, after) in enumerate(zip(self.tasks, self.after, strict=True)):
            tail = f" after {','.join(map(str, after))}" if after else ""
            yield f"{i}: {task.text()}{tail}"

    @classmethod
    def parse(cls, text: str) -> Graph:
        """The graph whose `text()` this is; raises GraphSyntaxError with the line's number."""
        lines = text.splitlines()
        parts: list[Part] = []
        sizes: list[int] = []
        rounds: list[tuple[int, ...]] = []
        tasks: list[Task] = []
        after: list[tuple[int, ...]] = []
        number = 2
        try:
            world_size = _parse_head(lines)
            for line in lines[2:]:
                number += 1
                if line.startswith("part "):
                    part, size, each = _parse_part(line, len(parts))
                    parts.append(part)
                    sizes.append(size)
                    rounds.append(each)
                else:
                    task, waits = _parse_line(line, len(tasks))
                    _check_numbers(task, world_size, len(parts))
                    _check_round(task, parts)
                    tasks.append(task)
                    after.append(waits)
            _check_waits(after)
        except (ValueError, TypeError, KeyError, PlanError) as error:
            raise GraphSyntaxError(f"line {number}: {error}") from error
        known = tuple(rounds)
        return cls(world_size, tuple(parts), tuple(sizes), tuple(tasks), tuple(after), known)

    def dot(self) -> str:
        """Graphviz source, a box of tasks per rank."""
        rows = ["digraph casync {", "  rankdir=LR; node [shape=box, style=filled];"]
        for rank in range(self.world_size):
            rows.append(f'  subgraph cluster_{rank} {{ label="rank {rank}";')
            for i, task in enumerate(self.tasks):
                if task.rank == rank:
                    label = f"{task.verb} p{task.part} #{task.payload}"
                    rows.append(f'    t{i} [label="{label}", fillcolor={_COLOURS[task.verb]}];')
            rows.append("  }")
        rows.extend(f"  t{j} -> t{i};" for i, after in enumerate(self.after) for j in after)
        return "\n".join([*rows, "}"]) + "\n"


def build(parts: Sequence[Part], world_size: int, codecs: Mapping[str, Codec]) -> Graph:
    """The graph that synchronizes `parts` over `world_size` ranks; raises PlanError.

    With one rank there is nothing to do, and no task: the bucket is its own average.
    """
    b = Builder(world_size)
    if world_size > 1:
        _check_codecs(parts, codecs)
        phases = [load(part.strategy).build(b, part) for part in parts]
        while phases:
            phases = [phase for phase in phases if next(phase, _DONE) is not _DONE]
    sizes = tuple(Layout.of(part, codecs).size for part in parts)
    rounds = tuple(_rounds(part, codecs) for part in parts)
    return Graph(world_size, tuple(parts), sizes, tuple(b.tasks), tuple(b.after), rounds)


def _rounds(part: Part, codecs: Mapping[str, Codec]) -> tuple[int, ...]:
    """Bytes of each round."""
    if part.codec is None:
        return ()
    codec = codecs[part.codec]
    return tuple(Layout.of_round(part, codec, number).size for number in range(len(part.rounds)))


_DONE = object()


def _check_codecs(parts: Sequence[Part], codecs: Mapping[str, Codec]) -> None:
    for part in parts:
        if part.codec is not None and part.codec not in codecs:
            raise PlanError(f"part {part.id} names unknown codec {part.codec!r}")
        refusal = load(part.strategy).refuses(None if part.codec is None else codecs[part.codec])
        if refusal is not None:
            raise PlanError(refusal)


def _urgent(tasks: Sequence[Task], unlocks: Sequence[Sequence[int]]) -> tuple[bool, ...]:
    """Whether a send or reduce follows, so that the link does not idle behind mere decodes."""
    urgent = [isinstance(task, Send | Reduce) for task in tasks]
    for i in reversed(range(len(tasks))):
        urgent[i] = urgent[i] or any(urgent[j] for j in unlocks[i])
    return tuple(urgent)


def _parse_head(lines: Sequence[str]) -> int:
    if len(lines) < 2 or lines[0] != _TITLE or not lines[1].startswith("world "):
        raise GraphSyntaxError(f"expected {_TITLE!r} and `world N`")
    return int(lines[1].removeprefix("world "))


def _parse_part(line: str, expected: int) -> tuple[Part, int, tuple[int, ...]]:
    _, number, fields = line.split(" ", 2)
    codec, strategy, owner, rows, size, *more = json.loads(fields)
    if int(number) != expected:
        raise GraphSyntaxError(f"expected part {expected}")
    table = tuple((int(a), int(b), int(c), int(d), int(e)) for a, b, c, d, e in rows)
    rounds = [(_operation(op), int(b)) for op, b in more[0]] if more else []
    ops = tuple(op for op, _ in rounds)
    part = Part(expected, codec, strategy, int(owner), table, ops)
    return part, int(size), tuple(b for _, b in rounds)


def _operation(word: str) -> Operation:
    if word not in OPERATIONS:
        raise GraphSyntaxError(f"unknown operation {word!r}; one of {', '.join(OPERATIONS)}")
    return word


def _check_round(task: Task, parts: Sequence[Part]) -> None:
    if not isinstance(task, ReduceRound):
        return
    rounds = parts[task.part].rounds
    if task.round >= len(rounds):
        raise GraphSyntaxError(f"part {task.part} has no round {task.round}")
    if task.op != rounds[task.round]:
        expected = rounds[task.round]
        raise GraphSyntaxError(f"round {task.round} of part {task.part} is a {expected}")


def _parse_line(line: str, expected: int) -> tuple[Task, tuple[int, ...]]:
    number, _, rest = line.partition(": ")
    if number != str(expected):
        raise GraphSyntaxError(f"expected task {expected}")
    task, _, after = rest.partition(" after ")
    waits = tuple(int(w) for w in after.split(",")) if after else ()
    return parse_task(task), waits


def _check_waits(after: Sequence[Sequence[int]]) -> None:
    highest = max((w for waits in after for w in waits), default=0)
    if highest >= len(after) > 0:
        raise GraphSyntaxError(f"a task waits for task {highest} of {len(after)}")


def _check_numbers(task: Task, world_size: int, parts: int) -> None:
    peer = task.peer if isinstance(task, Send | Recv) else 0
    if task.rank >= world_size or peer >= world_size or task.part >= parts:
        raise GraphSyntaxError(f"rank, peer or part out of range in {task.text()!r}")
