"""The averaging of a step's gradients, while it is under way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch.futures import Future

from casync.codec import FLOAT_BYTES
from casync.errors import fail_future
from casync.runtime.options import Capture
from hipress import compat
from hipress.channel.futures import map_future
from hipress.channel.states import Copied
from hipress.choose.chooser import StepEvent
from hipress.engine.channels import NATIVE_TIMEOUT_SLACK
from hipress.engine.scaling import scale_back, unscaled

if TYPE_CHECKING:
    from hipress.choose.chooser import Chooser
    from hipress.engine.buckets import BucketPlan, BucketPlans
    from hipress.engine.channels import Channels
    from hipress.engine.momentum import Momentum
    from hipress.model.params import Param
    from hipress.options import Options


@dataclass
class Traffic:
    """Counters of a module's steps: sums since the engine was made."""

    steps: int = 0  # in this process; Engine.step survives a checkpoint
    gradient_bytes: int = 0  # of all dense buckets
    compressed_bytes: int = 0  # of these, compressed by codecs
    raw_bytes: int = 0  # of dense buckets that went to DDP's own all-reduce
    mixed_bytes: int = 0  # summed natively by executors, as sent
    sparse_bytes: int = 0  # of sparse gradients: indices and values
    exposed_seconds: float = 0.0  # waits after the backward pass

    def count(self, plan: BucketPlan | None, buffer: torch.Tensor) -> None:
        """Count a bucket before it is reduced, which changes the rows of a sparse buffer."""
        if buffer.is_sparse:
            self.sparse_bytes += compat.sparse_bytes(buffer)
            return
        self.gradient_bytes += buffer.nbytes
        if plan is None:
            self.raw_bytes += buffer.nbytes
        else:
            self.compressed_bytes += plan.compressed * buffer.element_size()
            size = FLOAT_BYTES if plan.units else buffer.element_size()
            self.mixed_bytes += (buffer.numel() - plan.compressed) * size

    def __sub__(self, earlier: Traffic) -> Traffic:
        """Sums since an earlier copy."""
        return Traffic(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


class Averager(Protocol):
    """An engine, as its reductions use it."""

    channels: Channels
    options: Options
    params: list[Param]
    buckets: BucketPlans
    chooser: Chooser | None
    momentum: Momentum | None
    traffic: Traffic
    reduction: Reduction | None
    undelivered: dict[int, torch.Tensor]

    @property
    def capture(self) -> Capture:
        """Use of CUDA graphs in the current step."""
        ...

    @property
    def observes(self) -> bool:
        """True if a chooser or momentum sees gradients, also uncompressed ones."""
        ...

    def add_undelivered(
        self, indices: Sequence[int], buffer: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """Add undelivered gradients to those of a bucket; return the added ones."""
        ...

    def keep_undelivered(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient to this rank's next one of the parameter."""
        ...


@dataclass(eq=False)
class Average:
    """The average of a bucket."""

    indices: tuple[int, ...]  # parameters, in the bucket's order
    number: int  # of the bucket in its step
    values: torch.Tensor  # what is averaged, in place: the bucket, or a copy
    future: Future[torch.Tensor] = field(init=False)  # its value is the bucket
    seconds: float | None = None  # longest wait; None if the future itself times out
    job: Future[torch.Tensor] | None = None  # of the executor; None if averaged natively


class Reduction:
    """Averages buckets, each as soon as its gradients are ready; then `finish` waits for all.

    All ranks hand over the same buckets in the same order. It exists while it is under way:
    `Engine.reduction` is None between steps.
    """

    def __init__(self, engine: Averager, step: int, scale: float = 1.0) -> None:
        """step: number of the step, from 0 on, for errors and random draws. scale: of gradients,
        see [Note: scale] in scaling.py."""
        self._engine, self.step, self._scale = engine, step, scale
        self.averages: list[Average] = []
        self._waiting: list[tuple[Average, Future[torch.Tensor]]] = []  # for the last bucket
        self.closed = False  # True once the last bucket has come
        self._comparison: Future[torch.Tensor] | None = None  # of all ranks' parameters
        self._before: dict[int, Copied] = {}  # states of parameters from before the step
        self._taken: dict[int, torch.Tensor] = {}  # gradients of earlier plans that it took

    def compare(self, checked: Future[torch.Tensor]) -> None:
        """Wait in `finish` for this comparison of parameters, too."""
        self._comparison = checked

    def keep(self, indices: Iterable[int]) -> None:
        """Copy these parameters' states as they are now, for `undo`."""
        self._before |= self._engine.buckets.residuals.copy(indices)

    def undo(self, indices: Collection[int] | None = None) -> None:
        """Give kept parameters the states from before the step, bit for bit, as their averages are
        dropped. indices: of some parameters; by default all that `keep` was called for. It must
        be over: all averages complete or failed."""
        some = self._before.keys() if indices is None else self._before.keys() & set(indices)
        self._engine.buckets.residuals.put_back({index: self._before[index] for index in some})
        for index in some & self._taken.keys():
            self._engine.keep_undelivered(index, self._taken.pop(index))

    def reduce(self, indices: tuple[int, ...], buffer: torch.Tensor) -> Future[torch.Tensor]:
        """Average the gradients of these parameters in place; the future's value is `buffer`.

        buffer: the gradients, flat, in this order and without gaps; or one sparse gradient. Errors
        become the future's: the other buckets are still averaged, so that no rank waits in an
        all-reduce of DDP's group for a rank that has failed.
        """
        engine, channels, dense = self._engine, self._engine.channels, not buffer.is_sparse
        channels.failures.refuse()
        native = not dense or engine.buckets.native(indices)
        scaled = self._scale != 1 and dense and (engine.observes or not native)
        values = unscaled(self._scale, buffer) if scaled else buffer
        average = Average(indices, len(self.averages), values)
        if native:
            average.seconds = engine.options.timeout + NATIVE_TIMEOUT_SLACK
        if engine.momentum is not None and engine.momentum.take(indices, values):
            average.future = channels.memory.future()  # `close` completes it
            self._waiting.append((average, average.future))
        else:
            average.future = self._start(average)
        if scaled:
            average.future = scale_back(
                self._scale, average.future, channels.memory.future(), buffer
            )
        if channels.verifier is not None and dense:
            params = [engine.params[index] for index in indices]
            average.future = channels.verifier.check(average.future, params, self.step)
        self.averages.append(average)
        return average.future

    def _start(self, average: Average) -> Future[torch.Tensor]:
        """Start the average of a bucket's values: of a device, maybe of a copy on the host."""
        channels, values = self._engine.channels, average.values
        copied = channels.always_copies or self._engine.buckets.hosted
        if values.is_sparse or not copied:
            return self._hand_over(average, values)
        hand_over = partial(self._hand_over, average, copied=True)  # in the copies' thread
        return channels.copies.average(average.number, hand_over, values)

    def _hand_over(
        self, average: Average, values: torch.Tensor, *, copied: bool = False
    ) -> Future[torch.Tensor]:
        """Average values in place by the executor or natively, as planned; raises nothing. copied:
        they are a copy on the host."""
        engine, channels, indices, plan = self._engine, self._engine.channels, average.indices, None
        try:
            if not values.is_sparse:
                plan = engine.buckets.plan_for(indices)
                if engine.undelivered:  # before values are encoded
                    self._taken |= engine.add_undelivered(indices, values)
            if engine.chooser is not None and engine.chooser.observes:
                engine.chooser.observe(
                    indices, values, partial(engine.buckets.undelivered, indices)
                )
            if plan is None and channels.sums_by_channel(values):
                plan = engine.buckets.raw(indices)
            engine.traffic.count(plan, values)
            with compat.profiled(f"bucket {average.number}") as event:
                if plan is None:
                    future = channels.average_natively(average.number, values, copied=copied)
                else:
                    channel, states = channels.channel(hosted=engine.buckets.hosted), plan.states
                    future = average.job = channel.run(
                        plan.program, values, states, self.step, str(indices),
                        capture=engine.capture,
                    )  # fmt: skip
                if event is not None:
                    compat.end_event_with(event, future)
            if plan is not None and plan.differences:
                add_means = partial(plan.add_means, states=states)
                future = map_future(future, add_means, channels.memory.future())
            return future
        except Exception as error:
            named = channels.failures.not_begun(error, self.step)
            channels.failures.abort(named)
            error.__traceback__ = None  # a kept error would keep the callers' models
            failed: Future[torch.Tensor] = Future()
            fail_future(failed, named)
            return failed

    def close(self) -> None:
        """Start averages that waited for the last bucket, which has come."""
        self.closed = True
        waiting, self._waiting = self._waiting, []
        if waiting and self._engine.momentum is not None:
            self._engine.momentum.release()
        for average, future in waiting:
            map_future(self._start(average), lambda values: values, future)

    def finish(self, arrived: Callable[[int], None] | None = None) -> None:
        """Wait for all averages; raise their errors, after which no step may follow.

        DDP would wait as well, at the same moment, but shows a failure as an obscure cast error.
        arrived: called with the number of each bucket, in order, while later ones still travel; on
        a device, too.
        """
        engine, channels = self._engine, self._engine.channels
        failures = channels.failures
        self.close()
        if engine.chooser is not None and engine.chooser.observes:
            engine.chooser.mark(StepEvent.BACKWARD_OVER)
        if self._comparison is not None:
            with failures.waiting(self.step):
                failures.wait(self._comparison)
                failures.finished()
        for number, average in enumerate(self.averages):
            with failures.waiting(self.step):
                failures.wait(average.future, average.seconds)
                failures.finished()
                if arrived is not None and average.job is not None:
                    channels.settle(average.job)
            if arrived is not None:
                arrived(number)
        if arrived is None:
            with failures.waiting(self.step):
                channels.settle()  # of a device: no optimizer may step before its errors are known
        if engine.momentum is not None:
            engine.momentum.take_averages()
        if engine.chooser is not None and engine.chooser.observes:
            engine.chooser.mark(StepEvent.AVERAGED)
        engine.traffic.exposed_seconds = failures.waited
        if engine.reduction is self:  # from here on the loss of a rank belongs to no step
            engine.reduction = None
