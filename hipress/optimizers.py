"""Kinds of optimizers, by which losses were measured: see docs/losses.md."""

from __future__ import annotations

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


def kind_of(optimizer: object) -> str | None:
    """The kind of an optimizer or of its class's name, one of KINDS; None for None and for an
    unknown class. Raises ConfigError for another object."""
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
    found = next((_BY_NAME[name] for name in names if name in _BY_NAME), None)
    plain = found == "sgd" and not any(group.get("momentum") for group in optimizer.param_groups)
    return PLAIN_SGD if plain else found
