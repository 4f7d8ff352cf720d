"""What an optimizer has in common with others whose momentum is averaged: see [Note: averages of
momentum]."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from hipress import compat
from hipress.errors import ConfigError, SyncError
from hipress.shards import local

CHANGED = 1e-3  # relative: what unscaling rounds is less


class Averaging(Optimizer):
    """A mixin before an optimizer of torch's. What ranks average, if they do, enters the gradients
    by `enter`; `step` then finds the new momentum in `.grad`."""

    #: the key of a parameter's momentum in its state
    BUFFER: ClassVar[str]

    max_norm: float | None = None
    scaler: GradScaler | None = None
    #: what averages by this optimizer, if anything does: told of parameters whose averages were
    #: of no use, as nobody used them or one is not finite
    told: Callable[[Collection[Tensor]], None] | None = None
    #: by parameter whose `.grad` is to be the averaged momentum: what its buffer was weighed by
    _entered: dict[Tensor, float]
    #: by such a parameter, the last element of that average, as it was scaled, once it is there
    _marks: dict[Tensor, Tensor]
    _scaled = 1.0  # by what, in that step

    def _begin(self, max_norm: float | None, scaler: GradScaler | None) -> None:
        """To be called once torch's own constructor is done."""
        if max_norm is not None and not 0 < max_norm < float("inf"):
            raise ConfigError(f"max_norm is a finite positive number, or None, not {max_norm!r}")
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise ConfigError(f"scaler is a torch.amp.GradScaler, not a {type(scaler).__name__}")
        self.max_norm, self.scaler = max_norm, scaler
        self._entered, self._marks = {}, {}

    @property
    def averages(self) -> bool:
        """Whether ranks are to average the momentum at any time."""
        return True

    @property
    def averaging(self) -> bool:
        """Whether the momentum is to be averaged in the step that begins, and not the gradient."""
        return True

    @property
    def facts(self) -> dict[str, Any]:
        """What all ranks must have in common, as JSON takes it."""
        return {"optimizer": type(self).__name__, "max_norm": self.max_norm}

    def weight(self, group: Mapping[str, Any]) -> float:
        """A rank contributes its gradient and so many times the buffer."""
        raise NotImplementedError

    @property
    def scale(self) -> float:
        """Of gradients before they are unscaled."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def groups(self) -> dict[Tensor, dict[str, Any]]:
        """By parameter, its group."""
        return {p: group for group in self.param_groups for p in group["params"]}

    def buffer(self, parameter: Tensor) -> Tensor | None:
        """A parameter's momentum, what this rank has of it; None before its first step."""
        found = self.state.get(parameter, {}).get(self.BUFFER)
        return None if found is None else local(found)

    def enter(self, parameter: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, float] | None:
        """A tensor, and how many times to add it to a rank's gradient, as that is scaled, which is
        its share of the new momentum then; None for nothing. SyncError where the last average was
        not used."""
        if parameter in self._entered:
            raise SyncError(
                "the momentum has been averaged, and no optimizer.step() came after it: run all "
                "backward passes of a step but the last within no_sync(), and leave a step out by "
                "optimizer.zero_grad()"
            )
        weight, held = self.weight(group), self.buffer(parameter)
        self._entered[parameter], self._scaled = weight, self.scale
        return None if held is None else (held, weight * self._scaled)

    def arrived(self, marks: Mapping[Tensor, Tensor]) -> None:
        """The averages are there, and their last elements are these. Where one is not finite, a
        GradScaler leaves the step out."""
        self._marks.update({p: mark for p, mark in marks.items() if p in self._entered})
        values = [*marks.values()] if self.scaler is not None else []
        if values and not torch.stack(values).isfinite().all():
            self._drop(self._entered)

    def forget(self) -> None:
        """No average is there that a step might use."""
        self._entered.clear()
        self._marks.clear()

    def _drop(self, parameters: Collection[Tensor]) -> None:
        """Averages that no step will use."""
        dropped = list(parameters)
        if self.told is not None and dropped:
            self.told(dropped)
        for parameter in dropped:
            self._entered.pop(parameter, None)
            self._marks.pop(parameter, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self.forget()
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's; by what was averaged."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._check()
            self._clip()
            self._advance()
        for parameter in self._used():
            self._entered.pop(parameter, None)
            self._marks.pop(parameter, None)
        self._drop([p for p in self.groups() if p in self._entered])
        return loss

    def _advance(self) -> None:
        """A step of torch's, of gradients: of each average what the momentum had in it is taken
        away."""
        for parameter in self._used():
            weight, held = self._entered.get(parameter), self.buffer(parameter)
            if weight is not None and held is not None:
                local(parameter.grad).sub_(held, alpha=weight)  # type: ignore[arg-type]
        self._plain()

    def __getstate__(self) -> dict[str, Any]:
        """As torch's, which keeps nothing of a subclass."""
        state: dict[str, Any] = super().__getstate__()
        return state | {"max_norm": self.max_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's."""
        super().__setstate__(state)
        self._entered, self._marks = {}, {}

    def _plain(self) -> None:
        compat.unhooked_step(super().step)()

    def _used(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _clip(self) -> None:
        """What no ranks clipped before they averaged it."""
        if self.max_norm is not None:
            clip_grad_norm_([p for p in self._used() if p not in self._entered], self.max_norm)

    def _check(self) -> None:
        """Raise SyncError where a gradient is not what was averaged."""
        used = [p for p in self._used() if p in self._marks]
        if not used:
            return
        found = torch.stack([last(p.grad)[0].float() for p in used])  # type: ignore[arg-type]
        wanted = torch.stack([self._marks[p].float() for p in used]) / self._scaled
        if not torch.allclose(found, wanted, CHANGED, 0.0, equal_nan=True):
            name = type(self).__name__
            raise SyncError(
                f"hipress.optim.{name}: a .grad was changed between the average and step(), but "
                "it holds the averaged momentum, no gradient. Instead of clip_grad_norm_ pass "
                f"max_norm= to {name}, which clips each rank's gradient before it enters the "
                "average; where a GradScaler unscales, pass it as scaler="
            )


def last(tensor: Tensor) -> Tensor:
    """What lies last in memory of a dense tensor: float [1]."""
    held = local(tensor)
    return held.as_strided((1,), (1,), held.storage_offset() + held.numel() - 1)
