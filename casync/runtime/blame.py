"""Which payload a device's kernels found bad: they tell that there was one, behind all decodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import torch

from casync.codec import DeviceCodec
from casync.errors import CasyncError, PayloadError
from casync.graph.tasks import Decode, DecodeRounds, Merge, Task
from casync.memory import Memory
from casync.runtime.jobs import Prepared
from casync.runtime.naming import named_error
from casync.runtime.pieces import InBucket, packed

__all__ = ["found_bad"]


def found_bad(
    programs: Sequence[Prepared], memory: Memory, rank: int, step: int, names: Sequence[str]
) -> CasyncError | None:
    """What kernels found bad since they were asked last, as an error of this rank that names the
    task. Waits for the device, once for each codec."""
    codecs = dict.fromkeys(codec for each in programs for codec in each.codecs.values())
    try:
        for codec in codecs:
            cast(DeviceCodec, codec).raise_found()
    except Exception as error:
        named = _blamed(programs, memory, step, names)
        named = named or PayloadError(f"rank {names[rank]}: {error}")
        named.__cause__ = error
        return named
    return None


def _blamed(
    programs: Iterable[Prepared], memory: Memory, step: int, names: Sequence[str]
) -> CasyncError | None:
    """By decoding anew what programs that are done have still."""
    for prepared in programs:
        if prepared.busy or not prepared.end.done():
            continue
        for index, task in enumerate(prepared.tasks):
            try:
                if isinstance(task, Decode | Merge) and not isinstance(task, DecodeRounds):
                    _decode(prepared, index, task, memory, step)
            except Exception as error:
                return named_error(error, task, step, prepared.slots[index].source, names)
    return None


def _decode(prepared: Prepared, index: int, task: Task, memory: Memory, step: int) -> None:
    """Decode a payload into memory that nobody uses. Raises what its codec found wrong."""
    if prepared.payloads.in_bucket(task):
        return
    part, codec = prepared.parts[task.part], prepared.codecs[task.codec]
    (at, used, _), table = prepared.slots[index].contents, packed(InBucket(part).table)
    array = memory.array(memory.zeros(part.elements, torch.float32))
    stream, done = memory.caller(), memory.event()
    data = prepared.slots[index].array
    stream.run(partial(codec.decode_batch, data, table, at, used, array, step=step))
    stream.record(done)
    done.wait()
    cast(DeviceCodec, codec).raise_found()
