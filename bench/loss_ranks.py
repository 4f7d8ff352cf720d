"""Ranks that are imitated in one process: one model, a gradient for each rank, and averages.

Averages come from the codecs, plans, states and strategies with which real ranks would make them.
Ranks hold the same parameters after every step, so one model is enough; payloads between them stay
in memory (casync.testing).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

from bench.loss_workloads import Batch, Workload
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.testing import Hub
from casync.topology import Topology
from hipress import optim
from hipress import options as options_
from hipress.choose.plan import fixed_plan
from hipress.choose.trial import COUNTED, SETTLING, TURNS
from hipress.choose.tuner import WATCHED
from hipress.codecs import resolve, resolve_down
from hipress.engine.buckets import BucketPlan, BucketPlans
from hipress.engine.momentum import Momentum
from hipress.model.params import describe
from hipress.optim.adam import Freezing
from hipress.tools.run.figures import FINAL
from hipress.tools.run.methods import Method, parse
from hipress.tools.run.synchronize import Synchronized


class Average(Protocol):
    """Makes each rank's flat gradient their mean, in place; returns bytes sent by a rank."""

    def __call__(self, gradients: Sequence[Tensor], step: int) -> float: ...


def fp32(gradients: Sequence[Tensor], step: int) -> float:
    """Average like DistributedDataParallel without a hook."""
    total = sum((each / len(gradients) for each in gradients), torch.zeros(()))
    for each in gradients:
        each.copy_(total)
    return 8 * (len(gradients) - 1) / len(gradients) * len(gradients[0])


class Compressed(AbstractContextManager["Compressed"]):
    """Averages as `hipress.wrap(model, codec, **options)` would make them on `ranks` ranks."""

    def __init__(self, model: nn.Module, method: Method, ranks: int, seed: int) -> None:
        assert method.codec is not None
        known = {name: method.options[name] for name in method.options if name in _OPTIONS}
        params = {name: value for name, value in method.options.items() if name not in known}
        options = options_.make(method.codec, **{"seed": seed, **known}, params=params)
        tensors, codec = describe(model), resolve(options)
        down = resolve_down(options, codec)
        plan = fixed_plan(tensors, codec, options, Topology.flat(ranks), down)
        every = tuple(range(len(tensors)))
        buckets = [BucketPlans(tensors, plan, options, rank) for rank in range(ranks)]
        self.residuals = buckets[0].residuals
        self.plans = [each.plan_for(every) for each in buckets]
        self.executors = [
            Executor(end, plan.codecs, RunOptions(seed=options.seed))
            for end in Hub(ranks).endpoints()
        ]

    def __call__(self, gradients: Sequence[Tensor], step: int) -> float:
        """Average the gradients in place; returns bytes sent by a rank."""
        before = self._sent()
        futures = [
            executor.submit(plan.program, gradient, plan.states, step)
            for executor, plan, gradient in zip(self.executors, self.plans, gradients, strict=True)
            if plan is not None
        ]
        for future in futures:
            future.wait()
        for plan, gradient in zip(self.plans, gradients, strict=True):
            if plan is not None:
                plan.add_means(gradient, plan.states)
        if not futures:
            raise ValueError("the codec suits no tensor of the model")
        return (self._sent() - before) / len(gradients)

    def _sent(self) -> float:
        share = 2 * (len(self.executors) - 1) / len(self.executors)
        counters = [executor.counters for executor in self.executors]
        return sum(each.bytes_sent + share * each.bytes_reduced for each in counters)

    def __exit__(self, *error: object) -> None:
        for executor in self.executors:
            executor.close()


class Tried(Compressed):
    """Averages of a trial of "auto" that ends with the codec.

    Turns of the codec alternate with DDP's own all-reduce; states begin at zero in each turn of the
    codec, and after the last one.
    """

    def __call__(self, gradients: Sequence[Tensor], step: int) -> float:
        """Average the gradients in place, by codec or all-reduce; returns bytes sent by a rank."""
        turn, within = divmod(step - WATCHED, SETTLING + COUNTED)
        native = turn < 0 or (turn < 2 * TURNS and turn % 2)
        if turn <= 2 * TURNS and within == 0:
            for plan in self.plans:
                _zero(plan)
        return fp32(gradients, step) if native else super().__call__(gradients, step)


def _zero(plan: BucketPlan | None) -> None:
    for arrays in plan.states.values() if plan is not None else ():
        for array in arrays.values():
            array[:] = 0


class _Kept:
    """A step whose averages are all used."""

    def keep(self, indices: Iterable[int]) -> None:
        """Implements Step.keep."""

    def undo(self, indices: Collection[int]) -> None:
        """Implements Step.undo."""


class Averaged(AbstractContextManager["Averaged"]):
    """Averages gradients by int4_group until the optimizer freezes, as "auto" does on slow links,
    and then its momentum by a codec, as `hipress.wrap(model, codec, optimizer=optimizer)` does."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Averaging,
        method: Method,
        ranks: int,
        seed: int,
    ) -> None:
        self._optimizer = optimizer
        parameters, params = list(model.parameters()), describe(model)
        self._every = tuple(range(len(params)))
        self._momentum = Momentum(optimizer, parameters, params, unused=False)
        self._before = Compressed(model, parse("hipress:int4_group"), ranks, seed)
        self._after = Compressed(model, method, ranks, seed)

    def __call__(self, gradients: Sequence[Tensor], step: int) -> float:
        """Implements Average."""
        optimizer = self._optimizer
        if isinstance(optimizer, Freezing) and optimizer.due():
            optimizer.freeze_now()
        if not optimizer.averaging:
            if optimizer.samples:
                squares = [self._square(gradient) for gradient in gradients]
                middle = (max(squares) + min(squares)) / 2
                optimizer.phase.rank_square = torch.tensor(middle, dtype=torch.float32)
            return self._before(gradients, step)
        for gradient in gradients:
            optimizer.phase.clear()  # that the rank before has entered it
            self._hand(gradient)
        return self._after(gradients, step)

    def _square(self, gradient: Tensor) -> float:
        """The squared norm of a rank's gradient, as an engine has it."""
        self._hand(gradient)
        self._momentum.take_averages()
        assert self._optimizer.phase.rank_square is not None
        return float(self._optimizer.phase.rank_square)

    def _hand(self, gradient: Tensor) -> None:
        """Hand over a rank's gradient, as an engine does; its momentum is added after a freeze."""
        self._momentum.begin(_Kept(), self._after.residuals)
        if self._momentum.take(self._every, gradient):
            self._momentum.release()

    def __exit__(self, *error: object) -> None:
        for each in (self._before, self._after):
            each.__exit__(*error)


_OPTIONS = {*options_.names()} - {"process_group", "ddp_kwargs"}


@dataclass
class Curve:
    """The result of a training."""

    losses: list[float] = field(default_factory=list)  # of every step, mean of the ranks
    sent: float = 0.0  # payload bytes of a rank in all steps
    final: float = float("nan")  # the loss that counts


def train(
    workload: Workload,
    average: Average | None,
    synchronized: Synchronized,
    seed: int,
    steps: int,
    ranks: Sequence[int],
) -> Curve:
    """Train a model, which the seed made, on the data of these ranks; returns the losses.

    average: called with their gradients in this order; None if the backward pass averages, or
    nothing does.
    """
    curve, model, optimizer = Curve(), synchronized.module, synchronized.optimizer
    parameters = list(model.parameters())
    gradients = [torch.empty(sum(p.numel() for p in parameters)) for _ in ranks if average]
    clip = math.inf if optimizer is not None and synchronized.clips else workload.training.clip
    optimizer = optimizer or workload.training.make(parameters)
    schedule = LinearLR(optimizer, 1.0, 0.0 if workload.decays else 1.0, steps)
    for step in range(steps):
        losses = []
        for number, rank in enumerate(ranks):
            model.zero_grad()
            loss = model(*workload.batch(seed, rank, step))
            loss.backward()
            losses.append(float(loss.item()))
            if average is not None:
                torch.cat([_flat(p) for p in parameters], out=gradients[number])
        if average is not None:
            curve.sent += average(gradients, step)
            _hand_out(gradients[0], parameters)
        if math.isfinite(clip):
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        schedule.step()
        synchronized.stepped()
        curve.losses.append(sum(losses) / len(ranks))
    curve.sent += synchronized.sent(steps)
    held_out = workload.held_out
    last = statistics.fmean(curve.losses[-FINAL:])
    curve.final = last if held_out is None else evaluate(model, held_out())
    return curve


def _flat(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.flatten()


def _hand_out(gradient: Tensor, parameters: Sequence[Tensor]) -> None:
    pieces = torch.split(gradient, [p.numel() for p in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(piece.view_as(parameter))


def evaluate(model: nn.Module, batches: Sequence[Batch]) -> float:
    """The mean loss on held-out batches."""
    with torch.inference_mode():
        return statistics.fmean(float(model(*batch).item()) for batch in batches)
