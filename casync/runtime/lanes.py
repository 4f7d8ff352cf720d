"""Lanes run a job's tasks for the executor.

[Note: lanes] In host memory lanes are threads (threads.py), on a device streams (streams.py). A
task is issued when all tasks that it waits for are issued. For threads that means done. For
streams, an event marks the time at which they will be done, and the task waits for that event on
its own stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from casync.errors import PlanError
from casync.memory.identity import Identity
from casync.runtime.options import RunOptions
from casync.runtime.pieces import Inputs, States
from casync.runtime.prepared import Events, Prepared

if TYPE_CHECKING:
    from casync.transports import Handle

__all__ = ["DeviceRun", "Job", "Lanes", "Progress"]


@dataclass
class DeviceRun:
    """The marks of a run on a device."""

    begun: Any  # the mark after which the bucket is filled
    marks: list[Any]  # the end of each task on its stream
    captured: bool = False  # True while its tasks are captured, not run: see capture.py


class Job:
    """A run of a program on a bucket."""

    device: DeviceRun  # set by the lanes that take the job, on a device

    def __init__(
        self,
        identity: Identity,
        prepared: Prepared,
        bucket: torch.Tensor,
        states: States,
        step: int,
        timeout: float,
    ) -> None:
        """timeout: seconds that a peer may take. Raises PlanError for a bucket that the program
        cannot average."""
        flat = bucket.dim() == 1 and bucket.is_contiguous() and len(bucket) >= prepared.elements
        memory, dtype = prepared.memory, prepared.dtype
        if not flat or bucket.dtype != dtype or bucket.device != memory.device:
            kind = str(dtype).removeprefix("torch.")
            raise PlanError(
                f"the bucket must be a flat contiguous {kind} tensor on {memory.device} of at "
                f"least {prepared.elements} elements, not {bucket.dtype} {tuple(bucket.shape)} on "
                f"{bucket.device}"
            )
        self.identity, self.sequence = identity, identity.job
        self.prepared, self.tasks = prepared, prepared.tasks
        self.waits = [*prepared.program.waits]
        self.remaining = len(prepared.tasks)  # tasks that are not done, or issued
        self.bucket, self.timeout = bucket, timeout
        array = None if memory.host and prepared.halves else memory.array(bucket)
        self.inputs = Inputs(bucket.detach(), array, states, step)
        self.started = time.perf_counter()
        self.future = memory.future()
        # of its messages in host memory: sends and reduces that may be posted; posted sends
        self.ready, self.sent = set[int](), list["tuple[int, Handle, float]"]()

    @property
    def events(self) -> Events:
        """The events that this run records."""
        return self.prepared.capture_events if self.device.captured else self.prepared.run_events


class Lanes(Protocol):
    """Lanes, as the executor uses them."""

    def start(self, job: Job) -> None:
        """Let a job's messages arrive; calls come one at a time, in one order on all ranks."""
        ...

    def issue(self, job: Job, ready: Sequence[int]) -> None:
        """Run tasks of a started job, now or once there is a thread for them."""
        ...

    def finish(self, job: Job, free: Callable[[], None], complete: Callable[[], None]) -> None:
        """End a job whose tasks are all issued: call `free` once its program may run again, then
        `complete` at the job's end, on a device in a stream."""
        ...

    def drop(self) -> None:
        """Forget tasks that have not begun."""
        ...

    def close(self, patience: float) -> None:
        """Stop the threads, waiting up to `patience` seconds for each."""
        ...


@dataclass(frozen=True)
class Progress:
    """Callbacks of lanes, and what they run by."""

    done: Callable[[Job, Sequence[int], float], None]  # tasks, and their begin (perf_counter)
    #: all tasks of a job, in order: those that were issued at once, begin and end (perf_counter)
    issued: Callable[[Job, Sequence[tuple[Sequence[int], float, float]]], None]
    failed: Callable[[Job, int, Exception], None]  # a task, and its error
    idle: Callable[[float], None]  # seconds in which the compute lane had no work
    ended: threading.Event  # set by the first error and by close(): run no more tasks
    options: RunOptions
