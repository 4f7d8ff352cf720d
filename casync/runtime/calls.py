"""Codec calls of a program's tasks, prepared once: the work of the compute lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from casync.building.tasks import (
    SIDES,
    DecodeRounds,
    Encode,
    EncodeRound,
    Follow,
    Merge,
    Recv,
    Reduce,
    Send,
    Side,
    Task,
    members,
)
from casync.codec import Codec, DeviceCodec, Ints
from casync.estimates import copy_of
from casync.graph.graph import Program
from casync.memory import Memory
from casync.rounds import as_rounds
from casync.runtime.deferral import Deferral, DeviceDeferral, restore
from casync.runtime.payloads import Payloads
from casync.runtime.pieces import InBucket, Inputs, View, pieces_of

__all__ = ["Calls", "TaskFn", "mix_seed"]

TaskFn: TypeAlias = Callable[[Inputs], None]


def mix_seed(seed: int, rank: int, side: Side) -> int:
    """A 63-bit seed that differs by rank and side (splitmix64 of the three)."""
    value = seed + 0x9E3779B97F4A7C15 * (1 + 2 * rank + SIDES.index(side))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value &= 0xFFFFFFFFFFFFFFFF
        value = (value ^ (value >> shift)) * factor
    value &= 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 1


class Call:
    """A codec call, made once: values that are the same in every step are prepared here."""

    def __init__(
        self,
        payloads: Payloads,
        turns: Sequence[Sequence[int]],
        tables: Sequence[Ints],
        codec: DeviceCodec | None,
        *,
        repeats: bool = True,
    ) -> None:
        """turns: numbers of payloads, one for each table, whose rows are their pieces; later turns
        are added to the first. codec: that of a device; None on the host. repeats: True if the
        table gets a row for each turn of a piece, one after the other; otherwise the call gets
        places of shape [k, m].
        """
        numbers = [number for turn in turns for number in turn]
        self._slots = [payloads.by_payload[number] for number in numbers]
        self._bases = [payloads.base[number] for number in numbers]
        self.array: Any = payloads.arena
        if len(numbers) == 1:
            self.array, self._bases = self._slots[0].array, [0]
        if codec is not None:
            self.array = codec.view(self.array)
        self._hold: Callable[[Ints], Ints] = _same if codec is None else codec.hold
        self._turns, rows = len(turns), np.concatenate(tables)
        self._repeats = repeats and len(turns) > 1
        self.table = self._hold(np.repeat(rows, len(turns), axis=0) if self._repeats else rows)
        self._ends = np.cumsum([len(table) for table in tables]).tolist()
        self._last: dict[str, tuple[list[Ints], Ints]] = {}  # results of _cached
        fixed = all(slot.layout.fixed for slot in self._slots)
        self._known = (self._at(), self._used()) if fixed else None

    def places(self) -> tuple[Ints, dict[str, Ints]]:
        """Slot.places for all pieces."""
        if self._known is not None:
            return self._known[0], {}
        pairs = [slot.places() for slot in self._slots]
        at = self._cached("places", [at for at, _ in pairs], self._in_arena)
        return at, {
            name: self._cached(name, [more[name] for _, more in pairs], _concatenate)
            for name in pairs[0][1]
        }

    def fill(self, used: Any) -> None:
        """Take the used bytes of a new encode of all payloads."""
        begin = 0
        for slot, end in zip(self._slots, self._ends, strict=True):
            slot.fill(used[begin:end])
            begin = end

    def contents(self) -> tuple[Ints, Any]:
        """First byte of each piece's payload, and its used bytes."""
        return self._known or (self._at(), self._used())

    def _at(self) -> Ints:
        return self._cached("at", [slot.contents[0] for slot in self._slots], self._in_arena)

    def _cached(self, name: str, arrays: list[Ints], join: Callable[[list[Ints]], Ints]) -> Ints:
        """`join(arrays)`, cached until the arrays change: rooms seldom do."""
        known = self._last.get(name)
        if known is None or any(a is not b for a, b in zip(known[0], arrays, strict=True)):
            known = self._last[name] = arrays, self._hold(join(arrays))
        return known[1]

    def _used(self) -> Any:
        if len(self._slots) == 1:
            return self._slots[0].contents[1]
        every: list[Any] = [slot.contents[1] for slot in self._slots]
        if isinstance(every[0], torch.Tensor):
            return torch.cat(every)
        used = self._interleave(np.concatenate(every))
        return self._hold(used) if all(slot.layout.fixed for slot in self._slots) else used

    def _in_arena(self, every: Sequence[Ints]) -> Ints:
        """Places relative to the arena."""
        if len(every) == 1:
            return every[0]
        pairs = zip(every, self._bases, strict=True)
        return self._interleave(np.concatenate([at + base for at, base in pairs]))

    def _interleave(self, numbers: Ints) -> Ints:
        """Numbers of all turns: a row per turn, or a piece's turns one after the other."""
        if self._turns == 1:
            return numbers
        rows = numbers.reshape(self._turns, -1)
        return rows.T.ravel() if self._repeats else rows


class Calls:
    """Makes the calls of a program's tasks, with the tables and buffers of every run."""

    def __init__(
        self,
        program: Program,
        codecs: Mapping[str, Codec],
        payloads: Payloads,
        seed: int,
        deferred: Mapping[str, Sequence[str]],
        memory: Memory,
        *,
        halves: bool,
    ) -> None:
        self._codecs, self._payloads, self._deferred = codecs, payloads, deferred
        self._parts, self._world_size = program.parts, program.world_size
        self._memory = memory
        self._seeds = {side: mix_seed(seed, program.rank, side) for side in SIDES}
        encodes = [t for task in program.tasks for t in members(task) if isinstance(t, Encode)]
        most = sum(self._states_of(t) for t in encodes)
        self._scratch = memory.zeros(0 if memory.host else most, torch.float32)
        self._pieces = pieces_of(program, memory, halves=halves and not payloads.native)

    def of(self, index: int, task: Task) -> TaskFn | None:
        """The work of a task; None for tasks of other lanes."""
        if isinstance(task, Send | Recv | Reduce):
            return None
        if self._payloads.in_bucket(task):
            return self._scale(task) if isinstance(task, Encode) else _nothing
        match task:
            case Follow():
                return self._follow(task)
            case EncodeRound():
                return self._encode_round(task, self._pieces[index, task.part])
            case DecodeRounds():
                return self._decode_rounds(task, self._pieces[index, task.part])
        tasks = members(task)
        encodes = [each for each in tasks if isinstance(each, Encode)]
        if not encodes:
            return self._decode(index, tasks)
        incoming = [each for each in tasks if not isinstance(each, Encode)]
        return self._encode(index, encodes, self._call(index, [incoming]) if incoming else None)

    def _call(self, index: int, turns: Sequence[Sequence[Task]], *, repeats: bool = True) -> Call:
        tables = [self._table(index, task) for task in turns[0]]
        numbers = [[task.payload for task in turn] for turn in turns]
        codec = cast(DeviceCodec, self._codecs[turns[0][0].codec])
        mine = None if self._memory.host else codec
        return Call(self._payloads, numbers, tables, mine, repeats=repeats)

    def _table(self, index: int, task: Task) -> Ints:
        """The table of a task's pieces, with their places in the states of its side."""
        table, owned = self._pieces[index, task.part].table, self._parts[task.part].owned
        if owned and isinstance(task, Encode) and task.side == "aggregator":
            table = np.column_stack([table[:, :4], owned])
        return table

    def _holding(self, codec: str) -> Callable[[Ints], Ints]:
        """The codec's `hold`, which copies constant numbers to the device once."""
        return _same if self._memory.host else cast(DeviceCodec, self._codecs[codec]).hold

    def _viewing(self, codec: str, waits: Deferral | None = None) -> View | None:
        """The `view` of a device's codec, by which it takes a bucket; None where torch looks into
        the bucket, for pieces in use."""
        return None if self._memory.host or waits else cast(DeviceCodec, self._codecs[codec]).view

    def _encode(self, index: int, tasks: Sequence[Encode], incoming: Call | None) -> TaskFn:
        pieces, first = self._pieces[index, tasks[0].part], tasks[0]
        call = self._call(index, [tasks])
        table, scale, codec = call.table, self._factor(first), self._codecs[first.codec]
        waits = self._deferral(tasks, table)
        encode, decode, stateful = codec.encode_batch, codec.decode_batch, bool(codec.states)
        key = self._parts[first.part].codec, first.side  # key of the states, also if `down` encodes
        seed, writeback, out = self._seeds[first.side], first.writeback, call.array
        view = self._viewing(first.codec, waits)

        def work(run: Inputs) -> None:
            (at, room), x = call.places(), pieces.open(run, view)
            more: dict[str, Any] = dict(room)
            state, deferred = run.states.get(key) if stateful else None, list[Any]()
            if incoming is not None:
                more["incoming"] = (incoming.array, *incoming.contents())
            if waits and state:
                if incoming is not None and waits.idle(x):  # `incoming` may not be zero
                    payload, place, used = more.pop("incoming")
                    decode(payload, table, place, used, x, add=True, step=run.step)
                deferred = waits.defer(x, state)
            call.fill(
                encode(
                    x, table, out, at, state=state,
                    seed=seed, step=run.step, scale=scale, writeback=writeback, **more,
                )
            )  # fmt: skip
            if deferred:
                restore(deferred)
            pieces.close(run)

        return work

    def _names(self, task: Task) -> Sequence[str]:
        """States of the task's codec that may wait."""
        return self._deferred.get(task.codec, ())

    def _deferral(self, tasks: Sequence[Encode], table: Ints) -> Deferral | None:
        names, size = self._names(tasks[0]), sum(map(self._states_of, tasks))
        if not names or self._memory.host:
            return Deferral(names, table) if names else None
        # encodes follow one another on a stream; between rounds nothing is restored
        rounds = isinstance(tasks[0], EncodeRound)
        scratch = self._memory.zeros(size, torch.float32) if rounds else self._scratch[:size]
        return DeviceDeferral(names, table, self._memory, scratch)

    def _states_of(self, task: Task) -> int:
        """Number of elements of a part's states that may wait."""
        return len(self._names(task)) * self._parts[task.part].elements

    def _factor(self, task: Encode) -> float:
        return 1.0 / self._world_size if task.average else 1.0

    def _scale(self, task: Encode) -> TaskFn:
        """The work of an encode in place."""
        start, length = self._parts[task.part].rows[0][:2]
        factor = float(np.float32(self._factor(task)))

        def work(run: Inputs) -> None:
            piece = run.array[start : start + length]
            piece *= factor

        return work

    def _encode_round(self, task: EncodeRound, pieces: InBucket) -> TaskFn:
        key, slot = task.codec, self._payloads.by_payload[task.payload]
        table = self._holding(key)(pieces.table)
        encode, seed, workers = (
            as_rounds(self._codecs[key]).encode_round, self._seeds["worker"], self._world_size,
        )  # fmt: skip
        sums = [(s.array, s.layout.at) for s in self._payloads.rounds(task.part)[: task.round]]
        number, out, at = task.round, slot.array, slot.layout.at
        waits = self._deferral([task], table) if number == 0 else None
        view = self._viewing(key, waits)

        def work(run: Inputs) -> None:
            state, x = run.states.get((key, "worker")), pieces.open(run, view)
            if waits and state:
                run.deferred[task.part] = waits.defer(x, state)
            slot.fill(
                encode(
                    number, x, table, out, at, sums, workers=workers,
                    state=state, seed=seed, step=run.step,
                )
            )  # fmt: skip
            pieces.close(run)

        return work

    def _decode_rounds(self, task: DecodeRounds, pieces: InBucket) -> TaskFn:
        key, table = task.codec, self._holding(task.codec)(pieces.table)
        decode, seed, workers = (
            as_rounds(self._codecs[key]).decode_rounds, self._seeds["worker"], self._world_size,
        )  # fmt: skip
        sums = [(s.array, s.layout.at) for s in self._payloads.rounds(task.part)]
        view = self._viewing(key)

        def work(run: Inputs) -> None:
            state, x = run.states.get((key, "worker")), pieces.open(run, view)
            decode(x, table, sums, workers=workers, state=state, seed=seed, step=run.step)
            pieces.close(run)
            restore(run.deferred.pop(task.part, []))

        return work

    def _decode(self, index: int, tasks: Sequence[Task]) -> TaskFn:
        codec, add = self._codecs[tasks[0].codec], isinstance(tasks[0], Merge)
        pieces, decode = self._pieces[index, tasks[0].part], codec.decode_batch
        turns, view = list(_in_turn(tasks)), self._viewing(tasks[0].codec)
        # kernels process all rows of a table at once, so no two rows may be of the same piece
        if self._memory.host:
            calls = [self._call(index, turns)]
        elif codec.fixed and cast(DeviceCodec, codec).merges:
            calls = [self._call(index, turns, repeats=False)]
        else:
            calls = [self._call(index, [turn]) for turn in turns]

        def work(run: Inputs) -> None:
            x = pieces.open(run, view)
            for call in calls:
                at, used = call.contents()
                decode(call.array, call.table, at, used, x, add=add, step=run.step)
            pieces.close(run)

        return work

    def _follow(self, task: Follow) -> TaskFn:
        slot = self._payloads.by_payload[task.payload]
        decode, part = self._codecs[task.codec].decode_batch, self._parts[task.part]
        pieces = InBucket(part)
        pieces.table[:, 0] = pieces.table[:, 4]  # positions in the state's arrays
        table = self._holding(task.codec)(pieces.table)
        key, name = (part.codec, "worker"), copy_of(task.peer)

        def work(run: Inputs) -> None:
            (at, used, _), copy = slot.contents, run.states[key][name]
            decode(slot.array, table, at, used, copy, add=True, step=run.step)

        return work


def _in_turn(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Tasks in turns, each with at most one task of a part; in order."""
    by_part: dict[int, list[Task]] = {}
    for task in tasks:
        by_part.setdefault(task.part, []).append(task)
    for some in zip_longest(*by_part.values()):
        yield [task for task in some if task is not None]


def _same(array: Any) -> Any:
    return array


def _nothing(run: Inputs) -> None:
    """The work of a decode in place."""


def _concatenate(every: Sequence[Ints]) -> Ints:
    return every[0] if len(every) == 1 else np.concatenate(every)
