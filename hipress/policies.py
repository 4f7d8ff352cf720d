"""Policies: how much to compress as training goes on. Any compressor with a parameter can have one.

::

    model = hipress.wrap(model, policy=hipress.GraVAC("topk", ratios=(0.1, 0.01, 0.001)))

A level is one setting of the compressor's parameters. A policy says by which level, or none, each
parameter's gradients travel in a step, from what was measured of earlier steps: sums over all
ranks, so all decide alike. Residuals, and all other states, move along as levels change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from hipress.errors import ConfigError
from hipress.judges import Gains, Judge, Norms, Scheduled

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from casync.codec import Codec

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

    def judge(self, codecs: Sequence[Codec], parameters: int) -> Judge:
        """For codecs by level, and so many parameters. ConfigError for codecs that cannot have this
        policy."""
        ...


@dataclass(frozen=True)
class Warmup:
    """A level for each span of steps, and the last one from then on: as DGC begins (Lin et al.
    2018), which sends a quarter in the first epoch and ends at a thousandth.

    steps: of each level, for instance those of an epoch.
    """

    compressor: str
    ratios: Sequence[Setting] = (0.25, 0.0625, 0.015625, 0.004, 0.001)
    steps: int = 1000

    def __post_init__(self) -> None:
        _check_levels(self, self.ratios, 2)
        _check(self, "steps", type(self.steps) is int and self.steps > 0, "at least 1")

    @property
    def levels(self) -> tuple[Mapping[str, Any], ...]:
        """See Policy."""
        return _settings(self.ratios)

    def judge(self, codecs: Sequence[Codec], parameters: int) -> Judge:
        """See Policy."""
        return Scheduled(lambda step: min(step // self.steps, len(self.ratios) - 1))


@dataclass(frozen=True)
class GraVAC:
    """The level that gains most, by how much of a gradient it keeps (Tyagi and Swany 2023).

    gain: E norm(compressed)^2 / E norm(gradient + residual)^2, by exponential moving averages over
    windows. A candidate that keeps `least` of a gradient is sent, else the first level if that
    does, else the gradient uncompressed. Candidates go up the levels. When samples a second times
    gain differ by less than `flat` between the two best, the more compressed of them is kept; when
    a candidate keeps too little, or there is none left, the best. A candidate is measured on what
    the first level keeps, not on the gradient again.

    ratios: from the least compressed level to the most. window: steps between looks.
    every: of these steps, one in so many is measured.
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
        """See Policy."""
        return _settings(self.ratios)

    def judge(self, codecs: Sequence[Codec], parameters: int) -> Judge:
        """See Policy."""
        for codec in codecs:
            if codec.rounds or not codec.stateful:
                raise ConfigError(
                    f"GraVAC goes by what a residual keeps back, and compressor {codec.name!r} has "
                    "none, or aggregates in rounds"
                )
        return Gains(codecs, self.window, self.every, self.least, self.flat)


@dataclass(frozen=True)
class Accordion:
    """Little compression of a parameter while its gradients change, much while they do not
    (Agarwal et al. 2021).

    Once in a window of steps, ten epochs in the paper, the norm D of a parameter's gradients summed
    over the window is compared with that of the last: where abs(D - last) / last is below
    `threshold`, `high` is for the next window, else `low`. `low` is also for the first window, and
    for one after the learning rate fell, if `optimizer` is given.
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
        """See Policy."""
        return _settings((self.low, self.high))

    def judge(self, codecs: Sequence[Codec], parameters: int) -> Judge:
        """See Policy."""
        return Norms(parameters, self.window, self.threshold, self._rate)

    def _rate(self) -> float:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return sum(float(group["lr"]) for group in groups)


def _settings(given: Sequence[Setting]) -> tuple[Mapping[str, Any], ...]:
    return tuple(each if isinstance(each, Mapping) else {"ratio": each} for each in given)


def _check(policy: object, name: str, good: bool, wanted: str) -> None:
    if not good:
        value = getattr(policy, name)
        raise ConfigError(f"{type(policy).__name__}: {name} is {wanted}, not {value!r}")


def _check_levels(policy: Policy, given: Any, least: int) -> None:
    name = type(policy).__name__
    if not isinstance(policy.compressor, str):
        raise ConfigError(
            f"{name}: the compressor is the name or path of a spec, not {policy.compressor!r}"
        )
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if not listed or len(given) < least or not all(map(_is_setting, given)):
        raise ConfigError(
            f"{name}: levels are at least {least} ratios, or mappings of the compressor's "
            f"parameters such as {{'rank': 2}}, from the least compressed on; not {given!r}"
        )


def _is_setting(given: object) -> bool:
    number = isinstance(given, int | float) and not isinstance(given, bool)
    return isinstance(given, Mapping) or number
