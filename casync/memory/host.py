"""Host memory: work is done when it was called, so streams have nothing to order."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from casync.memory import Event, Stream, as_codecs_take

__all__ = ["HostMemory", "Instant"]


class _Done:
    """An event of what is done."""

    def done(self) -> bool:
        """See Event."""
        return True

    def wait(self) -> None:
        """See Event."""


@dataclass(frozen=True)
class Instant:
    """See Moment."""

    seconds: float  # of a clock

    def since(self, earlier: Any) -> float:
        """See Moment."""
        return self.seconds - float(earlier.seconds)


class _Now:
    """A stream that is done with all that it was given."""

    def after(self, event: Event) -> None:
        """See Stream."""

    def run(self, work: Callable[[], object]) -> None:
        """See Stream."""
        work()

    def record(self, event: Event) -> None:
        """See Stream."""


class HostMemory:
    """See Memory for its members."""

    host = True
    device = torch.device("cpu")

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """See Memory; untouched pages cost nothing, as NumPy's."""
        if not count:
            return torch.zeros(0, dtype=dtype)
        return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype)

    def staging(self, count: int) -> torch.Tensor:
        return self.zeros(count, torch.uint8)

    def array(self, tensor: torch.Tensor) -> Any:
        return as_codecs_take(tensor)

    def tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def stream(self, *, urgent: bool = False) -> Stream:
        return _Now()

    def caller(self) -> Stream:
        return _Now()

    def event(self) -> Event:
        return _Done()

    def moment(self) -> Instant:
        return Instant(time.perf_counter())

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See Memory; here nothing can be taken down."""
        raise NotImplementedError("host memory has no graphs")

    def future(self) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future()
