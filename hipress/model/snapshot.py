"""The parameters of a model at the time of `wrap` or `attach`, and checks for later changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hipress import compat
from hipress.errors import SyncError
from hipress.model.params import Param
from hipress.model.shards import is_sharded

#: calls that leave a parameter's name and replace the object
_REPLACING = "load_state_dict(assign=True), a parametrization or a new layer"


class Snapshot:
    """Parameters known by identity, since torch.nn.utils.prune, or a module around a layer, renames
    them. It holds no reference to the module."""

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[Param],
        parameters: Sequence[nn.Parameter],
        rank: int,
        again: str,
        *,
        hooked: bool = False,
    ) -> None:
        """Record the parameters of a model.

        parameters: the synchronized ones, which `params` describes. rank: this rank's number in the
        job. again: advice on having other parameters synchronized. hooked: True if gradients come
        by hooks of autograd's nodes, as with DDP.
        """
        self._params, self._parameters = params, parameters
        self._rank, self._again = rank, again
        ignored = compat.names_ignored_by_ddp(model)
        named = dict(model.named_parameters())
        self._frozen = {
            p for n, p in named.items() if not (p.requires_grad or {n, f".{n}"} & ignored)
        }
        self._known = {*named.values()} - self._frozen
        self._sharded = {name for name, p in named.items() if is_sharded(p)}
        self._kinds = [(each.dtype, each.device, each.shape) for each in parameters]
        self._nodes = [_node(parameter) for parameter in parameters] if hooked else []

    def refuse_changes(self, model: nn.Module) -> None:
        """Raise SyncError for a trained parameter that is new, converted, moved or resized."""
        for parameter in compat.parameters_of(model):
            # weights computed from parameters (torch.func.functional_call) are no leaves
            if parameter.requires_grad and parameter.is_leaf and parameter not in self._known:
                self._refuse_new(model)
                break
        for param, parameter, kind in zip(self._params, self._parameters, self._kinds, strict=True):
            now = parameter.dtype, parameter.device, parameter.shape
            if now != kind:
                raise SyncError(
                    f"rank {self._rank}: {param.name!r} was {_text(*kind)} when hipress took the "
                    f"model, and is {_text(*now)} now. Convert, move and resize a "
                    f"model before that. {self._again}"
                )

    def refuse_unhooked(self, *, every: bool) -> None:
        """Raise SyncError for a parameter that autograd accumulates by another node than DDP took.

        After `.cpu()` and `.cuda()`, for example, DDP no longer sees its gradient.
        every: check all parameters (5 µs each), not only the first.
        """
        for param, parameter, node in zip(self._params, self._parameters, self._nodes, strict=True):
            if parameter.requires_grad and _node(parameter) is not node:
                raise SyncError(
                    f"rank {self._rank}: {param.name!r} was converted or moved, and maybe back, "
                    "after hipress took the model (`.to(...)`, `.half()`, `.cpu()`): DDP no longer "
                    f"averages its gradient, and ranks would drift apart. {self._again}"
                )
            if not every:
                return

    def refuse_frozen(self) -> None:
        """Raise SyncError for a parameter that was frozen since: DDP waits for its gradient."""
        for param, parameter in zip(self._params, self._parameters, strict=True):
            if not parameter.requires_grad:
                raise SyncError(
                    f"rank {self._rank}: {param.name!r} was frozen after hipress took the model, "
                    f"and DDP still waits for its gradient. {self._again}"
                )

    def _refuse_new(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            # a parameter gathered by FSDP2 is another object than its shard
            gathered = name in self._sharded and not is_sharded(parameter)
            trains = parameter.requires_grad and parameter.is_leaf
            if not trains or parameter in self._known or gathered:
                continue
            was = (
                "was frozen when hipress took the model"
                if parameter in self._frozen
                else f"was not there when hipress took the model ({_REPLACING} makes another one)"
            )
            raise SyncError(
                f"rank {self._rank}: {name!r} {was}, so its gradient is not averaged and ranks "
                f"would drift apart. {self._again}"
            )


def _text(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> str:
    """Text such as `float32 20x33 on cpu`."""
    sizes = "x".join(map(str, shape)) or "scalar"
    return f"{str(dtype).removeprefix('torch.')} {sizes} on {device}"


def _node(parameter: torch.Tensor) -> Any:
    """The autograd node that accumulates the parameter's gradient; None if it needs no gradient."""
    with torch.enable_grad():
        function: Any = parameter.view_as(parameter).grad_fn
    return function and function.next_functions[0][0]
