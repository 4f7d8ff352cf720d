"""Policies: change the compression during training, for any compressor with a parameter.

::

    model = hipress.wrap(model, policy=hipress.GraVAC("topk", ratios=(0.1, 0.01, 0.001)))

A level is a setting of the compressor's parameters. A policy decides by which level, or none, each
parameter's gradients travel in a step, from measurements of earlier steps. These are sums over all
ranks, so all decide alike. Residuals and all other states are kept when levels change.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch.optim import Optimizer

from casync.codec import Codec, State, one_piece
from hipress.errors import ConfigError, StateError

DENSE = -1  # uncompressed, instead of a level
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


class PolicyState:
    """State of a policy in one training. A policy measures this rank's gradients, and decides by
    sums that are the same on all ranks; this base does neither. Gradients are flat float32 on the
    device that compresses: only `measured` may wait for that device."""

    window = 0  # steps between decisions; 0: none follows from measurements

    def measures(self, step: int) -> bool:
        """True if `observe` wants the gradients of a step."""
        return False

    def observe(self, index: int, gradient: torch.Tensor) -> None:
        """Receive a parameter's gradient plus residual, before it is averaged."""

    def averaged(self, index: int, gradient: torch.Tensor) -> None:
        """Receive a parameter's averaged gradient."""

    def measured(self) -> list[float]:
        """The measurements since the last decision, to be added up over the ranks."""
        return []

    def decide(self, sums: Sequence[float], seconds: float) -> None:
        """Decide after a window. sums: of `measured` over the ranks. seconds: of a step, median."""

    def level(self, step: int, index: int) -> int:
        """The level of a parameter in a step, or DENSE."""
        raise NotImplementedError

    def state(self) -> str:
        """Measurements of past windows as JSON, the same on all ranks; "" if there are none."""
        return ""

    def load(self, state: str) -> None:
        """Go on with measurements of `state`; the window that was under way begins anew. Raises
        StateError for others."""


class Scheduled(PolicyState):
    """Levels by the number of the step alone."""

    def __init__(self, by_step: Callable[[int], int]) -> None:
        self._by_step = by_step

    def level(self, step: int, index: int) -> int:
        """Implements PolicyState.level."""
        return self._by_step(step)


class Gains(PolicyState):
    """State of GraVAC."""

    def __init__(
        self, codecs: Sequence[Codec], window: int, every: int, least: float, flat: float
    ) -> None:
        """Arguments as for hipress.GraVAC. codecs: by level."""
        self._codecs, self.window, self._every = codecs, window, every
        self._least, self._flat = least, flat
        # energies of the gradient, of the first level and of the candidate
        self._energies: list[float | torch.Tensor] = [0.0, 0.0, 0.0]
        self.first = 1.0  # gain of the first level
        self.gains: dict[int, float] = {}  # by level
        self.scores: dict[int, float] = {}  # by sent level: gain per second
        self.candidate = 1
        self.searching = True

    def measures(self, step: int) -> bool:
        """Implements PolicyState.measures."""
        return step % self._every == 0

    def observe(self, index: int, gradient: torch.Tensor) -> None:
        """Implements PolicyState.observe."""
        gradient = _finite(gradient)
        low = roundtrip(self._codecs[0], gradient)
        high = roundtrip(self._codecs[self.candidate], low)
        for number, each in enumerate((gradient, low, high)):
            self._energies[number] = self._energies[number] + torch.dot(each, each).double()

    def measured(self) -> list[float]:
        """Implements PolicyState.measured."""
        energies, self._energies = self._energies, [0.0, 0.0, 0.0]
        return list(map(float, energies))

    def decide(self, sums: Sequence[float], seconds: float) -> None:
        """Implements PolicyState.decide."""
        whole, low, high = sums
        if whole <= 0:
            return
        sent = self.level(0, 0)  # level of this window
        self.first = _smoothed(self.first if self.gains else None, low / whole)
        self.gains[self.candidate] = _smoothed(self.gains.get(self.candidate), high / whole)
        if sent == self.candidate:
            self.scores[sent] = self.gains[sent] / seconds
        if self.searching:
            self._search()

    def _search(self) -> None:
        """Go on to the next candidate, or end the search."""
        best = sorted(self.scores, key=lambda level: -self.scores[level])
        if self.gains[self.candidate] < self._least:
            self.searching = False  # more compression keeps even less
            if best:
                self.candidate = best[0]
        elif self.candidate not in self.scores:
            return  # the next window sends it
        elif len(best) > 1 and self._near(*best[:2]):
            self.candidate, self.searching = max(best[:2]), False
        elif self.candidate + 1 < len(self._codecs):
            self.candidate += 1
        else:
            self.candidate, self.searching = best[0], False

    def _near(self, one: int, other: int) -> bool:
        return abs(self.scores[one] - self.scores[other]) < self._flat * self.scores[one]

    def state(self) -> str:
        """Implements PolicyState.state."""
        gains, scores = sorted(self.gains.items()), sorted(self.scores.items())
        return json.dumps([self.first, gains, scores, self.candidate, self.searching])

    def load(self, state: str) -> None:
        """Implements PolicyState.load."""
        with _told_if_damaged("GraVAC"):
            first, gains, scores, candidate, searching = json.loads(state)
            self._codecs[candidate]
            self.first, self.gains, self.scores = float(first), dict(gains), dict(scores)
            self.candidate, self.searching = candidate, bool(searching)

    def level(self, step: int, index: int) -> int:
        """Implements PolicyState.level."""
        if self.gains.get(self.candidate, 0.0) >= self._least:
            return self.candidate
        return 0 if self.gains and self.first >= self._least else DENSE


class Norms(PolicyState):
    """State of Accordion."""

    def __init__(
        self, count: int, window: int, threshold: float, rate: Callable[[], float]
    ) -> None:
        """Arguments of hipress.Accordion. count: of parameters. rate: returns the learning rate."""
        self.window, self._count, self._threshold = window, count, threshold
        self._rate_now = rate
        self._sums: dict[int, torch.Tensor] = {}  # by parameter
        self._before: list[float] = []  # norms
        self._rate = 0.0
        self.levels = [0] * self._count

    def averaged(self, index: int, gradient: torch.Tensor) -> None:
        """Implements PolicyState.averaged."""
        gradient = _finite(gradient)
        if index in self._sums:
            self._sums[index] += gradient
        else:
            self._sums[index] = gradient

    def measured(self) -> list[float]:
        """Implements PolicyState.measured."""
        squares = {index: torch.dot(each, each) for index, each in self._sums.items()}
        norms = [math.sqrt(float(squares.get(i, 0.0))) for i in range(self._count)]
        self._sums.clear()
        return [*norms, self._rate_now()]

    def decide(self, sums: Sequence[float], seconds: float) -> None:
        """Implements PolicyState.decide."""
        *norms, rate = sums
        decayed = rate < self._rate
        for index, norm in enumerate(norms):
            before = self._before[index] if self._before else 0.0
            still = before > 0 and abs(before - norm) / before < self._threshold
            self.levels[index] = int(still and not decayed)
        self._before, self._rate = norms, rate

    def state(self) -> str:
        """Implements PolicyState.state."""
        return json.dumps([self._before, self._rate, self.levels])

    def load(self, state: str) -> None:
        """Implements PolicyState.load."""
        with _told_if_damaged("Accordion"):
            before, rate, levels = json.loads(state)
            if len(levels) != self._count or not {*levels} <= {0, 1}:
                raise ValueError(f"levels of {len(levels)} parameters, expected {self._count}")
            self._before, self._rate, self.levels = list(map(float, before)), float(rate), levels

    def level(self, step: int, index: int) -> int:
        """Implements PolicyState.level."""
        return self.levels[index]


@contextmanager
def _told_if_damaged(policy: str) -> Iterator[None]:
    """Raise StateError for measurements that are not those of this policy."""
    try:
        yield
    except (ValueError, TypeError, LookupError) as error:
        raise StateError(f"damaged state: measured: not of {policy}: {error}") from error


def _finite(gradient: torch.Tensor) -> torch.Tensor:
    """A copy of the gradient; zeros if it has a NaN or infinity, which a GradScaler would skip."""
    return gradient.masked_fill(~gradient.isfinite().all(), 0.0)


def roundtrip(codec: Codec, gradient: torch.Tensor, state: State | None = None) -> torch.Tensor:
    """The decoded payload of a gradient: encode(gradient), decoded."""
    count = gradient.numel()
    table, at = one_piece(count)
    out = gradient.new_zeros(codec.payload_bytes(count), dtype=torch.uint8)
    copy, kept = gradient.clone(), gradient.new_zeros(count)
    on_host = gradient.device.type == "cpu"
    arrays: list[Any] = [each.numpy() if on_host else each for each in (copy, out, kept)]
    x, payload, decoded = arrays
    used = codec.encode_batch(x, table, payload, at, state=state)
    codec.decode_batch(payload, table, at, used, decoded)
    return kept


def _smoothed(average: float | None, value: float) -> float:
    """Exponential moving average over windows."""
    return value if average is None else 0.5 * (average + value)
