"""Buffers of a program's payloads on this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import cast

import numpy as np
import torch

from casync.building.tasks import EncodeRound, Recv, Reduce, ReduceRound, Send, Task, members
from casync.codec import FLOAT_BYTES, Codec, DeviceCodec
from casync.errors import PlanError
from casync.graph.fusion import in_place
from casync.graph.graph import Program
from casync.graph.joining import side_by_side
from casync.graph.layout import Layout
from casync.memory import Memory
from casync.memory.slots import Buffer, Slot, StagedSlot
from casync.raw import RAW

__all__ = ["Payloads"]


class Payloads:
    """A slot for every payload; its slot is empty if the bucket itself is used. All slots are in
    one `arena`, so that a call can take any of them."""

    def __init__(
        self,
        program: Program,
        codecs: Mapping[str, Codec],
        *,
        memory: Memory,
        tags: bool,
        checksum: bool,
        waits: bool,
        halves: bool,
    ) -> None:
        """Arguments as for Prepared."""
        self._codecs, self._parts, self._memory = codecs, program.parts, memory
        self._tags, self._checksum, self._waits = tags, checksum, waits
        tasks = [each for task in program.tasks for each in members(task)]
        self._sent = {task.payload for task in tasks if isinstance(task, Send)}
        self._leave = {t.payload for t in tasks if isinstance(t, Send | Reduce)}
        self._item = FLOAT_BYTES // 2 if halves else FLOAT_BYTES  # bytes of a bucket's element
        self.native = not memory.host and all(task.codec == RAW for task in tasks)
        apart = (halves and not self.native) or (tags and not memory.host)
        self._in_place = frozenset[int]() if apart else in_place(program)
        self.native &= all(map(self.in_bucket, tasks))
        first = _arrange(program)
        self._layouts: dict[tuple[object, ...], Layout] = {}
        layouts = {payload: self._layout(task) for payload, task in first.items()}
        front = Slot.front(checksum) if tags and memory.host else 0
        sizes = [front + layout.size for layout in layouts.values()]  # multiples of ALIGN
        room = sum(sizes)
        whole = memory.staging(room) if front else memory.zeros(room, torch.uint8)
        self._whole, self.arena = whole, memory.array(whole)
        self.by_payload: dict[int, Slot | Buffer] = {}
        self.base: dict[int, int] = {}  # by payload: beginning of its array in the arena
        self._rounds: dict[int, list[Slot | Buffer]] = {}  # by part: slots of its rounds, in order
        begins = accumulate(sizes, initial=0)
        for (payload, task), begin in zip(first.items(), begins, strict=False):
            layout = layouts[payload]
            piece = whole[begin : begin + front + layout.size]
            self.by_payload[payload] = self._slot(task, layout, piece)
            self.base[payload] = begin + front
        self._check_messages(program)
        self.slots = [self.by_payload[task.payload] for task in program.tasks]  # by task
        #: the same by what they can do: all of them, or none
        self.messages = [each for each in self.slots if isinstance(each, Slot | StagedSlot)]
        self.staged = [each for each in self.slots if isinstance(each, StagedSlot)]
        self.buffers = [each for each in self.slots if isinstance(each, Buffer)]
        self.varying = [] if tags else _varying(tasks, self.by_payload)

    def in_bucket(self, task: Task) -> bool:
        """True if the bucket itself holds the task's payload."""
        return task.payload in self._in_place

    def rounds(self, part: int) -> list[Slot | Buffer]:
        """Slots of a part's rounds, in order."""
        return self._rounds[part]

    def _check_messages(self, program: Program) -> None:
        """Raise PlanError unless the payloads of each message lie side by side."""
        place = {payload: i for i, payload in enumerate(self.by_payload)}
        for task in program.tasks:
            first, *others = (place[each.payload] for each in members(task))
            moved = isinstance(task, Send | Recv | Reduce)
            if moved and others != [first + 1 + i for i in range(len(others))]:
                raise PlanError(f"payloads of one message cannot lie side by side: {task.text()}")

    def numbers(self, task: Task) -> torch.Tensor:
        """The bytes that travel: a payload, or a message's payloads side by side."""
        tasks = members(task)
        if len(tasks) == 1:
            return self.by_payload[task.payload].numbers()
        begin, last = self.base[tasks[0].payload], tasks[-1].payload
        return self._whole[begin : self.base[last] + self.by_payload[last].layout.size]

    def reduce_view(self, task: Task, bucket: torch.Tensor) -> torch.Tensor:
        """The numbers that the native all-reduce combines: payloads, or a piece of the bucket."""
        if self.in_bucket(task):
            start, length = self._parts[task.part].rows[0][:2]
            return bucket.detach()[start : start + length]
        codec = self._codecs[task.codec]
        name = codec.rounds[task.round].dtype if isinstance(task, ReduceRound) else codec.additive
        return self.numbers(task).view(_DTYPES[name or ""])

    def shares(self, task: Reduce) -> tuple[int, ...]:
        """Bytes of `reduce_view`, by rank of the task, whose sum that rank needs; () if all need
        all."""
        if task.to == task.ranks:
            return ()
        sizes = Counter[int]()
        for each in cast(Sequence[Reduce], members(task)):
            sizes[each.to[0]] += self.by_payload[each.payload].layout.size
        return tuple(sizes[rank] for rank in task.ranks)

    def reduce_bytes(self, task: Task) -> int:
        """Bytes that the native all-reduce combines."""
        if self.in_bucket(task):
            return self._item * self._parts[task.part].rows[0][1]
        return sum(self.by_payload[each.payload].layout.size for each in members(task))

    def _slot(self, task: Task, layout: Layout, room: torch.Tensor) -> Slot | Buffer:
        """A new slot for a task's payload: see [Note: three kinds of slots]."""
        source = task.peer if isinstance(task, Recv) else task.rank
        slot = self._new_slot(layout, source, task, room)
        if isinstance(task, EncodeRound):
            self._rounds.setdefault(task.part, []).append(slot)
        return slot

    def _new_slot(
        self, layout: Layout, source: int, task: Task, room: torch.Tensor
    ) -> Slot | Buffer:
        if not self._tags:
            cuts = self._codecs[task.codec].cuts and not isinstance(task, EncodeRound)
            return Buffer(layout, source, self._memory, cuts=cuts, waits=self._waits, room=room)
        sent, checksum = task.payload in self._sent, self._checksum
        if self._memory.host:
            return Slot(layout, source, sent, self._memory, checksum=checksum, room=room)
        leaves = task.payload in self._leave
        return StagedSlot(layout, source, sent, leaves, self._memory, checksum=checksum, room=room)

    def _layout(self, task: Task) -> Layout:
        """Layout of the task's payload; for a round, of its encode."""
        if self.in_bucket(task):
            return _EMPTY
        part, codec = self._parts[task.part], self._codecs[task.codec]
        if isinstance(task, EncodeRound):
            return self._on_device(Layout.of_round(part, codec, task.round), codec)
        key = (task.part, task.codec)
        if key not in self._layouts:
            self._layouts[key] = self._on_device(Layout.of(part, codec), codec)
        return self._layouts[key]

    def _on_device(self, layout: Layout, codec: Codec) -> Layout:
        """The layout; on a device, with numbers that the codec holds there."""
        if self._memory.host:
            return layout
        hold = cast(DeviceCodec, codec).hold
        return replace(layout, at=hold(layout.at), bound=hold(layout.bound))


def _arrange(program: Program) -> dict[int, Task]:
    """Payloads in the order of the arena, with the first task of each: see [Note: side by side]."""
    first: dict[int, Task] = {}
    for each in (each for task in program.tasks for each in members(task)):
        first.setdefault(each.payload, each)
    moved = (members(t) for t in program.tasks if isinstance(t, Send | Recv | Reduce))
    outer: dict[int, tuple[int, int]] = {}  # by payload: its place in the largest message with it
    for number, tasks in enumerate(sorted(moved, key=len, reverse=True)):
        for position, each in enumerate(tasks):
            outer.setdefault(each.payload, (number, position))
    alone = sorted(set(first) - set(outer), key=lambda p: side_by_side(program, first[p]))
    order = [*sorted(outer, key=outer.__getitem__), *alone]
    return {payload: first[payload] for payload in order}


def _varying(
    tasks: Sequence[Task], slots: Mapping[int, Slot | Buffer]
) -> list[tuple[Buffer, str, int]]:
    """Payloads whose lengths vary, their codecs, and the number of sends of each."""
    sends = Counter(task.payload for task in tasks if isinstance(task, Send))
    codecs = {task.payload: task.codec for task in tasks}
    return [
        (slot, codecs[payload], sends[payload])
        for payload, slot in slots.items()
        if isinstance(slot, Buffer) and not slot.layout.fixed
    ]


_NOTHING = np.zeros(0, np.int64)
_EMPTY = Layout(True, 0, _NOTHING, _NOTHING, 0)
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}
