"""Optimizers that average the momentum from the first step on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, ParamsT

from hipress.errors import ConfigError
from hipress.optim.averaging import Averaging


class SGD(Averaging, torch.optim.SGD):
    """torch.optim.SGD with momentum, which ranks average instead of gradients."""

    BUFFER = "momentum_buffer"

    def _check_groups(self) -> None:
        for group in self.param_groups:
            if not group["momentum"] or group["dampening"] == 1:
                raise ConfigError(
                    "momentum=0: there is no momentum to average; use torch.optim.SGD"
                )

    def weight(self, group: Mapping[str, Any]) -> float:
        """Implements Averaging.weight: a step is the new buffer, momentum b + (1 - dampening) g;
        Nesterov's is g + momentum (momentum b + g)."""
        sign = -1.0 if group["maximize"] else 1.0
        momentum = float(group["momentum"])
        if group["nesterov"]:
            return sign * momentum**2 / (1.0 + momentum)
        return sign * momentum / (1.0 - float(group["dampening"]))


class _Lion(Optimizer):
    """Lion (Chen et al. 2023), with the interface of torch's optimizers."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"lr={lr} and weight_decay={weight_decay} are at least 0")
        if not (0 <= betas[0] < 1 and 0 < betas[1] < 1):
            raise ValueError(f"betas are between 0 and 1, not {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """p -= lr (sign(b1 m + (1 - b1) g) + weight_decay p); m = b2 m + (1 - b2) g."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            if used:
                self._step(group, used)
        return loss

    def _step(self, group: Mapping[str, Any], params: list[Tensor]) -> None:
        (b1, b2), lr = group["betas"], float(group["lr"])
        for parameter in params:
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
        moments = [self.state[p]["exp_avg"] for p in params]
        gradients = [p.grad for p in params if p.grad is not None]
        signs = _mix(moments, gradients, b1)
        torch._foreach_sign_(signs)
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, signs, alpha=-lr)
        torch._foreach_copy_(moments, _mix(moments, gradients, b2))


def _mix(moments: list[Tensor], gradients: list[Tensor], b: float) -> list[Tensor]:
    """b m + (1 - b) g, each operation rounded by itself: see hipress/model/rounding.py."""
    shares = torch._foreach_mul(moments, b)
    torch._foreach_add_(shares, torch._foreach_mul(gradients, 1 - b))
    return list(shares)


class Lion(Averaging, _Lion):
    """Lion (Chen et al. 2023), with momentum that ranks average before its sign is taken."""

    BUFFER = "exp_avg"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        max_norm: float | None = None,
        rank_norm: float | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        """Arguments as published; the norms and scaler: see AdamW."""
        norms = {"max_norm": max_norm, "rank_norm": rank_norm}
        super().__init__(params, lr, betas, weight_decay, **norms, scaler=scaler)

    def weight(self, group: Mapping[str, Any]) -> float:
        """Implements Averaging.weight: a step is the sign of b1 m + (1 - b1) g."""
        b1 = float(group["betas"][0])
        return b1 / (1.0 - b1)


class Muon(Averaging, torch.optim.Muon):
    """torch.optim.Muon with momentum that ranks average before it is orthogonalized."""

    BUFFER = "momentum_buffer"

    def _check_groups(self) -> None:
        if not all(0 < group["momentum"] < 1 for group in self.param_groups):
            raise ConfigError("ranks average the momentum, so it must be above 0 and below 1")

    def weight(self, group: Mapping[str, Any]) -> float:
        """Implements Averaging.weight: a step orthogonalizes the new buffer, momentum b + (1 -
        momentum) g; Nesterov's (1 - momentum) g + momentum times the new buffer."""
        momentum = float(group["momentum"])
        share = momentum**2 if group["nesterov"] else momentum
        return share / (1.0 - share)
