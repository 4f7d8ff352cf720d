"""Synchronizer: compressed gradient synchronization of a plain module, without DDP."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hipress import compat, registry
from hipress import optim as hipress_optim
from hipress.arguments import Arguments, group_of, with_arguments
from hipress.engine.engine import Engine
from hipress.engine.steps import Steps
from hipress.errors import ConfigError, SyncError
from hipress.model import shards
from hipress.model.params import describe_gradients, frozen_tensors, trainable
from hipress.model.torch_modes import without_inference_mode
from hipress.optim import Averaging
from hipress.ranks import coordinator as coordinators
from hipress.ranks.groups import connect, share
from hipress.session import prepare, tell_plan
from hipress.ways.plain import (
    broadcast_values,
    plain_module,
    refuse_detached,
    snapshot,
    warn_of_whole,
)

#: optimizers that treat every parameter by itself: a step in pieces has the same bits
BY_PARAMETER = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(hipress_optim.SGD, hipress_optim.Adam, hipress_optim.AdamW, hipress_optim.Lion),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
)


class Stepper:
    """Steps an optimizer for some of its parameters at a time, by its own `step` with groups of
    only these. So state, schedulers and implementation (foreach, fused) are the optimizer's own."""

    def __init__(self, optimizer: Optimizer, parameters: Collection[torch.Tensor]) -> None:
        """Raises ConfigError for an optimizer whose step cannot come in pieces."""
        if type(optimizer) not in BY_PARAMETER:
            known = ", ".join(kind.__name__ for kind in BY_PARAMETER)
            raise ConfigError(
                f"optimizer={type(optimizer).__name__}: its step may need all gradients at once, "
                f"so it cannot come parameter by parameter as that of {known}; leave optimizer out "
                "and call its step() after sync.step()"
            )
        own = {p for group in optimizer.param_groups for p in group["params"]}
        if foreign := len(own - set(parameters)):
            raise ConfigError(f"the optimizer holds {foreign} parameters that the model has not")
        self._optimizer = optimizer
        self._stepping = False
        self._stepped: set[torch.Tensor] = set()

    def guard(self) -> RemovableHandle:
        """Refuse the optimizer's own step from now on, by a hook."""
        return self._optimizer.register_step_pre_hook(self._refuse_outside)

    def step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Step these parameters if the optimizer holds them; those without gradients stay."""
        chosen = set(parameters) - self._stepped
        self._stepped |= chosen
        self._step([[p for p in g["params"] if p in chosen] for g in self._groups])

    def finish(self) -> None:
        """Step the optimizer's remaining parameters, which are not synchronized."""
        self._step([[p for p in g["params"] if p not in self._stepped] for g in self._groups])
        self._stepped.clear()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def _step(self, chosen: Sequence[list[torch.Tensor]]) -> None:
        if not any(chosen):
            return
        groups = self._groups
        self._optimizer.param_groups = [
            {**group, "params": params} for group, params in zip(groups, chosen, strict=True)
        ]
        self._stepping = True
        try:
            self._optimizer.step()
        finally:
            self._stepping = False
            self._optimizer.param_groups = groups

    def _refuse_outside(self, optimizer: Optimizer, *_: Any) -> None:
        # torch.distributed.checkpoint makes an optimizer's first state by a step with rates of 0
        first = not optimizer.state and not any(group["lr"] for group in self._groups)
        if not self._stepping and not first:
            raise SyncError(
                "sync.step() takes the steps of this optimizer, given as optimizer=: call no "
                "optimizer.step(), and leave optimizer= out with GradScaler or gradient clipping, "
                "which need all averages before the step"
            )


class Synchronizer:
    """Averages the gradients of a module over the ranks, compressed, without DDP.

    ::

        sync = hipress.Synchronizer(model, "onebit_group")
        loss = criterion(model(x), y)
        loss.backward()          # gradients start to travel as they are computed
        sync.step()              # now every .grad is the average, the same bits on all ranks
        optimizer.step()

    Large gradients are encoded from `.grad`, and averages decoded into it, without a copy;
    gradients below 1 MiB are gathered. Keep a reference to it: without one it synchronizes nothing.

    Construction broadcasts parameters and buffers from rank 0. Later it leaves buffers alone:
    unlike with DDP, each rank's BatchNorm keeps the statistics of its own data.

    `hipress.state_dict`, `load_state_dict`, `report` and `detach` take it like a module that `wrap`
    returned; states of either fit the other.
    """

    @with_arguments.method
    @without_inference_mode()
    def __init__(self, arguments: Arguments) -> None:
        """Arguments and errors as for `wrap`, except `ddp_kwargs`.

        model: a module on the CPU or a GPU, before or after torch.compile; not a
        DistributedDataParallel, nor a module that shares parameters with another Synchronizer. If
        fully_shard or tensor parallelism shards the model, shards are averaged: `process_group`
        must then hold the ranks that have the same shard.

        optimizer, unless it is a name: steps parameters as their averages arrive, while others
        still travel, with the same bits as its step() after sync.step(). It must treat every
        parameter by itself, as SGD, Adam and AdamW do. Its own step() is then refused, and with it
        GradScaler and gradient clipping, which need all averages first.
        """
        group = group_of(arguments.process_group)
        with coordinators.failures_told(group):
            why = "it makes no DistributedDataParallel"
            options = arguments.checked_options("Synchronizer", group, ddp_kwargs=why)
            # see [Note: captured plans] in tuner.py
            options = replace(options, capture=options.capture is True)
            model = plain_module(arguments.model, self)
            shards.reshard(model)
            shards.refuse_others(model, dist.get_process_group_ranks(group), dist.get_rank())
            self._stepper = _stepper(arguments.optimizer, model)
            facts = {
                "called": "hipress.Synchronizer",
                "optimizer": type(arguments.optimizer).__name__,
                "frozen parameters and buffers": frozen_tensors(model),
                "shards": shards.places(model),
                **arguments.optimizer_facts(),
            }
        self.module = arguments.model
        self._session = prepare(
            model, options, group, facts, describe_gradients, optimizer=arguments.averaging
        )
        named = dict(trainable(model))
        parameters = [named[param.name] for param in self._session.params]
        self._snapshot = snapshot(self, self._session, model, parameters)
        self._steps: Steps | None = None
        engine: Engine | None = None
        hooks: list[RemovableHandle] = []
        if self._session.world_size > 1:
            with self._session.coordinator.failures_told():
                self._steps, engine = self._connect(model, parameters)
            hooks += _hooks(self._steps)
        if self._stepper is not None:
            hooks.append(self._stepper.guard())
        self._session.start(self, engine, partial(_release, hooks, self._steps))
        registry.put(self, self._session)
        tell_plan(self._session)
        if self._session.rank == 0:
            warn_of_whole(model)

    def _connect(
        self, model: nn.Module, parameters: Sequence[nn.Parameter]
    ) -> tuple[Steps, Engine]:
        session = self._session
        own = connect(session.coordinator, "steps")
        share(broadcast_values(model), own, session.coordinator)
        # Ranks send at different moments, so messages must not mix with the user's collectives.
        native = connect(session.coordinator, "uncompressed")
        engine = session.make_engine(native, parameters, skips=True)
        arrived = None if self._stepper is None else self._stepper.step
        return Steps(engine, parameters, own, arrived), engine

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the context, backward passes only add to `.grad` and send nothing: for all
        micro-batches of a step but the last."""
        with self._steps.paused() if self._steps is not None else nullcontext():
            yield

    @compat.untraced
    @without_inference_mode()
    def step(self) -> None:
        """End the step: when this returns, every `.grad` is the average over the ranks.

        Every rank must call it once a step, also a rank without data. A parameter without a
        gradient on this rank counts as zeros; if no rank has used it, its `.grad` stays None and
        its state unchanged.

        Raises the first failure, which names rank, peer and task (RankLost, AgreementTimeout or
        SyncError); after a failure every further step raises SyncError.
        """
        refuse_detached(self, self._session)
        with nullcontext() if self._steps is None else self._steps.failing("sync.step()"):
            self._snapshot.refuse_changes(compat.uncompiled(self.module))
        if self._steps is not None:
            self._steps.finish()
        if self._stepper is not None:
            self._stepper.finish()


def _stepper(optimizer: Optimizer | str | None, model: nn.Module) -> Stepper | None:
    if isinstance(optimizer, str | None):  # a name informs "auto", and steps nothing
        return None
    if isinstance(optimizer, Averaging) and (optimizer.max_norm or optimizer.scaler):
        return None  # these need all averages before a step
    return Stepper(optimizer, set(model.parameters()))


def _hooks(steps: Steps) -> list[RemovableHandle]:
    """Hooks of the parameters; they hold no reference that keeps the Synchronizer alive."""
    ready = weakref.WeakMethod(steps.ready)

    @compat.untraced
    def hook(index: int, parameter: torch.Tensor) -> None:
        method = ready()
        if method is not None:
            method(index)

    return [
        parameter.register_post_accumulate_grad_hook(partial(hook, index))  # type: ignore[no-untyped-call]
        for index, parameter in enumerate(steps.parameters)
    ]


def _release(hooks: Iterable[RemovableHandle], steps: Steps | None) -> None:
    for hook in hooks:
        hook.remove()
    if steps is not None:
        steps.show()
