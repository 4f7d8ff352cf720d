"""Undelivered gradients where nothing is compressed: see [Note: undelivered gradient].

A session has no engine if there is one rank, or if DDP's own all-reduce remains. What a loaded
state has not delivered then enters each parameter's next gradient, before any average.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from hipress import compat
from hipress.engine.residuals import in_shape
from hipress.engine.scaling import Scale, watch_scalers
from hipress.model.params import Param
from hipress.model.shards import local

__all__ = ["LoadedGradients"]


class LoadedGradients:
    """Gradients that wait for the parameters' next ones."""

    def __init__(
        self,
        undelivered: Mapping[int, torch.Tensor],
        params: Sequence[Param],
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """undelivered: flat float32 in bucket order, by the parameter's index."""
        watch_scalers()
        self.undelivered = dict(undelivered)
        self._params, self._parameters, self._scale = params, parameters, Scale()
        self._hooks: dict[int, RemovableHandle] = {
            index: parameters[index].register_post_accumulate_grad_hook(partial(self._add, index))  # type: ignore[no-untyped-call]
            for index, values in self.undelivered.items()
            if values.any()
        }

    @compat.untraced
    def _add(self, index: int, parameter: torch.Tensor) -> None:
        """Add what waits for a parameter to its `.grad`, once, and not to NaN or infinity, as a
        GradScaler leaves such a step out."""
        gradient = local(parameter.grad)  # type: ignore[arg-type] # the hook follows a gradient
        if not torch.linalg.vector_norm(gradient, torch.inf).isfinite():
            return
        values = in_shape(self.undelivered.pop(index), self._params[index])
        gradient.add_(values.to(gradient.device), alpha=self._scale.now(self._parameters))
        self._hooks.pop(index).remove()

    def close(self) -> None:
        """Remove the hooks; what waits stays in `undelivered`."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
