"""Gradients that may be on their way.

[Note: awaited] From its backward pass to the end of the step a gradient's memory is the engine's,
or its values have been copied. A change then would be lost, or hold for some elements. autograd
counts writes, but not those through `.data`, `.detach()` and `.numpy()`. So `.grad` is an Awaited
then, with which nothing can be done: every use raises an error at its line. It takes 5 µs for a
gradient. Memory known by another name (a flat buffer of all gradients) can still be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hipress.errors import SyncError
from hipress.model.shards import is_sharded

__all__ = ["Awaited", "change_error", "hide"]

_ADVICE = (
    "between its backward pass and sync.step(), when it may be on its way already. Clip, unscale, "
    "read and zero gradients after sync.step(), and take no steps of an optimizer in hooks: "
    "optimizer= takes them as averages arrive. To change what is averaged, run all backward passes "
    "within `with sync.no_sync():`, or register hooks of parameters before the Synchronizer is made"
)


class Awaited(torch.Tensor):
    """A gradient that nothing may use."""

    owner: tuple[int, str]  # number of this rank, name of the parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise SyncError, whatever the function."""
        rank, name = next(_owners((args, kwargs or {})))
        raise SyncError(f"rank {rank}: the gradient of {name!r} was used {_ADVICE}")

    def __getattr__(self, name: str) -> Any:
        """Raise SyncError for members of other kinds of gradients, such as a DTensor's."""
        rank, parameter = vars(self)["owner"]
        raise SyncError(f"rank {rank}: the gradient of {parameter!r} was used {_ADVICE}")


def hide(parameter: torch.Tensor, gradient: torch.Tensor, owner: tuple[int, str]) -> None:
    """Let no one use a parameter's gradient. owner: see Awaited."""
    if is_sharded(gradient):  # only the shape counts
        one = torch.empty((), dtype=gradient.dtype, device=gradient.device)
        gradient = one.expand(gradient.shape)
    awaited = torch.Tensor._make_subclass(Awaited, gradient)
    awaited.owner = owner
    parameter.grad = awaited


def change_error(rank: int, name: str) -> SyncError:
    """The error for a gradient of this parameter that was written to or replaced."""
    return SyncError(f"rank {rank}: the gradient of {name!r} was changed {_ADVICE}")


def _owners(arguments: Any) -> Iterator[tuple[int, str]]:
    """Owners of the awaited gradients in arguments."""
    if isinstance(arguments, Awaited):
        yield vars(arguments)["owner"]
    elif isinstance(arguments, list | tuple):
        for each in arguments:
            yield from _owners(each)
    elif isinstance(arguments, dict):
        yield from _owners(list(arguments.values()))
