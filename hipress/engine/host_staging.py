"""Averages of a device's gradients on the host: gradients are copied there, and averages back."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch.futures import Future

from casync.memory import Event, Memory
from casync.shutdown import close_at_exit, start_thread
from hipress import compat
from hipress.errors import SyncError

__all__ = ["Average", "HostCopies"]

Average: TypeAlias = Callable[[torch.Tensor], Future[torch.Tensor]]


@dataclass(eq=False)
class _Room:
    """Pinned memory of a bucket, and the events of its copies."""

    values: torch.Tensor
    there: Event
    back: Event
    averaged: Future[torch.Tensor]


@dataclass(frozen=True)
class _Brought:
    """A bucket whose copy was started, and the function to average it."""

    bucket: torch.Tensor
    room: _Room
    average: Average


class HostCopies:
    """Copies on two streams, and a thread that waits for copies to the host, one after the other.
    So the caller waits for nothing, and buckets are averaged in the order of calls."""

    def __init__(self, memory: Memory) -> None:
        """memory: of the device."""
        self._memory = memory
        self._there, self._back = memory.stream(urgent=True), memory.stream(urgent=True)
        self._rooms: dict[int, _Room] = {}
        self._brought: queue.SimpleQueue[_Brought | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._thread = start_thread(self._run, "hipress-copies")
        close_at_exit(self)

    def average(self, number: int, average: Average, bucket: torch.Tensor) -> Future[torch.Tensor]:
        """Average a dense bucket in place by calling `average` with its copy on the host.

        number: of the bucket in its step. `average` is called in the thread and must not raise. The
        future raises SyncError if the device failed. Waiting for it orders the waiting stream after
        the copy back.
        """
        room = self._room(number, bucket)
        ready, caller = self._memory.event(), self._memory.caller()
        caller.record(ready)
        for event in (ready, room.back):
            self._there.after(event)
        self._there.run(partial(self._memory.copy, room.values, bucket))
        self._there.record(room.there)
        self._brought.put(_Brought(bucket, room, average))
        return room.averaged

    def free(self) -> None:
        """Give back the pinned memory, between steps; later ones make it anew."""
        for room in self._rooms.values():
            room.back.wait()  # memory that is still read would stay in torch's cache
        self._rooms.clear()
        compat.empty_pinned_cache()

    def close(self) -> None:
        """End the thread. In a forked child, do nothing: see [Note: fork] in shutdown.py."""
        if os.getpid() == self._process:
            self._brought.put(None)
            self._thread.join(timeout=5)

    def _room(self, number: int, bucket: torch.Tensor) -> _Room:
        """The room of the last step, unless DDP has rebuilt buckets, or it is still in use."""
        room = self._rooms.get(number)
        memory, kind = self._memory, (bucket.shape, bucket.dtype)
        free = room is not None and room.averaged.done()
        if room is None or not free or (room.values.shape, room.values.dtype) != kind:
            values = memory.staging(bucket.nbytes).view(bucket.dtype)
            room = _Room(values, memory.event(), memory.event(), memory.future())
            self._rooms[number] = room
        room.averaged = memory.future()
        return room

    def _run(self) -> None:
        while (brought := self._brought.get()) is not None:
            with self._memory.current():
                self._start(brought)
            del brought  # an idle thread must not keep the last bucket alive

    def _start(self, brought: _Brought) -> None:
        bucket, room = brought.bucket, brought.room
        try:
            room.there.wait()
        except Exception as error:
            _fail(room.averaged, SyncError(f"a bucket did not come to the host: {error}"))
        else:
            future = brought.average(room.values)
            future.add_done_callback(partial(self._return, bucket, room))

    def _return(self, bucket: torch.Tensor, room: _Room, done: Future[torch.Tensor]) -> None:
        averaged = room.averaged
        try:
            values = done.value()
            with self._memory.current():  # this is a thread of the host's executor
                self._back.run(partial(self._memory.copy, bucket, values))
                self._back.record(room.back)
                self._back.run(partial(averaged.set_result, bucket))
        except Exception as error:
            _fail(averaged, error)


def _fail(future: Future[torch.Tensor], error: Exception) -> None:
    future.set_exception(error)  # type: ignore[arg-type] # torch's annotation is wrong
