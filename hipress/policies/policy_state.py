"""State of policies in a training: measurements, and the level that follows. See policies.py."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from casync.codec import Codec, State, one_piece
from hipress.errors import StateError

DENSE = -1  # uncompressed, instead of a level


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
