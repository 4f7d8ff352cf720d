"""Policies: change the compression during training, for any compressor with a parameter.

::

    model = hipress.wrap(model, policy=hipress.GraVAC("topk", ratios=(0.1, 0.01, 0.001)))

A level is a setting of the compressor's parameters. A policy decides by which level, or none, each
parameter's gradients travel in a step, from measurements of earlier steps. These are sums over all
ranks, so all decide alike. Residuals and all other states are kept when levels change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from torch.optim import Optimizer

from casync.codec import Codec
from hipress.errors import ConfigError
from hipress.policies.policy_state import Gains, Norms, PolicyState, Scheduled

#: a value of the compressor's `ratio`, or values of its parameters
Setting: TypeAlias = float | Mapping[str, Any]


class Policy(Protocol):
    """The protocol of `policy=`."""

    @property
    def compressor(self) -> str:
        """Name or path of a spec."""
        ...

    @property
    def levels(self) -> tuple[Mapping[str, Any], ...]:
        """Parameters of the compressor, by level."""
        ...

    def new_state(self, codecs: Sequence[Codec], parameters: int) -> PolicyState:
        """The policy's state in a training. codecs: by level; parameters: their number. Raises
        ConfigError for codecs that do not suit the policy."""
        ...


@dataclass(frozen=True)
class Warmup:
    """A level for each span of steps; the last level stays.

    DGC (Lin et al. 2018) begins like this: it sends a quarter in the first epoch and ends at a
    thousandth. steps: of each level, for instance those of an epoch.
    """

    compressor: str
    ratios: Sequence[Setting] = (0.25, 0.0625, 0.015625, 0.004, 0.001)
    steps: int = 1000

    def __post_init__(self) -> None:
        _check_levels(self, self.ratios, 2)
        _check(self, "steps", type(self.steps) is int and self.steps > 0, "at least 1")

    @property
    def levels(self) -> tuple[Mapping[str, Any], ...]:
        """Implements Policy.levels."""
        return _settings(self.ratios)

    def new_state(self, codecs: Sequence[Codec], parameters: int) -> PolicyState:
        """Implements Policy.new_state."""
        return Scheduled(lambda step: min(step // self.steps, len(self.ratios) - 1))


@dataclass(frozen=True)
class GraVAC:
    """The level with the best gain, the share of a gradient that it keeps (Tyagi and Swany 2023).

    gain: E norm(compressed)^2 / E norm(gradient + residual)^2, by exponential moving averages over
    windows. A candidate level is sent if its gain is at least `least`, else the first level if its
    gain is, else the gradient uncompressed. Candidates ascend the levels. The search ends when
    (samples a second) * gain of the two best levels differ by less than `flat`: it keeps the more
    compressed one; or when a candidate's gain is too small, or no candidate is left: it keeps the
    best. A candidate is measured on the values that the first level keeps, not on the gradient.

    ratios: from the least compressed level to the most. window: steps between decisions. every:
    interval of measured steps.
    """

    compressor: str
    ratios: Sequence[Setting] = (0.1, 0.01, 0.001)
    least: float = 0.75
    flat: float = 0.05
    window: int = 25
    every: int = 5

    def __post_init__(self) -> None:
        _check_levels(self, self.ratios, 2)
        _check(self, "least", 0 < self.least < 1, "between 0 and 1")
        _check(self, "flat", 0 <= self.flat < 1, "at least 0 and below 1")
        _check(self, "window", type(self.window) is int and self.window > 0, "at least 1")
        every = type(self.every) is int and 0 < self.every <= self.window
        _check(self, "every", every, "at least 1, and at most the window")

    @property
    def levels(self) -> tuple[Mapping[str, Any], ...]:
        """Implements Policy.levels."""
        return _settings(self.ratios)

    def new_state(self, codecs: Sequence[Codec], parameters: int) -> PolicyState:
        """Implements Policy.new_state."""
        for codec in codecs:
            if codec.rounds or not codec.states:
                raise ConfigError(
                    f"GraVAC decides by the residual, and compressor {codec.name!r} has none, or "
                    "aggregates in rounds"
                )
        return Gains(codecs, self.window, self.every, self.least, self.flat)


@dataclass(frozen=True)
class Accordion:
    """Low compression while a parameter's gradients change, high while not (Agarwal et al. 2021).

    After each window of steps (ten epochs in the paper) the norm D of the sum of a parameter's
    gradients is compared with that of the last window: if abs(D - last) / last is below
    `threshold`, the next window uses `high`, else `low`. The first window uses `low`, and so does a
    window after the learning rate fell, if `optimizer` is given.
    """

    compressor: str
    low: Setting
    high: Setting
    window: int = 1000
    threshold: float = 0.5
    optimizer: Optimizer | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_levels(self, (self.low, self.high), 2)
        _check(self, "window", type(self.window) is int and self.window > 0, "at least 1")
        _check(self, "threshold", self.threshold > 0, "above 0")

    @property
    def levels(self) -> tuple[Mapping[str, Any], ...]:
        """Implements Policy.levels."""
        return _settings((self.low, self.high))

    def new_state(self, codecs: Sequence[Codec], parameters: int) -> PolicyState:
        """Implements Policy.new_state."""
        return Norms(parameters, self.window, self.threshold, self._rate)

    def _rate(self) -> float:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return sum(float(group["lr"]) for group in groups)


def _settings(settings: Sequence[Setting]) -> tuple[Mapping[str, Any], ...]:
    return tuple(each if isinstance(each, Mapping) else {"ratio": each} for each in settings)


def _check(policy: object, name: str, good: bool, wanted: str) -> None:
    if not good:
        value = getattr(policy, name)
        raise ConfigError(f"{type(policy).__name__}: {name} is {wanted}, not {value!r}")


def _check_levels(policy: Policy, settings: Any, least: int) -> None:
    name = type(policy).__name__
    if not isinstance(policy.compressor, str):
        raise ConfigError(
            f"{name}: the compressor is the name or path of a spec, not {policy.compressor!r}"
        )
    listed = isinstance(settings, Sequence) and not isinstance(settings, str)
    if not listed or len(settings) < least or not all(map(_is_setting, settings)):
        raise ConfigError(
            f"{name}: levels are at least {least} ratios, or mappings of the compressor's "
            f"parameters such as {{'rank': 2}}, from the least compressed on; not {settings!r}"
        )


def _is_setting(setting: object) -> bool:
    number = isinstance(setting, int | float) and not isinstance(setting, bool)
    return isinstance(setting, Mapping) or number
