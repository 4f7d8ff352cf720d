"""Base of optimizers whose momentum is averaged: see [Note: averages of momentum]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from hipress import compat
from hipress.errors import ConfigError, SyncError
from hipress.model.rounding import add_product
from hipress.model.shards import local
from hipress.optim.phase import Phase


class Averaging(Optimizer):
    """A mixin before an optimizer of torch. `enter` adds the momentum to gradients before they are
    averaged; `step` then finds the new momentum in `.grad`."""

    #: key of a parameter's momentum in its state
    BUFFER: ClassVar[str]

    max_norm: float | None = None
    #: of each rank's gradient where momentum is averaged; None without max_norm
    rank_norm: float | None = None
    scaler: GradScaler | None = None
    phase: Phase

    def __init__(
        self,
        params: ParamsT,
        *args: Any,
        max_norm: float | None = None,
        rank_norm: float | None = None,
        scaler: GradScaler | None = None,
        **kwargs: Any,
    ) -> None:
        """Arguments of torch's optimizer, and three more: see AdamW. Raises ConfigError."""
        super().__init__(params, *args, **kwargs)
        for name, norm in (("max_norm", max_norm), ("rank_norm", rank_norm)):
            if norm is not None and not 0 < norm < float("inf"):
                raise ConfigError(f"{name} is a finite positive number, or None, not {norm!r}")
        if rank_norm is not None and max_norm is None:
            raise ConfigError("rank_norm goes with max_norm, the norm of the average: pass both")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ConfigError(f"scaler is a torch.amp.GradScaler, not a {type(scaler).__name__}")
        self.max_norm, self.rank_norm, self.scaler = max_norm, rank_norm or max_norm, scaler
        self.phase = Phase(scaled=scaler is not None)
        self._check_groups()

    def _check_groups(self) -> None:
        """Raise ConfigError for groups without a momentum that ranks could average."""

    @property
    def averages(self) -> bool:
        """True if ranks average the momentum at any time."""
        return True

    @property
    def averaging(self) -> bool:
        """True if the next step averages the momentum instead of the gradient."""
        return self.phase.momentum

    @property
    def samples(self) -> bool:
        """True if the norm of this rank's next gradient is wanted, as `phase.rank_square`."""
        return False

    @property
    def facts(self) -> dict[str, Any]:
        """Values in which all ranks must agree, for JSON."""
        norms = {"max_norm": self.max_norm, "rank_norm": self.rank_norm}
        return {"optimizer": type(self).__name__, **norms}

    def weight(self, group: Mapping[str, Any]) -> float:
        """Factor of the buffer in a rank's contribution, beside its gradient."""
        raise NotImplementedError

    @property
    def scale(self) -> float:
        """Scale of gradients before they are unscaled."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def groups(self) -> dict[Tensor, dict[str, Any]]:
        """Group of each parameter."""
        return {p: group for group in self.param_groups for p in group["params"]}

    def buffer(self, parameter: Tensor) -> Tensor | None:
        """This rank's part of a parameter's momentum; None before its first step."""
        whole = self.state.get(parameter, {}).get(self.BUFFER)
        return None if whole is None else local(whole)

    def enter(self, parameter: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, float] | None:
        """Begin the average of a parameter's momentum.

        Returns a tensor and its factor, for the sum with the rank's gradient that is its share of
        the new momentum; None if there is nothing to add. Raises SyncError if the last average was
        not used.
        """
        weight, buffer = self.weight(group), self.buffer(parameter)
        self.phase.enter(parameter, weight, self.scale)
        return None if buffer is None else (buffer, weight)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Same as torch's; forgets averages."""
        self.phase.clear()
        super().zero_grad(set_to_none)

    @compat.untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Same as torch's, with the averages."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._refuse_changes()
            self._clip()
            self._advance()
        self.phase.use(self._used())
        return loss

    def _advance(self) -> None:
        """A step of torch's by gradients: subtract the momentum's share from each average."""
        for parameter in self._used():
            weight, buffer = self.phase.weight(parameter), self.buffer(parameter)
            if weight is not None and buffer is not None:
                add_product(local(parameter.grad), buffer, -weight)  # type: ignore[arg-type]
        self._plain()

    def __getstate__(self) -> dict[str, Any]:
        """Same as torch's, which keeps nothing of a subclass."""
        state: dict[str, Any] = super().__getstate__()
        return state | {"max_norm": self.max_norm, "rank_norm": self.rank_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Same as torch's."""
        super().__setstate__(state)
        self.phase = self.__dict__.get("phase", Phase())  # a copy has none
        self.phase.clear()

    def _plain(self) -> None:
        compat.unhooked_step(super().step)()

    def _used(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _clip(self) -> Tensor | None:
        """Clip gradients that ranks did not clip before the average; returns their norm before, if
        max_norm is given."""
        if self.max_norm is None:
            return None
        plain = [p for p in self._used() if self.phase.weight(p) is None]
        return clip_grad_norm_(plain, self.max_norm)

    def _refuse_changes(self) -> None:
        """Raise SyncError if a gradient differs from its average."""
        if not self.phase.unchanged({p: local(p.grad) for p in self._used()}):  # type: ignore[arg-type]
            name = type(self).__name__
            raise SyncError(
                f"hipress.optim.{name}: a .grad was changed between the average and step(), but "
                "it holds the averaged momentum, no gradient. Instead of clip_grad_norm_ pass "
                f"max_norm= to {name}, which clips each rank's gradient before it enters the "
                "average; where a GradScaler unscales, pass it as scaler="
            )
