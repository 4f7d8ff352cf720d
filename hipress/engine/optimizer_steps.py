"""Optimizers whose step began and did not end.

A step that raises on one rank leaves its parameters unchanged or partly new. If the program goes on
after that, ranks would average gradients of different models, without an error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hipress.engine.scaling import set_unscaled, stepped_optimizers, watch_scalers
from hipress.errors import SyncError
from hipress.optim import Averaging
from hipress.optim.optimizer_kinds import holds

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
