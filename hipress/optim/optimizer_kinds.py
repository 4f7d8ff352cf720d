"""Kinds of optimizers, by which losses were measured (docs/measurements/losses.md); wrappers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from hipress.errors import ConfigError, unknown
from hipress.optim import Averaging
from hipress.optim.adam import Freezing

MOMENTUM = "momentum"
PLAIN_SGD = "plain-sgd"
AVERAGED = (MOMENTUM, *(f"{MOMENTUM}-{name}" for name in ("sgd", "lion", "muon", "other")))
"""Optimizers of hipress.optim that average momentum: Adam's after its freeze, and others'."""

KINDS = ("sgd", PLAIN_SGD, "adam", *AVERAGED)
"""Optimizers with one learning rate for all elements; those of them that have no momentum; those
that scale each element's by its gradients; and AVERAGED."""

_BY_NAME = {
    **dict.fromkeys(("sgd", "asgd"), "sgd"),
    PLAIN_SGD: PLAIN_SGD,
    **dict.fromkeys(("adam", "adamw", "adamax", "nadam", "radam", "sparseadam"), "adam"),
    **{kind: kind for kind in AVERAGED},
    **dict.fromkeys(("adagrad", "adadelta", "adafactor", "rmsprop"), "adam"),
}


#: classes that pass each step on to an optimizer, by package and name, and where they have it
_WRAPPERS = {
    ("accelerate", "AcceleratedOptimizer"): "optimizer",
    **{
        (package, name): "_optimizer"
        for package in ("lightning", "pytorch_lightning", "lightning_fabric")
        for name in ("LightningOptimizer", "_FabricOptimizer")
    },
}


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that Accelerate, Lightning or Fabric has wrapped; any other object itself."""
    for each in type(optimizer).__mro__:
        place = _WRAPPERS.get((each.__module__.partition(".")[0], each.__name__))
        if place is not None and isinstance(vars(optimizer).get(place), Optimizer):
            return unwrapped(vars(optimizer)[place])
    return optimizer


def holds(optimizer: Optimizer, identities: Collection[int]) -> bool:
    """True if the optimizer steps one of the parameters with these identities."""
    return any(id(p) in identities for group in optimizer.param_groups for p in group["params"])


def refuse_foreign(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Raise ConfigError for an optimizer that steps none of a model's parameters."""
    if not holds(optimizer, set(map(id, parameters))):
        raise ConfigError(
            f"optimizer={type(optimizer).__name__} steps none of the model's parameters: make it "
            'of them as they are when hipress takes the model, or pass its name, such as "adam"'
        )


def group_facts(optimizer: Optimizer) -> list[str]:
    """The options of an optimizer's groups, in which ranks must be equal, as texts."""
    return [
        f"group {number}: {name}={_plain(group[name])}"
        for number, group in enumerate(optimizer.param_groups)
        for name in sorted(group.keys() - {"params"})
    ]


def _plain(value: object) -> str:
    """A number, a text, or a sequence of these, as text; of any other object only the type."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return repr(value.item())
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain, value))})"
    return (
        repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__
    )


def _inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Optimizers that an unknown wrapper holds, alone or in lists."""
    for value in vars(optimizer).values():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Optimizer) and each is not optimizer:
                yield each


def kind_of(optimizer: object) -> str | None:
    """The kind of an optimizer or of its class's name, one of KINDS; None for None and for an
    unknown class. Raises ConfigError for another object, and for an unknown one that holds an
    optimizer of hipress.optim."""
    optimizer = unwrapped(optimizer)
    if optimizer is None:
        return None
    if isinstance(optimizer, str):
        if optimizer.lower() not in _BY_NAME:
            raise unknown("optimizer", optimizer, _BY_NAME)
        return _BY_NAME[optimizer.lower()]
    if isinstance(optimizer, type):
        raise ConfigError(
            f"optimizer is the class {optimizer.__name__}; pass an optimizer made of it, or its "
            'name, such as "sgd" or "adam"'
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            'optimizer is a torch.optim.Optimizer, "sgd" or "adam", not '
            f"a {type(optimizer).__name__}"
        )
    names = [each.__name__.lower() for each in type(optimizer).__mro__]
    if isinstance(optimizer, Freezing) and optimizer.averages:
        return MOMENTUM
    if isinstance(optimizer, Averaging) and optimizer.averages:
        kinds = (f"{MOMENTUM}-{name}" for name in names)
        return next((kind for kind in kinds if kind in AVERAGED), AVERAGED[-1])
    for inner in _inner(optimizer):
        if isinstance(unwrapped(inner), Averaging):
            raise ConfigError(
                f"optimizer={type(optimizer).__name__} holds a hipress.optim."
                f"{type(unwrapped(inner)).__name__}, and how it steps that is not known: step the "
                "latter itself, and pass it as optimizer="
            )
    known = next((_BY_NAME[name] for name in names if name in _BY_NAME), None)
    plain = known == "sgd" and not any(group.get("momentum") for group in optimizer.param_groups)
    return PLAIN_SGD if plain else known
