"""What the compute lane calls for a program's tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from casync.codec import Codec, DeviceCodec, Ints
from casync.estimates import copy_of
from casync.graph.fusion import fused
from casync.graph.graph import Program
from casync.graph.tasks import (
    SIDES,
    Decode,
    DecodeRounds,
    Encode,
    EncodeRound,
    Follow,
    Merge,
    Side,
    Task,
)
from casync.memory import Memory
from casync.memory.slots import Buffer, Slot
from casync.regions import whole_key
from casync.rounds import as_rounds
from casync.runtime.deferral import Deferral, DeviceDeferral, restore
from casync.runtime.payloads import Payloads
from casync.runtime.pieces import InBucket, Inputs, pieces_of

__all__ = ["Step", "Steps", "mix_seed"]

Step: TypeAlias = Callable[[Inputs], None]


def mix_seed(seed: int, rank: int, side: Side) -> int:
    """A 63-bit seed that differs by rank and side (splitmix64 of the three)."""
    value = seed + 0x9E3779B97F4A7C15 * (1 + 2 * rank + SIDES.index(side))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value &= 0xFFFFFFFFFFFFFFFF
        value = (value ^ (value >> shift)) * factor
    value &= 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) >> 1


class Steps:
    """Makes the steps of a program, which find tables and buffers as they will be in every run."""

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
        # no host looks whether what a device merges is zero, so it merges before it encodes
        self._taken = {
            encode: merge
            for encode, merge in fused(program, codecs).items()
            if memory.host or not self._names(program.tasks[encode])
        }
        merges = set(self._taken.values())
        most = max((self._states_of(t) for t in program.tasks if isinstance(t, Encode)), default=0)
        self._kept = memory.zeros(0 if memory.host else most, torch.float32)
        self._pieces = pieces_of(program, memory, halves=halves, taken=merges)
        self._tables: dict[tuple[str, InBucket], Ints] = {}

    def of(self, index: int, task: Task) -> Step | None:
        """What the compute lane calls for this task; None for those of other lanes."""
        slot = self._payloads.slots[index]
        if isinstance(task, EncodeRound):
            return self._encode_round(task, slot, self._pieces[index])
        if isinstance(task, DecodeRounds):
            return self._decode_rounds(task, self._pieces[index])
        if self._payloads.in_bucket(task):
            return self._scale(task) if isinstance(task, Encode) else _nothing
        if isinstance(task, Encode):
            before = self._taken.get(index)
            taken = None if before is None else self._payloads.slots[before]
            return self._encode(task, slot, self._pieces[index], taken)
        if index in self._taken.values():
            return _nothing
        if isinstance(task, Decode | Merge):
            return self._decode(task, slot, self._pieces[index])
        if isinstance(task, Follow):
            return self._follow(task, slot)
        return None

    def _encode(
        self, task: Encode, slot: Slot | Buffer, pieces: InBucket, taken: Slot | Buffer | None
    ) -> Step:
        table, scale = self._table(task.codec, pieces), self._factor(task)
        codec, waits = self._codecs[task.codec], self._deferral(task, pieces)
        encode, decode, stateful = codec.encode_batch, codec.decode_batch, codec.stateful
        key = self._parts[task.part].codec, task.side  # of the states, whatever this side's codec
        seed, writeback = self._seeds[task.side], task.writeback
        out = slot.array

        def step(run: Inputs) -> None:
            (at, room), x = slot.places(), pieces.open(run)
            more: dict[str, Any] = dict(room)
            state, deferred = run.states.get(key) if stateful else None, list[Any]()
            if taken is not None:
                more["incoming"] = (taken.array, *taken.contents[:2])
            if waits and state:
                if taken is not None and waits.idle(x):  # what it is merged with may not be zero
                    payload, place, used = more.pop("incoming")
                    decode(payload, table, place, used, x, add=True, step=run.step)
                deferred = waits.defer(x, state)
            slot.fill(
                encode(
                    x, table, out, at, state=state,
                    seed=seed, step=run.step, scale=scale, writeback=writeback, **more,
                )
            )  # fmt: skip
            restore(deferred)
            pieces.close(run)

        return step

    def _table(self, codec: str, pieces: InBucket) -> Ints:
        """A table for calls of a codec, which on a device holds it for all of this program's."""
        if self._memory.host:
            return pieces.table
        if (codec, pieces) not in self._tables:
            hold = cast(DeviceCodec, self._codecs[codec]).hold
            self._tables[codec, pieces] = hold(pieces.table)
        return self._tables[codec, pieces]

    def _names(self, task: Task) -> Sequence[str]:
        """States that may wait."""
        return self._deferred.get(whole_key(task.codec)[0], ())

    def _deferral(self, task: Encode, pieces: InBucket) -> Deferral | None:
        names, size = self._names(task), self._states_of(task)
        if not names or self._memory.host:
            return Deferral(names, pieces.table) if names else None
        # encodes follow one another on a stream; between rounds nothing is restored
        rounds = isinstance(task, EncodeRound)
        kept = self._memory.zeros(size, torch.float32) if rounds else self._kept[:size]
        return DeviceDeferral(names, pieces.table, self._memory, kept)

    def _states_of(self, task: Task) -> int:
        """Elements of the states that may wait of a task's part."""
        return len(self._names(task)) * self._parts[task.part].elements

    def _factor(self, task: Encode) -> float:
        return 1.0 / self._world_size if task.average else 1.0

    def _scale(self, task: Encode) -> Step:
        """Encoding in place."""
        start, length = self._parts[task.part].rows[0][:2]
        factor = float(np.float32(self._factor(task)))

        def step(run: Inputs) -> None:
            piece = run.array[start : start + length]
            piece *= factor

        return step

    def _encode_round(self, task: EncodeRound, slot: Slot | Buffer, pieces: InBucket) -> Step:
        key, table = task.codec, self._table(task.codec, pieces)
        encode, seed, workers = (
            as_rounds(self._codecs[key]).encode_round, self._seeds["worker"], self._world_size,
        )  # fmt: skip
        sums = [(s.array, s.layout.at) for s in self._payloads.rounds(task.part)[: task.round]]
        number, out, at = task.round, slot.array, slot.layout.at
        waits = self._deferral(task, pieces) if number == 0 else None

        def step(run: Inputs) -> None:
            state, x = run.states.get((key, "worker")), pieces.open(run)
            if waits and state:
                run.deferred[task.part] = waits.defer(x, state)
            slot.fill(
                encode(
                    number, x, table, out, at, sums, workers=workers,
                    state=state, seed=seed, step=run.step,
                )
            )  # fmt: skip
            pieces.close(run)

        return step

    def _decode_rounds(self, task: DecodeRounds, pieces: InBucket) -> Step:
        key, table = task.codec, self._table(task.codec, pieces)
        decode, seed, workers = (
            as_rounds(self._codecs[key]).decode_rounds, self._seeds["worker"], self._world_size,
        )  # fmt: skip
        sums = [(s.array, s.layout.at) for s in self._payloads.rounds(task.part)]

        def step(run: Inputs) -> None:
            state, x = run.states.get((key, "worker")), pieces.open(run)
            decode(x, table, sums, workers=workers, state=state, seed=seed, step=run.step)
            pieces.close(run)
            restore(run.deferred.pop(task.part, []))

        return step

    def _decode(self, task: Decode | Merge, slot: Slot | Buffer, pieces: InBucket) -> Step:
        decode, add = self._codecs[task.codec].decode_batch, isinstance(task, Merge)
        table = self._table(task.codec, pieces)

        def step(run: Inputs) -> None:
            (at, used, _), x = slot.contents, pieces.open(run)
            decode(slot.array, table, at, used, x, add=add, step=run.step)
            pieces.close(run)

        return step

    def _follow(self, task: Follow, slot: Slot | Buffer) -> Step:
        decode, part = self._codecs[task.codec].decode_batch, self._parts[task.part]
        pieces = InBucket(part)
        pieces.table[:, 0] = pieces.table[:, 4]  # where pieces are in the state's arrays
        table = self._table(task.codec, pieces)
        key, name = (part.codec, "worker"), copy_of(task.peer)

        def step(run: Inputs) -> None:
            (at, used, _), copy = slot.contents, run.states[key][name]
            decode(slot.array, table, at, used, copy, add=True, step=run.step)

        return step


def _nothing(run: Inputs) -> None:
    """The step of a merge that an encode takes in, and of a decode in place."""
