"""Where the payloads of a program lie on this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from casync.codec import FLOAT_BYTES, Codec, DeviceCodec
from casync.graph.fusion import in_place
from casync.graph.graph import Program
from casync.graph.layout import Layout
from casync.graph.tasks import EncodeRound, Recv, Reduce, ReduceRound, Send, Task
from casync.memory import Memory
from casync.memory.slots import Buffer, Slot, StagedSlot
from casync.regions import whole_key

__all__ = ["Payloads"]


class Payloads:
    """A slot for every payload; it is empty where the bucket is used."""

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
        """See Prepared."""
        self._codecs, self._parts, self._memory = codecs, program.parts, memory
        self._tags, self._checksum, self._waits = tags, checksum, waits
        self._layouts: dict[tuple[int, str], Layout] = {}
        self.by_payload: dict[int, Slot | Buffer] = {}
        self._rounds: dict[int, list[Slot | Buffer]] = {}  # by part: of its rounds, in order
        self._sent = {task.payload for task in program.tasks if isinstance(task, Send)}
        self._leave = {t.payload for t in program.tasks if isinstance(t, Send | Reduce)}
        apart = halves or (tags and not memory.host)
        self._in_place = frozenset[int]() if apart else in_place(program)
        self.slots = [self._slot(task) for task in program.tasks]  # by task
        self.varying = [] if tags else _varying(program, self.by_payload)

    def in_bucket(self, task: Task) -> bool:
        """Whether a task's payload lies in place of one in the bucket."""
        return task.payload in self._in_place

    def rounds(self, part: int) -> list[Slot | Buffer]:
        """Of a part's rounds, in order."""
        return self._rounds[part]

    def reduce_view(self, task: Task, bucket: torch.Tensor) -> torch.Tensor:
        """What the native all-reduce combines: the payload, or the bucket in place of one."""
        if self.in_bucket(task):
            start, length = self._parts[task.part].rows[0][:2]
            return bucket.detach()[start : start + length]
        codec = self._codecs[task.codec]
        name = codec.rounds[task.round].dtype if isinstance(task, ReduceRound) else codec.additive
        return self.by_payload[task.payload].numbers().view(_DTYPES[name or ""])

    def reduce_bytes(self, task: Task) -> int:
        """Bytes of what the native all-reduce combines."""
        if self.in_bucket(task):
            return FLOAT_BYTES * self._parts[task.part].rows[0][1]
        return self.by_payload[task.payload].layout.size

    def _slot(self, task: Task) -> Slot | Buffer:
        if isinstance(task, EncodeRound):
            self.by_payload[task.payload] = self._round_slot(task)
        if task.payload not in self.by_payload:
            layout = _EMPTY if self.in_bucket(task) else self._layout(task)
            source = task.peer if isinstance(task, Recv) else task.rank
            cuts = self._codecs[task.codec].cuts
            self.by_payload[task.payload] = self._new_slot(layout, source, task.payload, cuts)
        return self.by_payload[task.payload]

    def _new_slot(
        self, layout: Layout, source: int, payload: int, cuts: bool = False
    ) -> Slot | Buffer:
        """See [Note: three kinds of slots]."""
        if not self._tags:
            return Buffer(layout, source, self._memory, cuts=cuts, waits=self._waits)
        sent, checksum = payload in self._sent, self._checksum
        if self._memory.host:
            return Slot(layout, source, sent, self._memory, checksum=checksum)
        leaves = payload in self._leave
        return StagedSlot(layout, source, sent, leaves, self._memory, checksum=checksum)

    def _layout(self, task: Task) -> Layout:
        key = (task.part, task.codec)
        if key not in self._layouts:
            layout = Layout.of(self._parts[task.part], self._codecs[task.codec])
            self._layouts[key] = self._held(layout, self._codecs[task.codec])
        return self._layouts[key]

    def _held(self, layout: Layout, codec: Codec) -> Layout:
        """On a device, with numbers that its codec holds."""
        if self._memory.host:
            return layout
        hold = cast(DeviceCodec, codec).hold
        return replace(layout, at=hold(layout.at), bound=hold(layout.bound))

    def _round_slot(self, task: EncodeRound) -> Slot | Buffer:
        """Of a round's payload, which the encode of the round makes."""
        codec = self._codecs[task.codec]
        layout = self._held(Layout.of_round(self._parts[task.part], codec, task.round), codec)
        slot = self._new_slot(layout, task.rank, task.payload)
        self._rounds.setdefault(task.part, []).append(slot)
        return slot


def _varying(program: Program, slots: Mapping[int, Slot | Buffer]) -> list[tuple[Buffer, str, int]]:
    """Payloads whose lengths vary, their codecs, and how often each is sent."""
    sends = Counter(task.payload for task in program.tasks if isinstance(task, Send))
    codecs = {task.payload: whole_key(task.codec)[0] for task in program.tasks}
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
