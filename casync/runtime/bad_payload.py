"""Search for a bad payload: a device's kernels only report, after all decodes, that one was bad."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import torch

from casync.building.tasks import Decode, DecodeRounds, Merge, Task, members
from casync.codec import DeviceCodec
from casync.errors import CasyncError, PayloadError
from casync.memory import Memory
from casync.runtime.naming import named_error
from casync.runtime.pieces import InBucket, packed
from casync.runtime.prepared import Prepared

__all__ = ["find_bad_payload"]


def find_bad_payload(
    programs: Sequence[Prepared], memory: Memory, rank: int, step: int, names: Sequence[str]
) -> CasyncError | None:
    """The bad payload that kernels have found since the last call, as an error that names rank and
    task. Waits for the device, once per codec."""
    codecs = dict.fromkeys(codec for each in programs for codec in each.codecs.values())
    try:
        for codec in codecs:
            cast(DeviceCodec, codec).raise_found()
    except Exception as error:
        named = _find_task(programs, memory, step, names)
        named = named or PayloadError(f"rank {names[rank]}: {error}")
        named.__cause__ = error
        return named
    return None


def _find_task(
    programs: Iterable[Prepared], memory: Memory, step: int, names: Sequence[str]
) -> CasyncError | None:
    """Find the task by decoding the remaining payloads of finished programs again."""
    for prepared in programs:
        if prepared.busy or not prepared.end.done():
            continue
        for task in (each for joined in prepared.tasks for each in members(joined)):
            try:
                _decode(prepared, task, memory, step)
            except Exception as error:
                source = prepared.payloads.by_payload[task.payload].source
                return named_error(error, task, step, source, names)
    return None


def find_culprit(prepared: Prepared, index: int, memory: Memory, step: int) -> Task:
    """The task with the bad payload, among tasks that shared a failed call; else the last one."""
    tasks = members(prepared.tasks[index])
    for task in tasks if len(tasks) > 1 else ():
        try:
            _decode(prepared, task, memory, step)
        except Exception:
            return task
    return tasks[-1]


def _decode(prepared: Prepared, task: Task, memory: Memory, step: int) -> None:
    """Decode a payload into scratch memory. Raises the codec's error."""
    plain = isinstance(task, Decode | Merge) and not isinstance(task, DecodeRounds)
    if not plain or prepared.payloads.in_bucket(task):
        return
    part, codec = prepared.parts[task.part], prepared.codecs[task.codec]
    slot, table = prepared.payloads.by_payload[task.payload], packed(InBucket(part).table)
    at, used, _ = slot.contents
    array = memory.array(memory.zeros(part.elements, torch.float32))
    stream, done = memory.caller(), memory.event()
    stream.run(partial(codec.decode_batch, slot.array, table, at, used, array, step=step))
    stream.record(done)
    done.wait()
    cast(DeviceCodec, codec).raise_found()
