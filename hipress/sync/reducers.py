"""Reducers: each averages a bucket over the ranks, natively, by a plan, or through the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch.futures import Future

from casync.memory import Memory
from casync.runtime.executor import Executor
from casync.runtime.jobs import FLOATS
from hipress import compat
from hipress.devices import Placement
from hipress.sync.buckets import BucketPlan
from hipress.sync.executor_set import Route, Routes
from hipress.sync.failures import Failures
from hipress.sync.futures import average, map_future
from hipress.sync.host_staging import HostCopies
from hipress.sync.switch import PlanSwitch
from hipress.sync.traffic import Traffic

__all__ = ["Bucket", "Native", "Reducer", "Reducers"]


@dataclass(frozen=True)
class Bucket:
    """Gradients that are handed over together."""

    step: int
    number: int  # number in its step
    indices: tuple[int, ...]  # parameters, in the order of `values`
    values: torch.Tensor  # flat and without gaps, or sparse


class Reducer(Protocol):
    """Averages buckets, in the order of calls, which is the same on all ranks."""

    def reduce(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Average a bucket in place. Raises an error that kept it from starting."""
        ...


@dataclass(frozen=True)
class Native:
    """The all-reduce of DDP without a hook."""

    group: dist.ProcessGroup
    timeout: float  # seconds
    traffic: Traffic

    def reduce(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Implements Reducer.reduce."""
        self.traffic.count(None, bucket.values)
        return average(bucket.values, self.group, self.timeout)


@dataclass(frozen=True)
class Submits:
    """Submits buckets to an executor."""

    executor: Executor
    memory: Memory  # of buckets
    traffic: Traffic
    jobs: dict[int, Future[torch.Tensor]]  # the executor's averages of the current step, by bucket

    def submit(self, plan: BucketPlan, bucket: Bucket) -> Future[torch.Tensor]:
        """Average a bucket in place by the program of `plan`."""
        self.traffic.count(plan, bucket.values)
        states = plan.states
        made = self.executor.submit(plan.program, bucket.values, states, bucket.step)
        self.jobs[bucket.number] = made
        if not plan.differences:
            return made
        return map_future(made, lambda done: plan.add_means(done, states), self.memory.future())


@dataclass(frozen=True)
class ByPlan:
    """Averages by the current plan; a bucket without compressed parameters goes to `native`."""

    switch: PlanSwitch
    submits: Submits
    native: Reducer

    def reduce(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Implements Reducer.reduce."""
        values, indices = bucket.values, bucket.indices
        plan = None if values.is_sparse else self.switch.buckets.plan_for(indices)
        self.switch.hand(indices, values)
        return compat.profiled_until_done(
            f"bucket {bucket.number}",
            lambda: (
                self.native.reduce(bucket) if plan is None else self.submits.submit(plan, bucket)
            ),
        )


@dataclass(frozen=True)
class ByTransport:
    """The native all-reduce by an executor's own transport, for a device whose group is the host's;
    values of types that it cannot sum go to `other`."""

    switch: PlanSwitch
    submits: Submits
    other: Reducer

    def reduce(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Implements Reducer.reduce."""
        if bucket.values.dtype not in FLOATS:
            return self.other.reduce(bucket)
        return self.submits.submit(self.switch.buckets.raw(bucket.values.numel()), bucket)


@dataclass(frozen=True)
class ViaHost:
    """Copies a device's dense bucket to the host, where `inner` averages it, and back.

    `inner` is called in the thread of the copies, and must not raise.
    """

    copies: HostCopies
    inner: Reducer

    def reduce(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Implements Reducer.reduce."""
        return self.copies.average(
            bucket.number,
            lambda values: self.inner.reduce(replace(bucket, values=values)),
            bucket.values,
        )


@dataclass(frozen=True)
class Guarded:
    """Passes buckets to `inner`; an error becomes the future's, and ends the executors, so that the
    other ranks learn of it at once."""

    inner: Reducer
    failures: Failures
    routes: Routes

    def reduce(self, bucket: Bucket) -> Future[torch.Tensor]:
        """Implements Reducer.reduce; raises nothing."""
        try:
            return self.inner.reduce(bucket)
        except Exception as error:
            named = self.failures.not_begun(error, bucket.step)
            self.routes.abort(named)
            error.__traceback__ = None  # a kept error would keep the callers' models
            future: Future[torch.Tensor] = Future()
            future.set_exception(named)  # type: ignore[arg-type] # torch's annotation is wrong
            return future


@dataclass(frozen=True)
class Reducers:
    """Makes a module's reducers."""

    switch: PlanSwitch
    failures: Failures
    routes: Routes
    copies: HostCopies | None  # None if no bucket is copied
    device: Native  # for buckets in place
    host: Native  # for copies on the host
    jobs: dict[int, Future[torch.Tensor]]  # see Submits

    def dense(self, placement: Placement, *, native_copied: bool) -> list[Reducer]:
        """Reducers of dense gradients, by Plan.hosted. native_copied: the group is the host's."""
        return [
            self._dense(
                self._submits(route),
                copied=placement.copies or hosted,
                native_copied=native_copied,
                by_nccl=placement.by_nccl,
            )
            for hosted, route in zip((False, True), self.routes.every, strict=False)
        ]

    def sparse(self) -> Reducer:
        """Reducer of sparse gradients, which are not copied."""
        return self._by_plan(self._submits(self.routes.every[0]), self.device)

    def _dense(
        self, submits: Submits, *, copied: bool, native_copied: bool, by_nccl: bool
    ) -> Reducer:
        if copied:
            return self._via_host(self._by_plan(submits, self.host))
        if not native_copied:
            return self._by_plan(submits, self.device)
        native = self._via_host(self._guarded(self.host))
        if by_nccl:
            native = ByTransport(self.switch, submits, native)
        return self._by_plan(submits, native)

    def _submits(self, route: Route) -> Submits:
        return Submits(route.executor, route.memory, self.host.traffic, self.jobs)

    def _by_plan(self, submits: Submits, native: Reducer) -> Reducer:
        return self._guarded(ByPlan(self.switch, submits, native))

    def _via_host(self, inner: Reducer) -> Reducer:
        assert self.copies is not None
        return self._guarded(ViaHost(self.copies, inner))

    def _guarded(self, inner: Reducer) -> Reducer:
        return Guarded(inner, self.failures, self.routes)
