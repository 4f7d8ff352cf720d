"""The scale of gradients: see [Note: scale].

[Note: scale] Under a GradScaler gradients are multiplied by a scale that changes during training,
until the scaler's `step` divides by it. But states of codecs last from step to step, and some
codecs decode to values of a size of their own, such as signs. So an engine divides gradients by
their scale, and multiplies the averages by it: codecs, momentum and policies see what they would
see without a scaler. That is two passes over the gradients, and exact, as scales are powers of two.

torch has no hooks of a GradScaler, so its methods are wrapped, and record the scaler of an
optimizer: it is known from the first step on. In that step the latest scaler that scaled a loss
counts. Gradients that are scaled by other means keep their scale.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.futures import Future
from torch.optim import Optimizer

from hipress import compat
from hipress.channel.futures import map_future
from hipress.optim.optimizer_kinds import holds

__all__ = [
    "Scale",
    "scale_back",
    "set_scaler",
    "set_unscaled",
    "stepped_optimizers",
    "unscaled",
    "watch_scalers",
]

#: scaler of each optimizer that has stepped; None: it steps without
_SCALERS: weakref.WeakKeyDictionary[Optimizer, weakref.ref[GradScaler] | None]
_SCALERS = weakref.WeakKeyDictionary()
_latest: weakref.ref[GradScaler] | None = None  # the scaler that was used last


@functools.cache
def watch_scalers() -> None:
    """From now on, record the scaler of each optimizer that a GradScaler unscales or steps."""
    for name in ("scale", "unscale_", "step"):
        setattr(GradScaler, name, _recording(getattr(GradScaler, name)))


def _recording(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def record(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        global _latest
        if scaler.is_enabled():
            _latest = weakref.ref(scaler)
            for argument in (*args, *kwargs.values()):
                if isinstance(argument, Optimizer):
                    set_scaler(scaler, argument)
        return method(scaler, *args, **kwargs)

    return record


def set_scaler(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Record that the scaler unscales the gradients of this optimizer."""
    _SCALERS[optimizer] = weakref.ref(scaler)


def set_unscaled(optimizer: Optimizer) -> None:
    """Record that an optimizer that steps has no scaler, unless one is known."""
    _SCALERS.setdefault(optimizer, None)


def stepped_optimizers() -> list[Optimizer]:
    """The optimizers that have stepped."""
    return [one for each in _SCALERS.keyrefs() if (one := each()) is not None]


class Scale:
    """The scale of a module's gradients."""

    def __init__(self) -> None:
        self._optimizer: Callable[[], Optimizer | None] = lambda: None  # the module's, if scaled

    def now(self, parameters: Collection[torch.Tensor]) -> float:
        """The scale of these parameters' gradients, of the backward pass that runs or has ended."""
        if _latest is None or not parameters:
            return 1.0
        optimizer = self._optimizer() or _optimizer_of(parameters)
        reference = _latest if optimizer is None else _SCALERS[optimizer]
        if reference is None:
            return 1.0
        scaler = reference() or _latest()
        if optimizer is not None:
            self._optimizer = weakref.ref(optimizer)
            if scaler is not None and compat.has_unscaled(scaler, optimizer):
                return 1.0
        return 1.0 if scaler is None else float(scaler.get_scale())


def _optimizer_of(parameters: Collection[torch.Tensor]) -> Optimizer | None:
    """An optimizer that has stepped some of these parameters; one with a scaler, if there is."""
    known, last = set(map(id, parameters)), None
    for optimizer in stepped_optimizers():
        if holds(optimizer, known):
            last = optimizer
            if _SCALERS[optimizer] is not None:
                break
    return last


def unscaled(scale: float, buffer: torch.Tensor) -> torch.Tensor:
    """A flat bucket divided by its scale, in place; float16, which is scaled for its range, as a
    float32 copy."""
    values = buffer.float() if buffer.dtype == torch.float16 else buffer
    return values.div_(scale)


def scale_back(
    scale: float, average: Future[torch.Tensor], used: Future[torch.Tensor], buffer: torch.Tensor
) -> Future[torch.Tensor]:
    """The future of the bucket with this average of its unscaled values. used: a new one."""

    def multiply(values: torch.Tensor) -> torch.Tensor:
        values.mul_(scale)
        return buffer if values is buffer else buffer.copy_(values)

    return map_future(average, multiply, used)
