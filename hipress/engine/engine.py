"""The engine of a synchronized module: what is known of its gradients from step to step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from casync.memory import Memory
from casync.runtime.counters import Counters
from casync.runtime.executor import TraceEvent
from casync.runtime.options import Capture
from hipress.choose.plan import Plan
from hipress.engine.buckets import BucketPlans
from hipress.engine.channels import Channels
from hipress.engine.momentum import Momentum
from hipress.engine.reduction import Reduction, Traffic
from hipress.engine.residuals import in_layout, in_shape
from hipress.engine.scaling import Scale, set_unscaled, stepped_optimizers, watch_scalers
from hipress.engine.verify import VERIFY_STEPS
from hipress.errors import SyncError
from hipress.model.params import Param
from hipress.model.shards import local
from hipress.optim import Averaging
from hipress.optim.optimizer_kinds import holds
from hipress.options import Options

if TYPE_CHECKING:
    from hipress.choose.chooser import Chooser

#: a mapping, since other threads may add to it while one reads `keyrefs`
_begun: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()


@functools.cache
def watch_steps() -> None:
    """From now on, track the optimizers whose step has begun and not ended, and their scalers."""
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)
    watch_scalers()


def pop_failed(parameters: Iterable[torch.Tensor]) -> Optimizer | None:
    """An optimizer of some of these parameters whose step raised, or None; reported only once."""
    for reference in _begun.keyrefs():
        optimizer, known = reference(), set(map(id, parameters))
        if optimizer is not None and holds(optimizer, known):
            _begun.pop(optimizer, None)
            return optimizer
    return None


def refuse_forgotten(parameters: Collection[torch.Tensor]) -> None:
    """Raise SyncError for an optimizer that has stepped some of these parameters and of which ranks
    should average the momentum, but do not."""
    for optimizer in stepped_optimizers():
        if not isinstance(optimizer, Averaging) or optimizer.phase.undo is not None:
            continue
        if optimizer.averages and holds(optimizer, set(map(id, parameters))):
            name = type(optimizer).__name__
            raise SyncError(
                f"a hipress.optim.{name} steps parameters that hipress averages, and hipress does "
                f"not know it, so ranks would never average its momentum: pass it as optimizer= "
                f"where hipress takes the model, or use torch.optim.{name}"
            )


def _begin(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_compiling():  # in a compiled step the closure is not visible
        return None
    _begun[optimizer] = None
    set_unscaled(optimizer)
    own = (args[0], *(_closure(optimizer, each) for each in args[1:]))
    return own, {name: _closure(optimizer, each) for name, each in kwargs.items()}


def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        _begun.pop(optimizer, None)


def _closure(optimizer: Optimizer, argument: Any) -> Any:
    """A closure that recomputes gradients within a step; while it runs, the step has not failed."""
    if not callable(argument):
        return argument

    def closure(*args: Any, **kwargs: Any) -> Any:
        _begun.pop(optimizer, None)
        try:
            return argument(*args, **kwargs)
        finally:
            _begun[optimizer] = None

    return closure


class Engine:
    """Parameters, plan, states of codecs and step of one module, whose gradients a `Reduction`
    averages in each step. Holds no reference to the module: see close()."""

    def __init__(
        self,
        params: Sequence[Param],
        plan: Plan,
        options: Options,
        channels: Channels,
        *,
        chooser: Chooser | None = None,
        skips: bool = False,
        momentum: Momentum | None = None,
    ) -> None:
        """Lay out the states.

        Args:
            channels: ends with the engine.
            chooser: chooses the plan of each step, beginning with `plan`.
            skips: True if a step may lack buckets whose parameters are unused.
            momentum: adds momentum to gradients.
        """
        self.params, self.options, self.channels = list(params), options, channels
        self.chooser, self.momentum = chooser, momentum
        self.step = 0  # steps begun so far; backward passes under no_sync do not count
        self.reduction: Reduction | None = None  # the step under way; None between steps
        self._scale = Scale()
        self.traffic = Traffic()
        self.at_freeze: tuple[Traffic, Counters] | None = None  # sums until an optimizer froze
        self._skips = skips
        self.buckets = self.buckets_of(plan)  # of the current plan
        #: undelivered gradients of this rank from earlier plans, which wait for the parameters'
        #: next ones: flat float32 in bucket order, by parameter
        self.undelivered: dict[int, torch.Tensor] = {}
        watch_steps()
        if chooser is not None:
            channels.failures.ends(lambda _: chooser.close())

    @property
    def global_rank(self) -> int:
        """This rank's global number."""
        return self.channels.global_rank

    @property
    def observes(self) -> bool:
        """True if a chooser or momentum sees gradients, also uncompressed ones."""
        return self.momentum is not None or (self.chooser is not None and self.chooser.observes)

    @property
    def capture(self) -> Capture:
        """Use of CUDA graphs in the current step."""
        if self.options.capture is True:
            return Capture.LAUNCH
        return Capture.NEVER if self.chooser is None else self.chooser.capture

    @property
    def counters(self) -> Counters:
        """A copy of the executors' sums so far."""
        return self.channels.counters

    def trace(self, events: list[TraceEvent] | None) -> None:
        """Collect events of tasks from now on, between two steps; None ends it."""
        self.channels.trace(events)

    @property
    def unfinished(self) -> str | None:
        """Text on the step that failed or has not ended; None between steps."""
        if self.broken:
            return self.channels.failures.first
        if self.channels.failed:
            return f"step {self._latest} failed"
        if self.reduction is not None:
            return f"step {self.reduction.step} has begun and has not ended"
        return None

    def begin(self, parameters: Collection[torch.Tensor] = ()) -> Reduction:
        """Begin a step, whose first bucket is ready. All ranks begin alike.

        parameters: the model's, to check that ranks have not diverged since the last step. Raises
        SyncError if an optimizer failed on this rank only, or if ranks should average the momentum
        of one that hipress does not know.
        """
        self.channels.failures.refuse()
        step, self.step = self.step, self.step + 1
        self.reduction = Reduction(self, step, self._scale.now(parameters))
        averaging = self.momentum is not None and self.momentum.phase.momentum
        if self.chooser is not None:
            plan = self.chooser.next(step, self.channels.pop_capture_error())  # ranks may meet here
            self._use_plan(plan)
        if self.momentum is not None:
            if self.momentum.phase.momentum and not averaging:
                self.at_freeze = replace(self.traffic), self.counters
            self.momentum.begin(self.reduction, self.buckets.residuals)
        self.traffic.steps += 1
        failed = pop_failed(parameters)
        if failed is not None:
            self.channels.failures.refuse_parted(failed, step)
        refuse_forgotten(parameters)
        verifier = self.channels.verifier
        if verifier and parameters and step % VERIFY_STEPS == 1:
            values = map(local, parameters)
            self.reduction.compare(verifier.check_parameters(values, self.params, step))
        return self.reduction

    @property
    def _latest(self) -> int:
        """Number of the latest step, for errors; of the first before that has begun."""
        return max(0, self.step - 1)

    def finish(self, arrived: Callable[[int], None] | None = None) -> None:
        """Finish the step under way, if its last bucket has come: see Reduction.finish."""
        if self.reduction is not None and (self.reduction.closed or self._skips):
            self.reduction.finish(arrived)

    @property
    def broken(self) -> bool:
        """True if a failure has ended the engine."""
        return self.channels.failures.first is not None

    def refuse_broken(self) -> None:
        """Raise SyncError after a failure: no step may follow."""
        self.channels.failures.refuse()

    def fail(self, error: BaseException, what: str = "") -> BaseException:
        """End the engine, since `what` failed, by default the current step: see Failures.fail."""
        return self.channels.failures.fail(error, self._latest, what)

    @contextmanager
    def failing(self, what: str = "") -> Iterator[None]:
        """A context whose error ends the engine, on all ranks."""
        try:
            yield
        except BaseException as error:
            raise self.fail(error, what) from error.__cause__

    def close(self) -> None:
        """End the threads: on detach, when the module is collected, and at exit. May repeat."""
        self.channels.close()
        if self.momentum is not None:
            self.momentum.close()
        if self.chooser is not None:
            self.chooser.close()

    @property
    def plan(self) -> Plan:
        """The current plan."""
        return self.buckets.plan

    def keep_undelivered(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to this rank's next one of the parameter."""
        self.undelivered[index] = self.undelivered.get(index, 0) + gradient

    def add_undelivered(
        self, indices: Sequence[int], buffer: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """Add undelivered gradients to a bucket's, unless these are zero, as for parameters that
        this rank did not use: see [Note: unused parameters] in residuals.py. Returns the added
        ones."""
        added: dict[int, torch.Tensor] = {}
        for index, piece in zip(indices, self.buckets.pieces(indices, buffer), strict=True):
            if index in self.undelivered and piece.any():
                added[index] = self.undelivered.pop(index)
                piece.add_(added[index])
        return added

    def _use_plan(self, plan: Plan) -> None:
        """Use this plan from now on. What this rank has not delivered moves to it in one of two
        ways: as states of codecs, bit for bit, where these fit; else as an undelivered gradient.
        See [Note: undelivered gradient] in channel/states.py."""
        if plan is self.plan:
            return
        if plan == replace(self.plan, captured=plan.captured):
            self.buckets.plan = plan  # their programs and states are the same
            return
        before, self.buckets = self.buckets, self.buckets_of(plan)
        moved, memory = self.buckets.adopt(before), self.buckets.residuals.memory
        self.undelivered = {
            index: _in(memory, values) for index, values in self.undelivered.items()
        }
        for index in before.residuals.places.keys() - moved:
            values = before.residuals.undelivered(index)
            if values is not None and values.any():
                self.keep_undelivered(index, _in(memory, values))
        if before.hosted and not self.buckets.hosted:
            self.channels.free_copies()

    def buckets_of(self, plan: Plan) -> BucketPlans:
        """Buckets of this plan, without any state."""
        channel = self.channels.channel(hosted=plan.hosted)
        return BucketPlans(
            self.params, plan, self.options, channel.coordinator.rank, channel.memory,
            rotates=channel.rotates,
        )  # fmt: skip

    def buckets_for(self, saved: Mapping[str, Any]) -> BucketPlans:
        """Buckets into which a record is loaded; if the plan may change, those of the record's."""
        if self.chooser is None or saved["portable"]:
            return self.buckets
        plan = self.chooser.restored(saved["plan"]) if saved["plan"] else None
        if plan is None or saved["plan"] == self.plan.by_name:
            return self.buckets
        return self.buckets_of(plan)

    def resume(
        self,
        step: int,
        buckets: BucketPlans,
        undelivered: Mapping[int, torch.Tensor] = MappingProxyType({}),
        measured: str = "",
    ) -> None:
        """Go on from this step with these buckets and their state, undelivered gradients of earlier
        plans, and what the chooser had measured (see PolicyState)."""
        if self.chooser is not None and buckets is not self.buckets:
            self.chooser.hold(buckets.plan)
        if self.chooser is not None and self.chooser.measurements is not None and measured:
            self.chooser.measurements.load(measured)
        memory, self.buckets = buckets.residuals.memory, buckets
        self.undelivered = {index: _in(memory, values) for index, values in undelivered.items()}
        self.step = step

    def lay_out(self, params: Sequence[Param]) -> None:
        """Adopt new strides of gradients in buckets, and move states along."""
        for old, new in zip(self.params, params, strict=True):
            if old.layout != new.layout:
                self.buckets.residuals.lay_out(old, new)
                if old.index in self.undelivered:
                    self.undelivered[old.index] = in_layout(
                        in_shape(self.undelivered[old.index], old), new
                    )
        self.params[:] = params  # in place: makers of buckets share the list


def _in(memory: Memory, values: torch.Tensor) -> torch.Tensor:
    """The values in the memory in which gradients are compressed now."""
    if values.device == memory.device:
        return values
    host = values.cpu()
    return host if memory.host else memory.zeros(len(host), host.dtype).copy_(host)
