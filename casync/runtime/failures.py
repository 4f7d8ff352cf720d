"""Errors of a run, which name rank, peer, step and task.

A device's kernels only report, after all decodes, that a payload was bad: then it is searched for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import torch

from casync.building.tasks import Decode, DecodeRounds, Merge, Recv, Send, Task, members
from casync.codec import DeviceCodec
from casync.errors import (
    CasyncError,
    DeadlockError,
    PayloadError,
    PeerTimeout,
    TransportAborted,
    TransportError,
)
from casync.memory import Memory
from casync.runtime.pieces import InBucket, packed
from casync.runtime.prepared import Prepared

__all__ = ["find_bad_payload", "find_culprit", "named_error", "rank_names"]


def rank_names(world_size: int, ranks: Sequence[int] | None) -> list[str]:
    """Names of ranks in errors."""
    numbers = range(world_size)
    if ranks is None or list(ranks) == list(numbers):
        return [str(rank) for rank in numbers]
    return [f"{rank} (global {ranks[rank]})" for rank in numbers]


def named_error(
    error: Exception, task: Task, step: int, source: int, names: Sequence[str]
) -> CasyncError:
    """A CasyncError that names rank, peer, step and task, after a plain sentence."""
    if isinstance(error, DeadlockError):  # names all ranks itself
        return error
    peer = task.peer if isinstance(task, Send | Recv) else source
    beside = f", peer {names[peer]}" if peer != task.rank else ""
    what = str(error) if isinstance(error, CasyncError) else f"{type(error).__name__}: {error}"
    where = f"rank {names[task.rank]}{beside}, task `{task.text()}`: {what}"
    if not isinstance(error, TransportError):
        return PayloadError(f"step {step} failed: {where}")
    who = f"rank {names[peer]}" if beside else "a rank"
    happened = f"{who} closed the connection"
    if isinstance(error, PeerTimeout):
        happened = f"{who} did not answer"
    elif isinstance(error, TransportAborted):
        happened = "this rank closed its connections"
    return type(error)(f"{happened} in step {step} ({where})")


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
