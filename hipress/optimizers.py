"""Kinds of optimizers, by which losses were measured: see docs/losses.md."""

from __future__ import annotations

from torch.optim import Optimizer

from hipress.errors import ConfigError, unknown
from hipress.optim import Averaging

MOMENTUM = "momentum"
KINDS = ("sgd", "adam", MOMENTUM)
"""Optimizers with one learning rate for all elements; with one per element, by its gradients; and
those of hipress.optim that average momentum (Adam: after its freeze)."""

_BY_NAME = {
    **dict.fromkeys(("sgd", "asgd"), "sgd"),
    **dict.fromkeys(("adam", "adamw", "adamax", "nadam", "radam", "sparseadam"), "adam"),
    MOMENTUM: MOMENTUM,
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
    if isinstance(optimizer, Averaging) and optimizer.averages:
        return MOMENTUM
    names = (each.__name__.lower() for each in type(optimizer).__mro__)
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), None)
