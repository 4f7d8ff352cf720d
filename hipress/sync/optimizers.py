"""Optimizers whose step began and did not end.

A step that raises on one rank leaves its parameters unchanged or partly new. If the program goes on
after that, ranks would average gradients of different models, without an error.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hipress.sync.scaling import steps_alone, watch_scalers

#: a mapping, since other threads may add to it while one reads `keyrefs`
_begun: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()


@functools.cache
def watch_steps() -> None:
    """From now on, track the optimizers whose step has begun and not ended, and their scalers."""
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)
    watch_scalers()


def take_failed(parameters: Iterable[torch.Tensor]) -> Optimizer | None:
    """An optimizer of some of these parameters whose step raised, or None; reported only once."""
    for reference in _begun.keyrefs():
        optimizer, known = reference(), set(map(id, parameters))
        if optimizer is None:
            continue
        if any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            _begun.pop(optimizer, None)
            return optimizer
    return None


def _begin(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if torch.compiler.is_compiling():  # in a compiled step the closure is not visible
        return None
    _begun[optimizer] = None
    steps_alone(optimizer)
    own = (args[0], *(_closure(optimizer, each) for each in args[1:]))
    return own, {name: _closure(optimizer, each) for name, each in kwargs.items()}


def _end(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        _begun.pop(optimizer, None)


def _closure(optimizer: Optimizer, given: Any) -> Any:
    """A closure that recomputes gradients within a step; while it runs, the step has not failed."""
    if not callable(given):
        return given

    def closure(*args: Any, **kwargs: Any) -> Any:
        _begun.pop(optimizer, None)
        try:
            return given(*args, **kwargs)
        finally:
            _begun[optimizer] = None

    return closure
