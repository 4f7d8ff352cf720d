"""Models of your own: package.module:make, or shapes; measured where there is what to run on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from hipress.errors import ConfigError
from hipress.model import Param, describe
from hipress.models import model as known
from hipress.models import roofline
from hipress.models.model import Gradient, Model
from hipress.models.work import Work

__all__ = ["BY_ELEMENTS", "Found", "Made", "by_elements", "find", "make"]

BY_ELEMENTS = (
    "ready times: in proportion to elements, as nothing is known of the model but its shapes; "
    "let it return (model, inputs) to have them measured"
)


@dataclass(frozen=True)
class Made:
    """What a function made: a module, and what to run it on if that was given."""

    name: str
    module: nn.Module
    inputs: Any = None
    loss: roofline.Loss = roofline.mean

    def measured(self) -> Model:
        """Its work by the meta device, or, without inputs, by elements."""
        if self.inputs is None:
            return by_elements(self.name, describe(self.module))
        about = {"source": self.name}
        return roofline.measure(self.name, lambda: (self.module, self.inputs), self.loss, **about)


@dataclass(frozen=True)
class Found:
    """A model, its parameters in the model's order, and what had to be assumed of it."""

    model: Model
    params: tuple[Param, ...]
    assumed: tuple[str, ...] = ()

    @property
    def backwards(self) -> list[Param]:
        """Those that get a gradient, as they do."""
        named = {each.name: each for each in self.params}
        return [named[each.name] for each in self.model.gradients if each.name in named]


def find(text: str) -> Found:
    """A model that comes with the package, by name; or what `make` takes. ConfigError for what is
    none."""
    if text[:1].isalpha() and ":" not in text:
        model = known.load(text)
        return Found(model, _params(model))
    made = make(text, "meta")
    assumed = () if made.inputs is not None else (BY_ELEMENTS,)
    return Found(made.measured(), describe(made.module), assumed)


def _params(model: Model) -> tuple[Param, ...]:
    """The reverse of the backward pass, in float32."""
    return tuple(
        Param(each.name, index, each.numel, each.shape, torch.float32, False)
        for index, each in enumerate(reversed(model.gradients))
    )


def make(text: str, device: str = "cpu") -> Made:
    """By package.module:function, which returns a model, or a model and its inputs (a tuple, or a
    mapping of keywords), or these and a loss of both; or by shapes, such as 10000x512,512.
    ConfigError for what makes no model."""
    if ":" not in text:
        return Made(text, _shapes(text))
    module, _, name = text.partition(":")
    sys.path.insert(0, "")
    try:
        with torch.device(device):
            made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError, RuntimeError, NotImplementedError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{text!r} makes no model: {what}") from error
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        kind = ", ".join(type(each).__name__ for each in parts)
        raise ConfigError(
            f"{text!r} makes a {kind}, not a torch.nn.Module, nor a tuple of one, its inputs and, "
            "if need be, a loss"
        )
    return Made(text, parts[0], _inputs(parts), *parts[2:])


def _inputs(parts: tuple[Any, ...]) -> Any:
    """A tuple or a mapping; a single input as a tuple of one."""
    if len(parts) < 2:
        return None
    return parts[1] if isinstance(parts[1], tuple | list | Mapping) else (parts[1],)


def by_elements(name: str, params: tuple[Param, ...]) -> Model:
    """A gradient takes work as it has elements, the forward pass half as much as the backward."""
    gradients = tuple(
        Gradient(each.name, each.shape, Work(flops=4.0 * each.numel)) for each in reversed(params)
    )
    forward = Work(flops=2.0 * sum(each.numel for each in params))
    return Model(name, gradients, forward, "shapes alone")


def _shapes(text: str) -> nn.Module:
    """A module whose parameters have these shapes."""
    try:
        shapes = [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
        if any(prod(shape) <= 0 for shape in shapes):
            raise ValueError(text)
        return nn.ParameterList([torch.empty(shape, device="meta") for shape in shapes])
    except (ValueError, RuntimeError):
        raise ConfigError(
            f"{text!r}: give package.module:function, or shapes such as 10000x512,512"
        ) from None
