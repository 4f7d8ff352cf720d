"""A graph as text that parses back."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from urllib.parse import unquote

from casync.building.parts import Part
from casync.building.tasks import (
    SIDES,
    Decode,
    DecodeRounds,
    Encode,
    EncodeRound,
    Follow,
    Merge,
    Recv,
    Reduce,
    ReduceRound,
    Send,
    Task,
)
from casync.codec import OPERATIONS, Operation
from casync.errors import PlanError
from casync.graph.graph import Graph
from casync.topology import Topology

__all__ = ["GraphSyntaxError", "dump", "parse", "parse_task"]

_TITLE = "casync graph 2"


class GraphSyntaxError(PlanError):
    """A text form that does not parse."""


def dump(graph: Graph) -> str:
    """The text form; `parse` reads it back."""
    return "\n".join(_lines(graph)) + "\n"


def parse(text: str) -> Graph:
    """The graph that `dump` wrote; raises GraphSyntaxError with the line's number."""
    lines = text.splitlines()
    parts: list[tuple[Part, dict[str, int], tuple[int, ...]]] = []
    tasks: list[Task] = []
    after: list[tuple[int, ...]] = []
    number = 2
    try:
        topology = _parse_head(lines)
        for line in lines[2:]:
            number += 1
            if line.startswith("part "):
                parts.append(_parse_part(line, len(parts)))
                continue
            task, waits = _parse_line(line, len(tasks))
            _check(task, topology, parts)
            tasks.append(task)
            after.append(waits)
        _check_waits(after)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, PlanError) as error:
        raise GraphSyntaxError(f"line {number}: {error}") from error
    known, sizes, rounds = zip(*parts, strict=True) if parts else ((), (), ())
    return Graph(topology, known, sizes, tuple(tasks), tuple(after), rounds)


def _lines(graph: Graph) -> Iterator[str]:
    yield _TITLE
    yield f"nodes {json.dumps(graph.topology.nodes)}"
    for part in graph.parts:
        rounds = list(zip(part.rounds, graph.round_bytes[part.id], strict=True))
        sizes = graph.message_bytes[part.id]
        fields = [part.codec, part.down, part.strategy, part.owner, part.rows, sizes, rounds]
        yield f"part {part.id} {json.dumps(fields)}"
    for i, (task, after) in enumerate(zip(graph.tasks, graph.after, strict=True)):
        tail = f" after {','.join(map(str, after))}" if after else ""
        yield f"{i}: {task.text()}{tail}"


def _parse_head(lines: Sequence[str]) -> Topology:
    if len(lines) < 2 or lines[0] != _TITLE or not lines[1].startswith("nodes "):
        raise GraphSyntaxError(f"expected {_TITLE!r} and `nodes [[...], ...]`")
    nodes = json.loads(lines[1].removeprefix("nodes "))
    return Topology(tuple(tuple(int(rank) for rank in node) for node in nodes))


def _parse_part(line: str, expected: int) -> tuple[Part, dict[str, int], tuple[int, ...]]:
    _, number, fields = line.split(" ", 2)
    codec, down, strategy, owner, rows, sizes, rounds = json.loads(fields)
    if int(number) != expected:
        raise GraphSyntaxError(f"expected part {expected}")
    table = tuple((int(a), int(b), int(c), int(d), int(e)) for a, b, c, d, e in rows)
    ops = tuple(_operation(op) for op, _ in rounds)
    part = Part(expected, codec, strategy, int(owner), table, down, ops)
    return part, {key: int(n) for key, n in sizes.items()}, tuple(int(n) for _, n in rounds)


def _operation(word: str) -> Operation:
    if word not in OPERATIONS:
        raise GraphSyntaxError(f"unknown operation {word!r}; one of {', '.join(OPERATIONS)}")
    return word


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


def _check(task: Task, topology: Topology, parts: Sequence[tuple[Part, Any, Any]]) -> None:
    """Raise GraphSyntaxError for a task that names an unknown rank, part or payload."""
    ranks = [task.rank]
    ranks += [task.peer] if isinstance(task, Send | Recv) else []
    ranks += task.ranks if isinstance(task, Reduce) else []
    if max(ranks) >= topology.world_size or task.part >= len(parts):
        raise GraphSyntaxError(f"rank, peer or part out of range in {task.text()!r}")
    part, sizes, _ = parts[task.part]
    if task.codec not in sizes:
        raise GraphSyntaxError(f"part {part.id} has no payload of codec {task.codec!r}")
    if isinstance(task, Reduce) and task.rank not in task.ranks:
        raise GraphSyntaxError(f"rank {task.rank} is not among the ranks of {task.text()!r}")
    if isinstance(task, ReduceRound):
        _check_round(task, part)


def _check_round(task: ReduceRound, part: Part) -> None:
    if task.round >= len(part.rounds):
        raise GraphSyntaxError(f"part {part.id} has no round {task.round}")
    if task.op != part.rounds[task.round]:
        expected = part.rounds[task.round]
        raise GraphSyntaxError(f"round {task.round} of part {part.id} is a {expected}")


_KINDS: dict[str, type[Any]] = {
    k.verb: k
    for k in (
        *(Encode, Decode, Merge, Follow, Send, Recv, Reduce),
        *(EncodeRound, ReduceRound, DecodeRounds),
    )
}
_BOOLS = frozenset({"average", "writeback"})
_WORDS = {"side": SIDES, "op": OPERATIONS}
_PAIR = re.compile(r"([a-z]+)=(\S+)")


def parse_task(text: str) -> Task:
    """The task whose `text()` this is; raises GraphSyntaxError."""
    verb, *words = text.split()
    if verb not in _KINDS:
        raise GraphSyntaxError(f"unknown task {verb!r}; one of {', '.join(_KINDS)}")
    pairs = [_PAIR.fullmatch(word) for word in words]
    keys = [m[1] for m in pairs if m]
    expected = [f.name for f in dataclasses.fields(_KINDS[verb])]
    if keys != expected or None in pairs:
        raise GraphSyntaxError(f"expected `{verb} {'=.. '.join(expected)}=..`, got {text!r}")
    try:
        values = {m[1]: _value(m[1], m[2]) for m in pairs if m}
    except ValueError as error:
        raise GraphSyntaxError(f"bad value of {error} in {text!r}") from None
    return cast(Callable[..., Task], _KINDS[verb])(**values)


def _value(key: str, word: str) -> int | bool | str | tuple[int, ...]:
    """The value of a `_word`; ValueError names the key."""
    if key == "codec":
        return unquote(word)
    if key in _WORDS and word in _WORDS[key]:
        return word
    if key in ("ranks", "to") and re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", word):
        ends = [run.split("-") for run in word.split(",")]
        return tuple(n for run in ends for n in range(int(run[0]), int(run[-1]) + 1))
    if not word.isdigit() or (key in _BOOLS and word not in "01"):
        raise ValueError(repr(key))
    return word == "1" if key in _BOOLS else int(word)
