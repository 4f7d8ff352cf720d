"""Policies at work: what they measure, and which level follows from it. See policies.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from casync.memory import as_codecs_take

if TYPE_CHECKING:
    from casync.codec import Codec, State

DENSE = -1  # in place of a level: uncompressed


class Judge:
    """A policy at work in one training; as it is, one that measures nothing. What it is given is
    this rank's, what it looks at is the same on all ranks. Gradients are flat float32, where they
    are compressed: on a device only `take` may wait for it."""

    window = 0  # steps between looks; 0: none

    def looks(self, step: int) -> bool:
        """True if `handed` wants the gradients of a step."""
        return False

    def handed(self, index: int, gradient: torch.Tensor) -> None:
        """A parameter's gradient with what residuals held, before it is averaged."""

    def averaged(self, index: int, gradient: torch.Tensor) -> None:
        """A parameter's averaged gradient."""

    def take(self) -> list[float]:
        """The measurements since the last look."""
        return []

    def look(self, sums: Sequence[float], seconds: float) -> None:
        """A window is over. `sums`: of `take` over the ranks. `seconds`: a step's median."""

    def level(self, step: int, index: int) -> int:
        """The level of a parameter in a step, or DENSE."""
        raise NotImplementedError


class Scheduled(Judge):
    """Goes by the number of the step alone."""

    def __init__(self, by_step: Callable[[int], int]) -> None:
        self._by_step = by_step

    def level(self, step: int, index: int) -> int:
        """See Judge."""
        return self._by_step(step)


class Gains(Judge):
    """GraVAC's state."""

    def __init__(
        self, codecs: Sequence[Codec], window: int, every: int, least: float, flat: float
    ) -> None:
        """See hipress.GraVAC. `codecs`: by level."""
        self._codecs, self.window, self._every = codecs, window, every
        self._least, self._flat = least, flat
        # of gradients, of the first level, of the candidate
        self._energies: list[float | torch.Tensor] = [0.0, 0.0, 0.0]
        self.first = 1.0  # gain, until it is measured
        self.gains: dict[int, float] = {}  # by level
        self.scores: dict[int, float] = {}  # by level that was sent: gain a second
        self.candidate = 1
        self.searching = True

    def looks(self, step: int) -> bool:
        """See Judge."""
        return step % self._every == 0

    def handed(self, index: int, gradient: torch.Tensor) -> None:
        """See Judge."""
        gradient = _finite(gradient)
        low = roundtrip(self._codecs[0], gradient)
        high = roundtrip(self._codecs[self.candidate], low)
        for number, each in enumerate((gradient, low, high)):
            self._energies[number] = self._energies[number] + torch.dot(each, each).double()

    def take(self) -> list[float]:
        """See Judge."""
        taken, self._energies = self._energies, [0.0, 0.0, 0.0]
        return list(map(float, taken))

    def look(self, sums: Sequence[float], seconds: float) -> None:
        """See Judge."""
        whole, low, high = sums
        if whole <= 0:
            return
        sent = self.level(0, 0)  # in this window
        self.first = _moved(self.first if self.gains else None, low / whole)
        self.gains[self.candidate] = _moved(self.gains.get(self.candidate), high / whole)
        if sent == self.candidate:
            self.scores[sent] = self.gains[sent] / seconds
        if self.searching:
            self._search()

    def _search(self) -> None:
        """On to the next candidate, or to the end of the search."""
        best = sorted(self.scores, key=lambda level: -self.scores[level])
        if self.gains[self.candidate] < self._least:
            self.searching = False  # more compression keeps even less
            if best:
                self.candidate = best[0]
        elif self.candidate not in self.scores:
            return  # now it will be sent
        elif len(best) > 1 and self._near(*best[:2]):
            self.candidate, self.searching = max(best[:2]), False
        elif self.candidate + 1 < len(self._codecs):
            self.candidate += 1
        else:
            self.candidate, self.searching = best[0], False

    def _near(self, one: int, other: int) -> bool:
        return abs(self.scores[one] - self.scores[other]) < self._flat * self.scores[one]

    def level(self, step: int, index: int) -> int:
        """See Judge."""
        if self.gains.get(self.candidate, 0.0) >= self._least:
            return self.candidate
        return 0 if self.gains and self.first >= self._least else DENSE


class Norms(Judge):
    """Accordion's state."""

    def __init__(
        self, count: int, window: int, threshold: float, rate: Callable[[], float]
    ) -> None:
        """See hipress.Accordion. `count`: of parameters. `rate`: gives the learning rate now."""
        self.window, self._count, self._threshold = window, count, threshold
        self._rate_now = rate
        self._sums: dict[int, torch.Tensor] = {}  # by parameter
        self._before: list[float] = []  # norms
        self._rate = 0.0
        self.levels = [0] * self._count

    def averaged(self, index: int, gradient: torch.Tensor) -> None:
        """See Judge."""
        gradient = _finite(gradient)
        if index in self._sums:
            self._sums[index] += gradient
        else:
            self._sums[index] = gradient

    def take(self) -> list[float]:
        """See Judge."""
        squares = {index: torch.dot(each, each) for index, each in self._sums.items()}
        norms = [math.sqrt(float(squares.get(i, 0.0))) for i in range(self._count)]
        self._sums.clear()
        return [*norms, self._rate_now()]

    def look(self, sums: Sequence[float], seconds: float) -> None:
        """See Judge."""
        *norms, rate = sums
        decayed = rate < self._rate
        for index, norm in enumerate(norms):
            before = self._before[index] if self._before else 0.0
            still = before > 0 and abs(before - norm) / before < self._threshold
            self.levels[index] = int(still and not decayed)
        self._before, self._rate = norms, rate

    def level(self, step: int, index: int) -> int:
        """See Judge."""
        return self.levels[index]


def _finite(gradient: torch.Tensor) -> torch.Tensor:
    """A copy; zeros of one with a NaN or infinity, such as a GradScaler's optimizer leaves out."""
    return gradient.masked_fill(~gradient.isfinite().all(), 0.0)


def roundtrip(codec: Codec, gradient: torch.Tensor, state: State | None = None) -> torch.Tensor:
    """The share of a gradient's square that a codec keeps."""
    count = gradient.numel()
    table, at = np.array([[0, count, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
    out = gradient.new_zeros(codec.payload_bytes(count), dtype=torch.uint8)
    copy, kept = gradient.clone(), gradient.new_zeros(count)
    x, payload, decoded = map(as_codecs_take, (copy, out, kept))
    used = codec.encode_batch(x, table, payload, at, state=state)
    codec.decode_batch(payload, table, at, used, decoded)
    return kept


def _moved(average: float | None, value: float) -> float:
    """An exponential moving average of windows."""
    return value if average is None else 0.5 * (average + value)
