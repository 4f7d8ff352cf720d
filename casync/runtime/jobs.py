"""Runs of programs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from casync.errors import PlanError
from casync.memory.identity import Identity
from casync.runtime.pieces import Inputs, States
from casync.runtime.prepared import Events, Prepared

if TYPE_CHECKING:
    from casync.transports import Handle

__all__ = ["DeviceRun", "HostRun", "Job", "Jobs"]


@dataclass
class HostRun:
    """The messages of a run in host memory."""

    ready: set[int] = field(default_factory=set)  # sends and reduces that may be posted
    sent: list[tuple[int, Handle, float]] = field(default_factory=list)  # posted, and their times


@dataclass
class DeviceRun:
    """The marks of a run on a device."""

    begun: Any  # the mark after which the bucket is filled
    marks: list[Any]  # the end of each task on its stream
    missing: list[int]  # transfers that are not ready yet, by group
    turn: int = 0  # number of the first group that is not issued yet
    captured: bool = False  # True while its tasks are captured, not run: see capture.py


class Job:
    """A run of a program on a bucket."""

    host: HostRun  # set by the lanes that take the job
    device: DeviceRun

    def __init__(
        self,
        identity: Identity,
        prepared: Prepared,
        bucket: torch.Tensor,
        states: States,
        step: int,
    ) -> None:
        self.identity, self.sequence = identity, identity.job
        self.prepared, self.tasks = prepared, prepared.tasks
        self.waits = [*prepared.program.waits]
        self.left = len(prepared.tasks)  # tasks that are not done, or issued
        self.bucket = bucket
        self.inputs = Inputs(bucket.detach(), _flat(bucket, prepared), states, step)
        self.started = time.perf_counter()
        self.future = prepared.memory.future()

    @property
    def events(self) -> Events:
        """The events that this run records."""
        return self.prepared.taken if self.device.captured else self.prepared.real


def _flat(bucket: torch.Tensor, prepared: Prepared) -> Any:
    """The bucket as codecs take it; None if its type needs conversion. PlanError for a bad one."""
    memory, elements, dtype = prepared.memory, prepared.elements, prepared.dtype
    good = bucket.dtype == dtype and bucket.dim() == 1 and bucket.device == memory.device
    if not good or not bucket.is_contiguous() or len(bucket) < elements:
        kind = str(dtype).removeprefix("torch.")
        raise PlanError(
            f"the bucket must be a flat contiguous {kind} tensor on {memory.device} of at least "
            f"{elements} elements, not {bucket.dtype} {tuple(bucket.shape)} on {bucket.device}"
        )
    return None if memory.host and prepared.halves else memory.array(bucket)


class Jobs:
    """Jobs under way, in the order in which they were submitted."""

    def __init__(self) -> None:
        self._queued: deque[Job] = deque()
        self.running: dict[int, Job] = {}

    def add(self, job: Job) -> None:
        """Queue a submitted job."""
        self._queued.append(job)

    def startable(self) -> Iterator[Job]:
        """Jobs to start now: up to the first whose program is still running."""
        while self._queued and not self._queued[0].prepared.busy:
            job = self._queued.popleft()
            job.prepared.busy = True
            self.running[job.sequence] = job
            yield job

    def end(self, job: Job) -> None:
        """Remove a job; its program may run again."""
        del self.running[job.sequence]
        job.prepared.busy = False

    def clear(self) -> list[Job]:
        """Remove and return all jobs."""
        jobs = [*self.running.values(), *self._queued]
        self.running.clear()
        self._queued.clear()
        return jobs
