"""What stands behind one synchronized module: buckets in, averaged buckets out."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future

from casync.codec import FLOAT_BYTES
from casync.errors import CasyncError, PeerTimeout, TransportError, copy_to_raise
from casync.memory import Memory
from casync.runtime.counters import Counters
from casync.transports.distributed import transport_error
from hipress import compat
from hipress.devices import ON_HOST, Placement, by_gloo
from hipress.errors import ConfigError, HipressError, SyncError
from hipress.model import Param
from hipress.options import Options
from hipress.plan.rules import Plan
from hipress.ranks.link import connect
from hipress.ranks.meeting import Meeting
from hipress.sync.buckets import BucketPlan, BucketPlans
from hipress.sync.executors import start_executor
from hipress.sync.optimizers import take_failed, watch_steps
from hipress.sync.state import deferrable_states
from hipress.sync.verify import VERIFY_STEPS, Verifier

if TYPE_CHECKING:
    from hipress.sync.chooser import Chooser

#: seconds after a native all-reduce's own time-out; in torch 2.8 it is the group's
NATIVE_TIMEOUT_SLACK = 1.0
#: seconds after which a wait looks about
POLL_SECONDS = 1.0


@dataclass
class Traffic:
    """What this module counts besides the executor's counters."""

    steps: int = 0  # in this process; Engine.step survives a checkpoint
    gradient_bytes: int = 0  # of all dense buckets
    compressed_bytes: int = 0  # of these, what codecs took
    raw_bytes: int = 0  # of dense buckets that went to DDP's own all-reduce
    mixed_bytes: int = 0  # of uncompressed parts of other buckets, as they travel: in float32
    sparse_bytes: int = 0  # of sparse gradients: indices and values
    # of the current step; and how long to wait at most for what does not see to that itself.
    # Empty when the backward pass has had all of them: what it lost belongs to no step's state
    pending: list[tuple[Future[torch.Tensor], float | None]] = field(default_factory=list)
    exposed_seconds: float = 0.0  # the backward pass was over and waited


def average(
    buffer: torch.Tensor, group: dist.ProcessGroup, timeout: float | None = None
) -> Future[torch.Tensor]:
    """What DDP does without a hook: scale, then the native all-reduce; in place.

    `timeout`: seconds, instead of the group's.
    """
    buffer.div_(group.size())
    options = dist.AllreduceOptions()  # dist.all_reduce has no argument for them
    if timeout is not None:
        options.timeout = timedelta(seconds=timeout)
    used: Future[torch.Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
    return map_future(group.allreduce([buffer], options).get_future(), lambda done: done[0], used)


def map_future(
    future: Future[Any], use: Callable[[Any], torch.Tensor], used: Future[torch.Tensor]
) -> Future[torch.Tensor]:
    """As `Future.then`, but a failure stays the exception that it is. Returns `used`, a new one."""

    def pass_on(done: Future[Any]) -> None:
        try:
            used.set_result(use(done.value()))
        except Exception as error:
            used.set_exception(error)  # type: ignore[arg-type] # torch's annotation is wrong

    future.add_done_callback(pass_on)
    return used


def wait_within(future: Future[Any], seconds: float | None) -> None:
    """As `Future.wait`, but for so many seconds at most; TimeoutError.

    In turns: a Ctrl-C that comes as a lock is about to be waited for shows only when that ends.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    end = math.inf if seconds is None else time.monotonic() + seconds
    while not done.wait(max(0.0, min(POLL_SECONDS, end - time.monotonic()))):
        if time.monotonic() >= end:
            raise TimeoutError(f"timed out after {seconds:g} s")
    future.wait()


def _unsent(plan: BucketPlan | None) -> torch.Tensor:
    return torch.zeros(()) if plan is None else plan.unsent()


class Engine:
    """Synchronizes the buckets of one module. It never refers to that module: see close()."""

    def __init__(
        self,
        params: Sequence[Param],
        plan: Plan,
        options: Options,
        group: dist.ProcessGroup,
        meeting: Meeting,
        *,
        placement: Placement = ON_HOST,
        memory: Memory | None = None,
        tuner: Chooser | None = None,
        skips: bool = False,
        unused: bool = False,
    ) -> None:
        """tuner: says by which plan each step goes, from `plan` on. skips: whether a step may lack
        buckets, whose parameters are unused; unused: whether averages of these are dropped.
        memory: that of the placement."""
        if unused and not placement.on_host:
            raise ConfigError(
                f"find_unused_parameters on {placement.device}, where residuals cannot wait: use "
                "hipress.Synchronizer, which does without"
            )
        self.params, self.plan, self.options = params, plan, options
        self.group = group  # of buckets that travel as DDP would have them
        rank = meeting.rank
        self._meeting = meeting
        self.name = meeting.ranks[rank]  # this rank's global number
        self._memory = memory or placement.memory()
        # of uncompressed buckets: gloo's futures do not order streams behind its copies
        self._through_host = not placement.on_host and by_gloo(group)
        self.buckets = BucketPlans(params, plan, options, rank, self._memory)
        self._tuner = tuner
        self._owed: dict[int, torch.Tensor] = {}  # see `_switch`
        self._skips = skips
        self.step = 0  # steps begun so far; backward passes under no_sync do not count
        self._latest = -1  # the bucket of the current step that came last; -1 between steps
        self._checked: Future[torch.Tensor] | None = None  # parameters, before the current step
        self.traffic = Traffic()
        codecs = plan.codecs if tuner is None else tuner.codecs
        waiting = codecs.items() if unused else ()
        deferred = {key: deferrable_states(codec) for key, codec in waiting}
        self._executor = start_executor(
            "gradients", codecs, options, meeting, deferred, placement, self._memory
        )
        self._broken: BaseException | None = None
        self._broken_by = ""  # what broke
        self._verifier = self._verifying(meeting) if options.verify else None
        watch_steps()

    def _verifying(self, meeting: Meeting) -> Verifier:
        try:
            return Verifier(connect(meeting, "verify"), meeting.ranks, self._memory.future)
        except BaseException:
            self._executor.close()
            raise

    @property
    def counters(self) -> Counters:
        """A copy of the executor's sums so far."""
        return self._executor.counters

    @property
    def unfinished(self) -> str | None:
        """Which step failed or is under way; None between steps."""
        if self._broken is not None:
            return f"{self._broken_by} failed: {self._broken}"
        if self._executor.failed:
            return f"step {self._step_number} failed"
        if self.under_way:
            return f"step {self._step_number} has begun and has not ended"
        return None

    @property
    def under_way(self) -> bool:
        """Whether a step has begun whose averages DDP has not got."""
        return self._latest >= 0 or bool(self.traffic.pending)

    def begin(self, index: int, parameters: Collection[torch.Tensor] = ()) -> None:
        """Bucket `index` is about to be reduced, maybe as the first of a step.

        `parameters`: the model's, to see that the ranks' did not part since the last step.
        Buckets come in order, but DDP may leave out the first and the last ones, whose parameters
        are unused (`skip_all_reduce_unused_params`).
        """
        first = index <= self._latest or self._latest < 0
        self._latest = index
        if first:
            self.traffic.pending.clear()
            self.traffic.steps += 1
            self.step += 1
            self._retune()
            self._check(parameters)

    def _check(self, parameters: Collection[torch.Tensor]) -> None:
        """Raise SyncError where an optimizer failed on this rank only; with `verify`, have
        parameters compared."""
        failed = take_failed(parameters)
        if failed is not None:
            what = f"the step of {type(failed).__name__} before step {self._step_number}"
            others = self._meeting.silent(what)  # of those that say the same
            if others:
                names = ", ".join(map(str, others))
                raise SyncError(
                    f"{what} raised an error, or was interrupted, on rank {self.name} and not on "
                    f"rank {names}: their parameters differ"
                )
        if self._verifier and parameters and self._step_number % VERIFY_STEPS == 1:
            step = self._step_number
            self._checked = self._verifier.check_parameters(parameters, self.params, step)

    def reduce(
        self, indices: tuple[int, ...], buffer: torch.Tensor, *, last: bool
    ) -> Future[torch.Tensor]:
        """Average a bucket that holds these parameters, in this order, without gaps.

        What goes wrong is the future's: the other buckets are still reduced, so that no rank waits
        in an all-reduce of DDP's group for one that has failed.
        """
        self.refuse_broken()
        plan = None
        try:
            plan = None if buffer.is_sparse else self.buckets.plan_for(indices)
            if not self._owed.keys().isdisjoint(indices):
                self._pay(indices, buffer)
            if self._tuner is not None:
                self._tuner.handed(indices, buffer, partial(_unsent, plan))
            self._count(plan, buffer)  # now: an all-reduce gives a sparse buffer other rows
            future = compat.profiled_until_done(
                f"bucket {self._latest}",
                lambda: self._native(buffer) if plan is None else self._submit(plan, buffer),
            )
        except Exception as error:
            named = self._not_begun(error)
            self._executor.abort(named)  # so that the others learn it now
            error.__traceback__ = None  # it is kept, and would keep the callers' models
            future = Future()
            future.set_exception(named)  # type: ignore[arg-type] # torch's annotation is wrong
        if self._verifier is not None and not buffer.is_sparse:
            future = self._verifier.check(
                future, [self.params[i] for i in indices], self._step_number
            )
        slack = self.options.timeout + NATIVE_TIMEOUT_SLACK
        self.traffic.pending.append((future, slack if plan is None else None))
        if last:
            self._latest = -1
        return future

    @property
    def broken(self) -> bool:
        """Whether a failure has ended this."""
        return self._broken is not None

    def refuse_broken(self) -> None:
        """Raise SyncError after a failure: no step may follow."""
        if self._broken is not None:
            raise SyncError(f"{self._broken_by} failed: {self._broken}") from self._broken

    def finish(self, arrived: Callable[[int], None] = lambda number: None) -> None:
        """Wait for the step's buckets, if all have come. Raises what went wrong, as it was raised.

        DDP would wait as well, at the same moment, but shows a failure as an obscure cast error.
        `arrived`: called with the number of each bucket, in the order in which they were reduced,
        while later ones are on their way.
        """
        if self._latest >= 0 and not self._skips:
            return  # one of several backward passes of a step
        if self._tuner is not None:
            self._tuner.backward_over()
        checked, self._checked = self._checked, None
        if checked is not None:
            self.wait(checked, None)
        for number, (future, seconds) in enumerate(self.traffic.pending):
            self.wait(future, seconds)
            self._failing(self._executor.settle)
            arrived(number)
        if self._tuner is not None:
            self._tuner.averaged()
        self.traffic.pending.clear()
        self._latest = -1

    def wait(self, future: Future[Any], seconds: float | None) -> None:
        """Wait for what the current step needs; when that fails no step may follow."""
        self._failing(lambda: wait_within(future, seconds))

    def _failing(self, wait: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            wait()
        except Exception as error:
            named = self.explained(self._with_context(error))
            self.fail(named)
            error.__traceback__ = None
            raise copy_to_raise(named) from named.__cause__
        except BaseException as error:  # a KeyboardInterrupt: the step is lost
            self.fail(error)
            raise
        self.traffic.exposed_seconds += time.perf_counter() - start

    def fail(self, error: BaseException, what: str = "") -> None:
        """No step may follow, since `what` failed, maybe on this rank only; by default the current
        step. The first failure counts."""
        if self._broken is not None:
            return
        if not isinstance(error, TransportError) or isinstance(error, PeerTimeout):
            self._meeting.fail(error)  # others see a broken connection only
        if not isinstance(error, CasyncError | HipressError):
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, Exception):
                text = f"interrupted by a {type(error).__name__}"
            error = SyncError(f"rank {self.name}: {text}")
        self._broken, self._broken_by = copy_to_raise(error), what or f"step {self._step_number}"
        self._executor.abort(error)
        if self._tuner is not None:
            self._tuner.close()

    def close(self) -> None:
        """End the threads. On detach, when the module dies, at exit; may repeat."""
        self._executor.close()
        if self._tuner is not None:
            self._tuner.close()
        if self._verifier is not None:
            self._verifier.close()

    @property
    def tuner(self) -> Chooser | None:
        """What chooses the plan, if it may change."""
        return self._tuner

    def planned(self, plan: Plan) -> BucketPlans:
        """Buckets by this plan, without any state: for `resume`."""
        return BucketPlans(self.params, plan, self.options, self._meeting.rank, self._memory)

    def resume(self, step: int, buckets: BucketPlans) -> None:
        """Go on from this step by these buckets, with the state that they have."""
        if self._tuner is not None and buckets is not self.buckets:
            self._tuner.hold(buckets.plan)
        self.plan, self.buckets, self.step = buckets.plan, buckets, step
        self._owed.clear()

    def _retune(self) -> None:
        """A step begins, maybe by another plan."""
        if self._tuner is None or self.broken:
            return
        plan = self._tuner.next(self._step_number)
        if plan is not self.plan:
            self._switch(plan)

    def _switch(self, plan: Plan) -> None:
        """Go by another plan. Where only parameters of a codec differ its states move along. Other
        residuals are not lost: what they held is owed, and added to the gradients of this step,
        before a codec takes them."""
        before, made = self.buckets, self.planned(plan)
        moved = made.adopt(before)
        for index, values in before.unsent().items():
            if index not in moved:
                self._owed[index] = self._owed.get(index, 0) + values
        self.plan, self.buckets = plan, made

    def _pay(self, indices: tuple[int, ...], buffer: torch.Tensor) -> None:
        """Add what is owed to the gradients of a bucket; not where they are zero, as those of
        parameters are that this rank did not use: see [Note: unused parameters] in state.py."""
        for index, piece in zip(indices, self.buckets.pieces(indices, buffer), strict=True):
            if index in self._owed and piece.any():
                piece.add_(self._owed.pop(index))

    @property
    def _step_number(self) -> int:
        """The number of the current step, from 0 on."""
        return self.step - 1

    def _submit(self, plan: BucketPlan, buffer: torch.Tensor) -> Future[torch.Tensor]:
        if buffer.dtype == torch.float32:
            return self._executor.submit(plan.program, buffer, plan.states, self._step_number)
        scratch = buffer.float()
        future = self._executor.submit(plan.program, scratch, plan.states, self._step_number)
        return map_future(future, buffer.copy_, self._memory.future())

    def _native(self, buffer: torch.Tensor) -> Future[torch.Tensor]:
        """What DDP does without a hook. Sparse gradients come here too."""
        if not self._through_host or buffer.is_sparse:
            return average(buffer, self.group, self.options.timeout)
        averaged = average(buffer.cpu(), self.group, self.options.timeout)
        return map_future(averaged, buffer.copy_, self._memory.future())

    def _not_begun(self, error: Exception) -> Exception:
        if isinstance(error, CasyncError | HipressError):
            return error
        what = f"the bucket could not be handed over: {type(error).__name__}: {error}"
        named = SyncError(f"{self._where}: {what}")
        named.__cause__ = error
        return named

    def _with_context(self, error: Exception) -> Exception:
        """Errors of ours as they are; torch's, of a native all-reduce, with where."""
        if isinstance(error, CasyncError | HipressError):
            return error
        what = f"{self._where}: the all-reduce of uncompressed gradients"
        return transport_error(error, what, self.options.timeout)

    def explained(self, error: Exception) -> Exception:
        """Of what other ranks are to blame for, with what is known of them."""
        if not isinstance(error, TransportError):
            return error
        return type(error)(self._meeting.explained(error, f"step {self._step_number}"))

    @property
    def _where(self) -> str:
        return f"rank {self.name}, step {self._step_number}"

    def _count(self, plan: BucketPlan | None, buffer: torch.Tensor) -> None:
        traffic = self.traffic
        if buffer.is_sparse:
            traffic.sparse_bytes += compat.sparse_bytes(buffer)
            return
        traffic.gradient_bytes += buffer.nbytes
        if plan is None:
            traffic.raw_bytes += buffer.nbytes
        else:
            traffic.compressed_bytes += plan.compressed * buffer.element_size()
            traffic.mixed_bytes += (buffer.numel() - plan.compressed) * FLOAT_BYTES
