"""Steps of an optimizer, a few parameters at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hipress import optim as hipress_optim
from hipress.errors import ConfigError, SyncError

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
