"""The user's own models: package.module:make, measured if it gives inputs, or shapes."""

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
from hipress.model.params import Param, describe
from hipress.tools.models import known, roofline
from hipress.tools.models.known import Gradient, Model
from hipress.tools.models.work import Work

__all__ = ["BY_ELEMENTS", "Description", "UserModule", "by_elements", "find", "make"]

BY_ELEMENTS = (
    "ready times: in proportion to elements, as nothing is known of the model but its shapes; "
    "let it return (model, inputs) to have them measured"
)


SHAPES = "shapes alone"  # source of a model whose work is not known


@dataclass(frozen=True)
class UserModule:
    """A module made by a user's function, with inputs if it gave any."""

    name: str
    module: nn.Module
    inputs: Any = None
    loss: roofline.Loss = roofline.mean

    def measure(self) -> Model:
        """The module's work, measured on the meta device; by elements if there are no inputs."""
        if self.inputs is None:
            return by_elements(self.name, describe(self.module))
        about = {"source": self.name}
        return roofline.measure(self.name, lambda: (self.module, self.inputs), self.loss, **about)


@dataclass(frozen=True)
class Description:
    """A model, its parameters in the model's order, and texts on assumptions."""

    model: Model
    params: tuple[Param, ...]
    assumed: tuple[str, ...] = ()

    @property
    def backwards(self) -> list[Param]:
        """Parameters that get a gradient, in the order of the backward pass."""
        named = {each.name: each for each in self.params}
        return [named[each.name] for each in self.model.gradients if each.name in named]


def find(text: str) -> Description:
    """The model of the package with this name, or that of `make`; or ConfigError."""
    if text[:1].isalpha() and ":" not in text:
        model = known.load(text)
        return Description(model, _params(model))
    own = make(text, "meta")
    assumed = () if own.inputs is not None else (BY_ELEMENTS,)
    return Description(own.measure(), describe(own.module), assumed)


def _params(model: Model) -> tuple[Param, ...]:
    """Parameters in the model's order (the reverse of the backward pass), as float32."""
    return tuple(
        Param(
            each.name,
            index,
            each.numel,
            each.shape,
            torch.float32,
            False,
            kinds=frozenset(["@1d"] if len(each.shape) <= 1 else ()),
        )
        for index, each in enumerate(reversed(model.gradients))
    )


def make(text: str, device: str = "cpu") -> UserModule:
    """Make a model from package.module:function, or from shapes such as 10000x512,512.

    The function returns a model; or a tuple of a model, its inputs (a tuple, or a mapping of
    keywords) and, optionally, a loss of both. Raises ConfigError if neither makes a model.
    """
    if ":" not in text:
        return UserModule(text, _shapes(text))
    module, _, name = text.partition(":")
    sys.path.insert(0, "")
    try:
        with torch.device(device):
            result = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError, RuntimeError, NotImplementedError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{text!r} makes no model: {what}") from error
    parts = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        kind = ", ".join(type(each).__name__ for each in parts)
        raise ConfigError(
            f"{text!r} makes a {kind}, not a torch.nn.Module, nor a tuple of one, its inputs and, "
            "if need be, a loss"
        )
    return UserModule(text, parts[0], _inputs(parts), *parts[2:])


def _inputs(parts: tuple[Any, ...]) -> Any:
    """Inputs as a tuple or a mapping; a single input becomes a tuple. None if there are none."""
    if len(parts) < 2:
        return None
    return parts[1] if isinstance(parts[1], tuple | list | Mapping) else (parts[1],)


def by_elements(name: str, params: tuple[Param, ...]) -> Model:
    """A model whose gradients take work in proportion to their elements, and whose forward pass
    takes half of the backward pass."""
    gradients = tuple(
        Gradient(each.name, each.shape, Work(flops=4.0 * each.numel)) for each in reversed(params)
    )
    forward = Work(flops=2.0 * sum(each.numel for each in params))
    return Model(name, gradients, forward, SHAPES)


def _shapes(text: str) -> nn.Module:
    """A module whose parameters have the shapes of the text."""
    try:
        shapes = [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
        if any(prod(shape) <= 0 for shape in shapes):
            raise ValueError(text)
        return nn.ParameterList([torch.empty(shape, device="meta") for shape in shapes])
    except (ValueError, RuntimeError):
        raise ConfigError(
            f"{text!r}: give package.module:function, or shapes such as 10000x512,512"
        ) from None
