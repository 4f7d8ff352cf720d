"""The work of a training step, measured on the meta device: without computation or memory.

A dispatch mode sees every operator of the forward and the backward pass; hooks tell when autograd
has finished a parameter's gradient. So their order and the work before each are those of the real
pass, whatever the model's code does, as long as it does not depend on the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from hipress.errors import ConfigError
from hipress.tools.models.known import Gradient, Model
from hipress.tools.models.work import Work

__all__ = ["Loss", "mean", "measure"]

#: From a model and its inputs to the tensors on which backward() is called, one after the other. A
#: generator may compute each only when it is needed.
Loss = Callable[[Any, Any], torch.Tensor | Iterable[torch.Tensor]]

#: operators that move no data: views and allocations
_FREE = frozenset({
    "view", "t", "transpose", "reshape", "permute", "expand", "detach", "unsqueeze", "squeeze",
    "slice", "select", "alias", "_unsafe_view", "split", "chunk", "as_strided", "unbind",
    "empty", "empty_strided", "split_with_sizes", "empty_like", "zeros_like", "new_zeros",
    "new_empty", "new_empty_strided", "zeros", "ones_like", "expand_as", "unfold", "lift_fresh",
    "diagonal", "real", "view_as_real", "view_as_complex", "narrow",
})  # fmt: skip


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the work of all operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        out = func(*args, **keywords)
        packet = func.overloadpacket
        if packet.__name__ not in _FREE:
            self.work += _work(packet, args, keywords, out)
        return out


def _work(packet: Any, args: Any, keywords: Mapping[str, Any], out: Any) -> Work:
    moved = float(sum(map(_bytes, tree_leaves((args, keywords, out)))))
    if packet.__name__ == "embedding":  # reads only the rows that it returns, and their indices
        moved = 3.0 * _bytes(out)
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, **keywords, out_val=out))
        return Work(flops, moved, 0.0, 1.0)
    return Work(0.0, 0.0, moved, 1.0)


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def mean(model: nn.Module, inputs: Any) -> torch.Tensor:
    """The loss that a model returns, or else the sum of the means of its differentiable outputs."""
    out = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    loss = getattr(out, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
    means = [each.float().mean() for each in tensors if each.requires_grad]
    if not means:
        raise ConfigError(
            f"no output of {type(model).__name__} depends on a trainable parameter: pass a loss"
        )
    return torch.stack(means).sum()


def measure(
    name: str, make: Callable[[], tuple[nn.Module, Any]], loss: Loss = mean, **about: Any
) -> Model:
    """Measure a training step of the model and inputs that `make` returns, with the meta device as
    the default. about: further fields of Model. Raises ConfigError if the model cannot run there.
    """
    with torch.device("meta"):
        module, inputs = make()
    module.to("meta").train()
    meter, works = _Meter(), dict[str, tuple[tuple[int, ...], Work]]()
    with ExitStack() as hooks:
        for title, parameter in module.named_parameters():
            if parameter.requires_grad:
                keep = partial(_keep, works, title, meter)
                hook = parameter.register_post_accumulate_grad_hook(keep)  # type: ignore[no-untyped-call]
                hooks.callback(hook.remove)
        forward = _run(module, tree_map(_on_meta, inputs), loss, meter)
    return _model(name, forward, works, about)


def _keep(
    works: dict[str, tuple[tuple[int, ...], Work]],
    title: str,
    meter: _Meter,
    parameter: torch.Tensor,
) -> None:
    works.pop(title, None)
    works[title] = (tuple(parameter.shape), meter.work)


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _run(module: nn.Module, inputs: Any, loss: Loss, meter: _Meter) -> Work:
    """Run both passes; return the work of the forward pass."""
    forward = None
    try:
        with meter:
            for each in _losses(loss(module, inputs)):
                forward = forward or meter.work
                torch.autograd.backward(each)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{type(module).__name__} does not run on the meta device, where nothing has a value: "
            f"{type(error).__name__}: {reason}"
        ) from error
    return forward or meter.work


def _losses(results: torch.Tensor | Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    return (results,) if isinstance(results, torch.Tensor) else results


def _model(
    name: str,
    forward: Work,
    works: Mapping[str, tuple[tuple[int, ...], Work]],
    about: Mapping[str, Any],
) -> Model:
    """The model with the work between successive gradients; after several backward passes a
    gradient is ready in the last."""
    if not works:
        raise ConfigError(f"{name}: no parameter has got a gradient")
    gradients, before = [], forward
    for title, (shape, work) in works.items():
        gradients.append(Gradient(title, shape, work + before.times(-1.0)))
        before = work
    return Model(name, tuple(gradients), forward, **about)
