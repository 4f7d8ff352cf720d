"""An averaging of gradients that is under way: a step, or a round of an outer loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

from casync.errors import copy_to_raise
from hipress import compat
from hipress.engine.futures import map_future, wait_within
from hipress.engine.residuals import Copied
from hipress.engine.scaling import average_unscaled
from hipress.engine.world import NATIVE_TIMEOUT_SLACK

if TYPE_CHECKING:
    from hipress.engine.buckets import BucketPlan
    from hipress.engine.engine import Engine


@dataclass(eq=False)
class Average:
    """The average of a bucket."""

    indices: tuple[int, ...]  # parameters, in the bucket's order
    future: Future[torch.Tensor]  # its value is the bucket
    seconds: float | None = None  # longest wait; None if the future itself times out
    job: Future[torch.Tensor] | None = None  # of the executor; None if averaged natively


class Round:
    """Averages buckets, each as soon as its gradients are ready; then `finish` waits for all.

    All ranks hand over the same buckets in the same order. The round exists while it is under way:
    `Engine.round` is None between steps.
    """

    def __init__(self, engine: Engine, step: int, scale: float = 1.0) -> None:
        """step: number of the step, from 0 on, for errors and random draws. scale: of gradients,
        see [Note: scale] in scaling.py."""
        self._engine, self.step, self._scale = engine, step, scale
        self.averages: list[Average] = []
        self.closed = False  # True once the last bucket has come
        self._checked: Future[torch.Tensor] | None = None  # comparison of parameters
        self._before: Copied = {}  # states of parameters from before the round
        self._owed: dict[int, torch.Tensor] = {}  # gradients of earlier plans that it took

    def compare(self, checked: Future[torch.Tensor]) -> None:
        """Wait in `finish` for this comparison of parameters, too."""
        self._checked = checked

    def keep(self, indices: Iterable[int]) -> None:
        """Copy these parameters' states as they are now, for `undo`."""
        self._before |= self._engine.buckets.residuals.copy(indices)

    def undo(self, indices: Collection[int] | None = None) -> None:
        """Give kept parameters the states from before the round, bit for bit, as their averages are
        dropped. indices: of some parameters; by default all that `keep` was called for. The round
        must be over: all of its averages complete or failed."""
        some = self._before.keys() if indices is None else self._before.keys() & set(indices)
        self._engine.buckets.residuals.put_back({index: self._before[index] for index in some})
        for index in some & self._owed.keys():
            self._engine.owe(index, self._owed.pop(index))

    def reduce(self, indices: tuple[int, ...], buffer: torch.Tensor) -> Future[torch.Tensor]:
        """Average the gradients of these parameters in place; the future's value is `buffer`.

        buffer: the gradients, flat, in this order and without gaps; or one sparse gradient. Errors
        become the future's: the other buckets are still averaged, so that no rank waits in an
        all-reduce of DDP's group for a rank that has failed.
        """
        engine, world = self._engine, self._engine.world
        world.failures.refuse()
        number, average = len(self.averages), Average(indices, world.memory.future())
        self.averages.append(average)
        native = buffer.is_sparse or engine.buckets.native(indices)
        if native:
            average.seconds = engine.options.timeout + NATIVE_TIMEOUT_SLACK
        begin = partial(self._begin, average, number)
        if self._scale == 1 or buffer.is_sparse or (native and not engine.looks):
            average.future = begin(buffer)
        else:
            average.future = average_unscaled(buffer, self._scale, begin, average.future)
        if world.verifier is not None and not buffer.is_sparse:
            params = [engine.params[index] for index in indices]
            average.future = world.verifier.check(average.future, params, self.step)
        return average.future

    def _begin(self, average: Average, number: int, buffer: torch.Tensor) -> Future[torch.Tensor]:
        """Average a bucket in place, with momentum if there is any; it may have to wait for the
        last bucket, as the norm of all clips each."""
        momentum, start = self._engine.momentum, partial(self._start, average, number, buffer)
        if momentum is None:
            return start()
        return momentum.hand(average.indices, buffer, start, self._engine.world.memory.future())

    def _start(self, average: Average, number: int, buffer: torch.Tensor) -> Future[torch.Tensor]:
        """Hand a bucket over where the plan compresses: in place, or as a copy on the host."""
        world = self._engine.world
        if buffer.is_sparse or not (world.copies_all or self._engine.buckets.hosted):
            return self._hand_over(average, number, buffer)
        hand_over = partial(self._hand_over, average, number, copied=True)
        return world.copies.average(number, hand_over, buffer)  # called in its own thread

    def _hand_over(
        self, average: Average, number: int, values: torch.Tensor, *, copied: bool = False
    ) -> Future[torch.Tensor]:
        """Average values in place; raises nothing. copied: they are a copy on the host."""
        engine, world, indices, plan = self._engine, self._engine.world, average.indices, None
        try:
            if not values.is_sparse:
                plan = engine.buckets.plan_for(indices)
                if engine.owed:  # before values are encoded
                    self._owed |= engine.add_owed(indices, values)
            if engine.tuner is not None:
                engine.tuner.handed(indices, values, partial(engine.undelivered, indices))
            if plan is None and world.sums_by_executor(values):
                plan = engine.buckets.raw(values.numel())
            engine.traffic.count(plan, values)
            with compat.profiled(f"bucket {number}") as event:
                if plan is None:
                    future = world.average_natively(number, values, copied=copied)
                else:
                    future = self._submit(average, plan, values)
                compat.end_event_with(event, future)
            return future
        except Exception as error:
            return self._failed(error)

    def _submit(
        self, average: Average, plan: BucketPlan, values: torch.Tensor
    ) -> Future[torch.Tensor]:
        """Average by a program of the executor."""
        engine, world = self._engine, self._engine.world
        executor, states = world.routes[engine.buckets.hosted].executor, plan.states
        average.job = executor.submit(plan.program, values, states, self.step, str(average.indices))
        if not plan.differences:
            return average.job
        add_means = partial(plan.add_means, states=states)
        return map_future(average.job, add_means, world.memory.future())

    def _failed(self, error: Exception) -> Future[torch.Tensor]:
        """The future of a bucket that could not be handed over; ends the executors, so that other
        ranks learn of it at once."""
        world = self._engine.world
        named = world.failures.not_begun(error, self.step)
        world.abort(named)
        error.__traceback__ = None  # a kept error would keep the callers' models
        future: Future[torch.Tensor] = Future()
        future.set_exception(named)  # type: ignore[arg-type] # torch's annotation is wrong
        return future

    def close(self) -> None:
        """Start averages that waited for the last bucket, which has come."""
        self.closed = True
        if self._engine.momentum is not None:
            self._engine.momentum.release()

    def finish(self, arrived: Callable[[int], None] | None = None) -> None:
        """Wait for all averages; raise their errors, after which no step may follow.

        DDP would wait as well, at the same moment, but shows a failure as an obscure cast error.
        arrived: called with the number of each bucket, in order, while later ones still travel; on
        a device, too.
        """
        engine, world = self._engine, self._engine.world
        self.close()
        if engine.tuner is not None:
            engine.tuner.backward_over()
        if self._checked is not None:
            self._wait(self._checked, None)
        for number, average in enumerate(self.averages):
            self._wait(average.future, average.seconds)
            if arrived is None:
                self._failing(world.settle)
                continue
            if average.job is not None:
                self._failing(partial(world.settle, average.job))
            arrived(number)
        if engine.momentum is not None:
            engine.momentum.arrived()
        if engine.tuner is not None:
            engine.tuner.averaged()
        engine.over(self)

    def _wait(self, future: Future[Any], seconds: float | None) -> None:
        look = self._engine.world.failures.look
        self._failing(lambda: wait_within(future, seconds, look))

    def _failing(self, wait: Callable[[], None]) -> None:
        """Wait; a failure ends the engine."""
        engine, failures, start = self._engine, self._engine.world.failures, time.perf_counter()
        try:
            wait()
        except Exception as error:
            named = failures.explained(failures.not_averaged(error, self.step), self.step)
            engine.fail(named)
            error.__traceback__ = None
            raise copy_to_raise(named) from named.__cause__
        except BaseException as error:  # a KeyboardInterrupt: the step is lost
            engine.fail(error)
            raise
        engine.traffic.exposed_seconds += time.perf_counter() - start
