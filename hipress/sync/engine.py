"""The engine of a synchronized module: takes buckets, returns averaged buckets."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future

from casync.errors import copy_to_raise
from casync.memory import Memory
from casync.runtime.counters import Counters
from casync.runtime.executor import TraceEvent
from hipress.coordination.coordinator import Coordinator
from hipress.coordination.link import connect
from hipress.devices import ON_HOST, Placement, by_gloo
from hipress.model import Param
from hipress.options import Options
from hipress.plan.plan import Plan, hosted
from hipress.shards import local
from hipress.sync.buckets import BucketPlans
from hipress.sync.executor_set import Routes
from hipress.sync.failures import Failures
from hipress.sync.futures import wait_within
from hipress.sync.host_staging import HostCopies
from hipress.sync.momentum import Momentum
from hipress.sync.optimizers import take_failed, watch_steps
from hipress.sync.reducers import Bucket, Native, Reducers
from hipress.sync.scaling import Scale, average_unscaled
from hipress.sync.switch import PlanSwitch
from hipress.sync.traffic import Traffic
from hipress.sync.verify import VERIFY_STEPS, Verifier

if TYPE_CHECKING:
    from hipress.control.plan_controller import PlanController

#: seconds beyond a native all-reduce's own time-out; in torch 2.8 that is the group's
NATIVE_TIMEOUT_SLACK = 1.0


class Engine:
    """Synchronizes the buckets of one module. Holds no reference to that module: see close()."""

    def __init__(
        self,
        params: Sequence[Param],
        plan: Plan,
        options: Options,
        group: dist.ProcessGroup,
        coordinator: Coordinator,
        *,
        placement: Placement = ON_HOST,
        memory: Memory | None = None,
        tuner: PlanController | None = None,
        skips: bool = False,
        unused: bool = False,
        momentum: Momentum | None = None,
    ) -> None:
        """Make the executors and reducers.

        Args:
            tuner: chooses the plan of each step, beginning with `plan`.
            skips: True if a step may lack buckets whose parameters are unused.
            unused: True if averages of unused parameters are dropped.
            memory: of gradients; by default the placement's.
            momentum: adds momentum to gradients.
        """
        self.params, self.options = list(params), options
        self.name = coordinator.ranks[coordinator.rank]  # this rank's global number
        gradients = memory or placement.memory()
        self._future, self._momentum = gradients.future, momentum
        self.tuner = tuner  # chooses the plan, if it may change
        self._skips = skips
        self.step = 0  # steps begun so far; backward passes under no_sync do not count
        self._latest = -1  # last bucket so far of the current step; -1 between steps
        self._scale, self._scales = 1.0, Scale()  # of the gradients of the current step
        self._checked: Future[torch.Tensor] | None = None  # of parameters, before this step
        self.traffic = Traffic()
        # averages of the current step, each with its longest wait in seconds (None: the future
        # itself times out). Empty once the backward pass has them all: a later loss belongs to no
        # step
        self.pending: list[tuple[Future[torch.Tensor], float | None]] = []
        self._jobs: dict[int, Future[torch.Tensor]] = {}  # averages by an executor, by bucket
        codecs = plan.codecs if tuner is None else tuner.codecs
        # gloo's futures do not order streams after its copies to a device
        native_copied = not placement.on_host and by_gloo(group)
        copies = placement.copies or native_copied or any(map(hosted, codecs))
        # a group for copies: calls from another thread must not mix with the first group's
        # collectives
        hosts = connect(coordinator, "copies") if copies else group
        verified = connect(coordinator, "verify") if options.verify else None
        self._routes = Routes.start(
            codecs, options, coordinator, placement, gradients, unused=unused
        )
        make = partial(_buckets, self.params, options, coordinator.rank, self._routes)
        self._switch = PlanSwitch(make, plan, tuner)
        self._failures = Failures(coordinator, options.timeout)
        self._verifier: Verifier | None = None
        if verified is not None:
            self._verifier = Verifier(verified, coordinator.ranks, gradients)
        self._copies = HostCopies(gradients) if copies else None
        reducers = Reducers(
            self._switch,
            self._failures,
            self._routes,
            self._copies,
            Native(group, options.timeout, self.traffic),
            Native(hosts, options.timeout, self.traffic),
            self._jobs,
        )
        self._sparse = reducers.sparse()
        self._dense = reducers.dense(placement, native_copied=native_copied)
        watch_steps()

    @property
    def counters(self) -> Counters:
        """A copy of the executor's sums so far."""
        return self._routes.counters

    def trace(self, events: list[TraceEvent] | None) -> None:
        """Collect events of tasks from now on, between two steps; None ends it."""
        self._routes.trace(events)

    @property
    def unfinished(self) -> str | None:
        """Text on the step that failed or has not ended; None between steps."""
        if self.broken:
            return self._failures.first
        if self._routes.failed:
            return f"step {self._step_number} failed"
        if self.under_way:
            return f"step {self._step_number} has begun and has not ended"
        return None

    @property
    def under_way(self) -> bool:
        """True if a step has begun whose averages DDP does not have yet."""
        return self._latest >= 0 or bool(self.pending)

    def begin(self, index: int, parameters: Collection[torch.Tensor] = ()) -> None:
        """Begin bucket `index`, perhaps as the first of a step.

        parameters: the model's, to check that ranks have not diverged since the last step. Buckets
        come in order, but DDP may leave out the first and the last ones, whose parameters are
        unused (`skip_all_reduce_unused_params`).
        """
        first = index <= self._latest or self._latest < 0
        self._latest = index
        if first:
            self.pending.clear()
            self._jobs.clear()
            self.traffic.steps += 1
            self.step += 1
            self._scale = self._scales.now(parameters)
            if not self.broken:
                self._switch.begin(self._step_number)
                if self._momentum is not None:
                    self._momentum.begin(self.buckets.residuals)
            self._check(parameters)

    def _check(self, parameters: Collection[torch.Tensor]) -> None:
        """Raise SyncError if an optimizer failed on this rank only; `verify` parameters."""
        failed = take_failed(parameters)
        if failed is not None:
            self._failures.refuse_parted(failed, self._step_number)
        if self._verifier and parameters and self._step_number % VERIFY_STEPS == 1:
            step = self._step_number
            held = map(local, parameters)
            self._checked = self._verifier.check_parameters(held, self.params, step)

    def reduce(
        self, indices: tuple[int, ...], buffer: torch.Tensor, *, last: bool
    ) -> Future[torch.Tensor]:
        """Average a bucket of these parameters, in this order, without gaps.

        Errors are raised by the future: the other buckets are still reduced, so that no rank waits
        in an all-reduce of DDP's group for a rank that has failed.
        """
        self.refuse_broken()
        native = buffer.is_sparse or self.buckets.native(indices)
        plain = native and self.tuner is None and self._momentum is None
        begin = partial(self._begin_average, indices)
        if plain or buffer.is_sparse or self._scale == 1.0:
            future = begin(buffer)
        else:
            future = average_unscaled(buffer, self._scale, begin, self._future())
        if self._verifier is not None and not buffer.is_sparse:
            future = self._verifier.check(
                future, [self.params[i] for i in indices], self._step_number
            )
        slack = self.options.timeout + NATIVE_TIMEOUT_SLACK
        self.pending.append((future, slack if native else None))
        if last:
            self._latest = -1
            self._release()
        return future

    def _begin_average(
        self, indices: tuple[int, ...], buffer: torch.Tensor
    ) -> Future[torch.Tensor]:
        """Average a bucket in place, with momentum if there is any."""
        reducer = self._sparse if buffer.is_sparse else self._dense[self.plan.hosted]
        bucket = Bucket(self._step_number, self._latest, indices, buffer)
        begin = partial(reducer.reduce, bucket)
        if self._momentum is None:
            return begin()
        return self._momentum.hand(indices, buffer, begin, self._future())

    def _release(self) -> None:
        """Start averages that waited for the step's last bucket."""
        if self._momentum is not None:
            self._momentum.release()

    @property
    def broken(self) -> bool:
        """True if a failure has ended the engine."""
        return self._failures.first is not None

    def refuse_broken(self) -> None:
        """Raise SyncError after a failure: no step may follow."""
        self._failures.refuse()

    def finish(self, arrived: Callable[[int], None] | None = None) -> None:
        """Wait for the step's buckets, if all have come; raise their errors.

        DDP would wait as well, at the same moment, but shows a failure as an obscure cast error.
        arrived: called with the number of each bucket, in the order of reduces, while later ones
        still travel; on a device, too.
        """
        if self._latest >= 0 and not self._skips:
            return  # one of several backward passes of a step
        self._release()
        if self.tuner is not None:
            self.tuner.backward_over()
        checked, self._checked = self._checked, None
        if checked is not None:
            self._wait(checked, None)
        for number, (future, seconds) in enumerate(self.pending):
            self._wait(future, seconds)
            if arrived is None:
                self._failing(self._routes.settle)
                continue
            if number in self._jobs:
                self._failing(partial(self._routes.settle, self._jobs[number]))
            arrived(number)
        if self._momentum is not None:
            self._momentum.arrived()
        if self.tuner is not None:
            self.tuner.averaged()
        self.pending.clear()
        self._latest = -1

    def _wait(self, future: Future[Any], seconds: float | None) -> None:
        """Wait for a future of the current step; if it fails, no step may follow."""
        self._failing(lambda: wait_within(future, seconds, self._failures.look))

    def _failing(self, wait: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            wait()
        except Exception as error:
            named = self.explained(self._failures.not_averaged(error, self._step_number))
            self.fail(named)
            error.__traceback__ = None
            raise copy_to_raise(named) from named.__cause__
        except BaseException as error:  # a KeyboardInterrupt: the step is lost
            self.fail(error)
            raise
        self.traffic.exposed_seconds += time.perf_counter() - start

    def fail(self, error: BaseException, what: str = "") -> None:
        """End the engine, since `what` failed, maybe on this rank only; by default the current
        step. The first failure counts."""
        if self.broken:
            return
        self._routes.abort(self._failures.keep(error, what or f"step {self._step_number}"))
        if self.tuner is not None:
            self.tuner.close()

    def explained(self, error: Exception) -> Exception:
        """The error with what is known of other ranks that caused it."""
        return self._failures.explained(error, self._step_number)

    def close(self) -> None:
        """End the threads: on detach, when the module is collected, and at exit. May repeat."""
        self._routes.close()
        if self._momentum is not None:
            self._momentum.close()
        if self._copies is not None:
            self._copies.close()
        if self.tuner is not None:
            self.tuner.close()
        if self._verifier is not None:
            self._verifier.close()

    @property
    def buckets(self) -> BucketPlans:
        """Buckets of the current plan."""
        return self._switch.buckets

    @property
    def plan(self) -> Plan:
        """The current plan."""
        return self.buckets.plan

    def planned(self, plan: Plan) -> BucketPlans:
        """Buckets of this plan, without any state: for `resume`."""
        return self._switch.make(plan)

    @property
    def owed(self) -> Mapping[int, torch.Tensor]:
        """Gradients of earlier plans that wait for their parameters' next ones: see PlanSwitch."""
        return self._switch.owed

    def resume(
        self,
        step: int,
        buckets: BucketPlans,
        owed: Mapping[int, torch.Tensor] = MappingProxyType({}),
        measured: str = "",
    ) -> None:
        """Go on from this step with these buckets and their state, gradients owed from earlier
        plans, and what the tuner had measured (see PlanController.state)."""
        self._switch.resume(buckets, owed)
        if self.tuner is not None and measured:
            self.tuner.load(measured)
        self.step = step

    def lay_out(self, params: Sequence[Param]) -> None:
        """Adopt new strides of gradients in buckets, and move states along."""
        for old, new in zip(self.params, params, strict=True):
            if old.layout != new.layout:
                self._switch.lay_out(old, new)
        self.params[:] = params  # in place: makers of buckets share the list

    @property
    def _step_number(self) -> int:
        """Number of the current step, from 0 on."""
        return self.step - 1


def _buckets(
    params: Sequence[Param], options: Options, rank: int, routes: Routes, plan: Plan
) -> BucketPlans:
    route = routes.of(plan)
    rotates = route.executor.rotates
    return BucketPlans(params, plan, options, rank, route.memory, rotates=rotates)
