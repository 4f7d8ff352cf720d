"""Joining of a rank's tasks that can share a codec call or a message.

[Note: bulk] A task has fixed costs, however few its bytes. So a program runs with tasks joined if
they may be done together:
- encodes that wait for nothing, of a bucket's parts for many owners;
- successive merges of one part, and the encode of their sum with the last of them;
- decodes for which nothing waits, of payloads from many owners.

Payloads that arrive one after the other are joined by halves: the first half of them, then half of
the rest, so that there are ceil(log2 N) calls, the last of which has one payload. `most` bounds a
call: on a host, bytes that are encoded together are sent together, and the link would idle.

Without tags a slot's payloads arrive at once. Then all similar tasks that become ready by the same
slot are one call, and all payloads that a slot moves between two ranks, or sums over the same
ranks, are one message: they lie side by side in the program's memory. See [Note: side by side].

All else stays the same: sums in rank order are those of the graph. A joined task waits for tasks
that are done by the same slot at the latest, and nothing in an earlier slot waits for it; so the
proof of the tests still holds.

[Note: side by side] A message has the payloads of parts of any owner, in the order of owners and
parts. On either side, of two messages that share a payload one contains the other, since routes
depend only on a part's owner; so all messages can be contiguous. Strategies that spread whole
tensors are left out: their trees cross.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from casync.building.tasks import (
    Decode,
    Encode,
    Joined,
    JoinedRecv,
    JoinedReduce,
    JoinedSend,
    Merge,
    Recv,
    Reduce,
    Send,
    Task,
    members,
)
from casync.codec import FLOAT_BYTES, Codec
from casync.graph.fusion import fused_merges, in_place
from casync.graph.graph import Program, urgent
from casync.strategies import load

__all__ = ["Bulk", "join_tasks", "side_by_side"]


@dataclass(frozen=True)
class Bulk:
    """Limits of joining."""

    most: float  # gradient bytes of a call for several parts
    apart: bool = False  # True if parts' pieces may be in arrays of their own
    at_once: bool = False  # True if a slot's payloads arrive at the same time


def join_tasks(
    program: Program,
    codecs: Mapping[str, Codec],
    bulk: Bulk,
    fuses: Callable[[Encode], bool] = lambda task: True,
) -> Program:
    """The program with tasks joined. fuses: True if an encode may take in a merge's payload."""
    pairs = {e: m for e, m in fused_merges(program, codecs).items() if fuses(_encode(program, e))}
    groups: list[Sequence[int]] = [(m, e) for e, m in pairs.items()]
    groups += _merges(program, set(pairs.values()), bulk)
    if not bulk.at_once and not bulk.apart:
        groups += _encodes(program, codecs, bulk)
        groups += _decodes(program, bulk)
    program = _contract(program, groups)
    if not bulk.at_once:
        return program
    groups = [*_alike(program, codecs, bulk), *_messages(program, codecs)]
    return _contract(program, groups, sort=True)


def _encode(program: Program, index: int) -> Encode:
    task = program.tasks[index]
    assert isinstance(task, Encode)
    return task


def _encodes(program: Program, codecs: Mapping[str, Codec], bulk: Bulk) -> Iterator[list[int]]:
    alike: dict[object, list[int]] = defaultdict(list)
    inside, alone = in_place(program), _with_state_of_tensors(program, codecs)
    for i, task in enumerate(program.tasks):
        if type(task) is not Encode or program.waits[i] or task.writeback:
            continue
        if task.payload not in inside and task.codec not in alone:
            key = task.codec, program.parts[task.part].codec, task.side, task.average
            alike[key].append(i)
    for group in alike.values():
        yield from _split(program, group, bulk.most)


def _with_state_of_tensors(program: Program, codecs: Mapping[str, Codec]) -> frozenset[str]:
    """Codecs with a state per tensor: a call takes only one of a tensor's pieces."""
    used = {task.codec for task in program.tasks if isinstance(task, Encode)}
    return frozenset(k for k in used if any(s.per == "tensor" for s in codecs[k].states))


def _decodes(program: Program, bulk: Bulk) -> Iterator[list[int]]:
    came, alike = _slots(program), defaultdict[str, list[int]](list)
    for i, task in enumerate(program.tasks):
        if type(task) is Decode and not program.unlocks[i] and task.payload in came:
            alike[task.codec].append(i)
    for group in alike.values():
        for some in _by_arrival(group, [came[program.tasks[i].payload] for i in group], bulk):
            yield from _split(program, some, bulk.most)


def _merges(program: Program, used: set[int], bulk: Bulk) -> Iterator[list[int]]:
    came = _slots(program)
    for chain in _chains(program):
        rest = [i for i in chain if i not in used]
        slots = [came.get(program.tasks[i].payload) for i in chain]
        sizes = [len(some) for some in _by_arrival(chain, slots, bulk)]
        for size in sizes:
            yield rest[:size]
            rest = rest[size:]


def _chains(program: Program) -> Iterator[list[int]]:
    """Chains of merges of a part and a codec, each of which only the next one waits for."""
    open_: dict[int, list[int]] = {}
    for i, task in enumerate(program.tasks):
        if type(task) is Merge:
            chain = open_.setdefault(task.part, [])
            if chain and not _follows(program, chain[-1], i):
                yield chain
                chain = open_[task.part] = []
            chain.append(i)
    yield from open_.values()


def _follows(program: Program, before: int, i: int) -> bool:
    """True if this merge has the codec of the one before, and alone waits for it."""
    same = program.tasks[before].codec == program.tasks[i].codec
    return same and program.unlocks[before] == (i,)


def _slots(program: Program) -> dict[int, int]:
    """Slot of each payload that comes from another rank."""
    return {task.payload: task.slot for task in program.tasks if isinstance(task, Recv)}


def _by_arrival(
    group: Sequence[int], slots: Sequence[int | None], bulk: Bulk
) -> Iterator[Sequence[int]]:
    """The whole group if it arrives at once, otherwise halves of it: see [Note: bulk]."""
    if bulk.at_once and len(set(slots)) == 1:
        yield group
        return
    while group:
        size = -(-len(group) // 2)
        yield group[:size]
        group = group[size:]


def _split(program: Program, group: Sequence[int], most: float) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for i in group:
        more = FLOAT_BYTES * program.parts[program.tasks[i].part].elements
        if batch and size + more > most:
            yield batch
            batch, size = [], 0
        batch.append(i)
        size += more
    yield batch


def _alike(program: Program, codecs: Mapping[str, Codec], bulk: Bulk) -> Iterator[list[int]]:
    """Groups of similar tasks that become ready by the same slot."""
    groups: dict[object, list[int]] = defaultdict(list)
    inside, alone = in_place(program), _with_state_of_tensors(program, codecs)
    levels = _levels(program)
    for i, task in enumerate(program.tasks):
        if task.payload in inside or bulk.apart:
            continue
        key = _kind(program, task, alone)
        if key is not None:
            groups[levels[i], key].append(i)
    yield from groups.values()


def _kind(program: Program, task: Task, alone: frozenset[str]) -> tuple[object, ...] | None:
    """Key of tasks that may share a call, or None."""
    tasks = members(task)
    kinds, first = {type(each) for each in tasks}, tasks[0]
    if kinds == {Encode} and first.codec not in alone:
        assert isinstance(first, Encode)
        owner = program.parts[first.part].codec
        return first.codec, owner, first.side, first.average, first.writeback
    if kinds in ({Merge}, {Decode}):
        return first.codec, type(first), len(tasks)
    if kinds == {Merge, Encode} and len(tasks) == 2:  # an encode that takes in a merge's payload
        alike = _kind(program, tasks[1], alone)
        return None if alike is None else (first.codec, *alike)
    return None


def _levels(program: Program) -> list[tuple[int, int]]:
    """Levels of tasks: the slot after which each may run, and its depth in tasks since that."""
    levels = [(-1, 0)] * len(program.tasks)
    for i, task in enumerate(program.tasks):
        after = levels[i][0], levels[i][1] + 1
        if isinstance(task, Send | Recv | Reduce):
            after = task.slot, 0
        for j in program.unlocks[i]:
            levels[j] = max(levels[j], after)
    return levels


def _messages(program: Program, codecs: Mapping[str, Codec]) -> Iterator[list[int]]:
    """Groups of fixed-length payloads that a slot moves between two ranks, or sums."""
    messages: dict[object, list[int]] = defaultdict(list)
    inside = in_place(program)
    for i, task in enumerate(program.tasks):
        if type(task) not in (Send, Recv, Reduce) or not codecs[task.codec].fixed:
            continue
        spread = load(program.parts[task.part].strategy).SPREADS
        if spread != "tensors" and task.payload not in inside:
            messages[_way(task)].append(i)
    for group in messages.values():
        yield sorted(group, key=lambda i: _order(program, program.tasks[i]))


def _way(task: Task) -> tuple[object, ...]:
    if isinstance(task, Send | Recv):
        return task.verb, task.slot, task.peer, task.channel
    assert isinstance(task, Reduce)
    return task.verb, task.slot, task.ranks, task.codec, task.to == task.ranks


def _order(program: Program, task: Task) -> tuple[int, ...]:
    """`side_by_side`; of sums first by the rank that needs them, for a reduce-scatter."""
    to = task.to[:1] if isinstance(task, Reduce) else ()
    return *to, *side_by_side(program, task)


def side_by_side(program: Program, task: Task) -> tuple[int, ...]:
    """The order of payloads in a message, the same on both sides."""
    owner, ranks = program.parts[task.part].owner, program.world_size
    return owner, task.part, task.payload // ranks, task.payload


def _contract(program: Program, groups: Iterable[Sequence[int]], *, sort: bool = False) -> Program:
    """Replace each group by one task, at the position of its last task (its first if none waits).

    sort: reorder so that tasks come after those that they wait for; otherwise they must already.
    """
    groups = [group for group in groups if len(group) > 1]
    at = {min(g) if not any(program.waits[i] for i in g) else max(g): g for g in groups}
    leader = {i: place for place, group in at.items() for i in group}
    order = [i for i in range(len(program.tasks)) if leader.get(i, i) == i]
    place = {i: number for number, i in enumerate(order)}
    new = [place[leader.get(i, i)] for i in range(len(program.tasks))]
    unlocks: list[set[int]] = [set() for _ in order]
    for i, following in enumerate(program.unlocks):
        unlocks[new[i]].update(new[j] for j in following if new[j] != new[i])
    tasks = [_join([program.tasks[j] for j in at.get(i, (i,))]) for i in order]
    if sort:
        tasks, unlocks = _sort(tasks, unlocks)
    waits = [0] * len(order)
    for j in (j for each in unlocks for j in each):
        waits[j] += 1
    after = tuple(tuple(sorted(each)) for each in unlocks)
    first = urgent(tasks, after)
    return replace(program, tasks=tuple(tasks), waits=tuple(waits), unlocks=after, urgent=first)


def _sort(tasks: Sequence[Task], unlocks: Sequence[set[int]]) -> tuple[list[Task], list[set[int]]]:
    """Order tasks so that unlocked tasks come later; otherwise by position."""
    waits = Counter(j for each in unlocks for j in each)
    ready = [i for i in range(len(tasks)) if not waits[i]]
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for j in unlocks[order[-1]]:
            waits[j] -= 1
            if not waits[j]:
                heapq.heappush(ready, j)
    place = {i: number for number, i in enumerate(order)}
    return [tasks[i] for i in order], [{place[j] for j in unlocks[i]} for i in order]


def _join(tasks: Sequence[Task]) -> Task:
    every = tuple(each for task in tasks for each in members(task))
    first = every[0]
    if len(every) == 1:
        return first
    kind = _JOINED.get(type(first), Joined)
    shared = {f.name: getattr(first, f.name) for f in fields(first)} if kind is not Joined else {}
    return kind(**shared, tasks=every)


_JOINED: Mapping[type, Callable[..., Task]] = {
    Send: JoinedSend, Recv: JoinedRecv, Reduce: JoinedReduce
}  # fmt: skip
