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

from casync.errors import fail_future
from casync.memory import Event, Memory
from casync.shutdown import close_at_exit, start_thread
from hipress import compat
from hipress.errors import SyncError

__all__ = ["HostCopies", "StartAverage"]

StartAverage: TypeAlias = Callable[[torch.Tensor], Future[torch.Tensor]]


@dataclass(eq=False)
class _Staging:
    """Pinned memory of a bucket, and the events of its copies."""

    values: torch.Tensor
    on_host: Event  # after the copy there
    on_device: Event  # after the copy back
    averaged: Future[torch.Tensor]


@dataclass(frozen=True)
class _Copy:
    """A bucket whose copy was started, and the function to average it."""

    bucket: torch.Tensor
    staging: _Staging
    average: StartAverage


class HostCopies:
    """Copies on two streams, and a thread that waits for copies to the host, one after the other.
    So the caller waits for nothing, and buckets are averaged in the order of calls."""

    def __init__(self, memory: Memory) -> None:
        """memory: of the device."""
        self._memory = memory
        self._to_host, self._to_device = memory.stream(urgent=True), memory.stream(urgent=True)
        self._stagings: dict[int, _Staging] = {}
        self._queue: queue.SimpleQueue[_Copy | None] = queue.SimpleQueue()
        self._process = os.getpid()
        self._thread = start_thread(self._run, "hipress-copies")
        close_at_exit(self)

    def average(
        self, number: int, average: StartAverage, bucket: torch.Tensor
    ) -> Future[torch.Tensor]:
        """Average a dense bucket in place by calling `average` with its copy on the host.

        number: of the bucket in its step. `average` is called in the thread and must not raise. The
        future raises SyncError if the device failed. Waiting for it orders the waiting stream after
        the copy back.
        """
        staging = self._staging(number, bucket)
        ready, caller = self._memory.event(), self._memory.caller()
        caller.record(ready)
        for event in (ready, staging.on_device):
            self._to_host.after(event)
        self._to_host.run(partial(self._memory.copy, staging.values, bucket))
        self._to_host.record(staging.on_host)
        self._queue.put(_Copy(bucket, staging, average))
        return staging.averaged

    def free(self) -> None:
        """Give back the pinned memory, between steps; later ones make it anew."""
        for staging in self._stagings.values():
            staging.on_device.wait()  # memory that is still read would stay in torch's cache
        self._stagings.clear()
        compat.empty_pinned_cache()

    def close(self) -> None:
        """End the thread. In a forked child, do nothing: see [Note: fork] in shutdown.py."""
        if os.getpid() == self._process:
            self._queue.put(None)
            self._thread.join(timeout=5)

    def _staging(self, number: int, bucket: torch.Tensor) -> _Staging:
        """The memory of the last step, unless DDP has rebuilt buckets, or it is still in use."""
        staging = self._stagings.get(number)
        memory, kind = self._memory, (bucket.shape, bucket.dtype)
        free = staging is not None and staging.averaged.done()
        if staging is None or not free or (staging.values.shape, staging.values.dtype) != kind:
            values = memory.staging(bucket.nbytes).view(bucket.dtype)
            staging = _Staging(values, memory.event(), memory.event(), memory.future())
            self._stagings[number] = staging
        staging.averaged = memory.future()
        return staging

    def _run(self) -> None:
        while (copy := self._queue.get()) is not None:
            with self._memory.current():
                self._start(copy)
            del copy  # an idle thread must not keep the last bucket alive

    def _start(self, copy: _Copy) -> None:
        bucket, staging = copy.bucket, copy.staging
        try:
            staging.on_host.wait()
        except Exception as error:
            fail_future(staging.averaged, SyncError(f"a bucket did not come to the host: {error}"))
        else:
            future = copy.average(staging.values)
            future.add_done_callback(partial(self._return, bucket, staging))

    def _return(self, bucket: torch.Tensor, staging: _Staging, done: Future[torch.Tensor]) -> None:
        averaged = staging.averaged
        try:
            values = done.value()
            with self._memory.current():  # this is a thread of the host's executor
                self._to_device.run(partial(self._memory.copy, bucket, values))
                self._to_device.record(staging.on_device)
                self._to_device.run(partial(averaged.set_result, bucket))
        except Exception as error:
            fail_future(averaged, error)
