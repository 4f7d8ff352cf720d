"""Host memory: calls do their work at once, so streams have nothing to order."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from casync.memory import Event, Stream

__all__ = ["HostMemory", "Instant"]


class _Done:
    """An event that is always done."""

    def done(self) -> bool:
        """Implements Event.done."""
        return True

    def wait(self) -> None:
        """Implements Event.wait."""


@dataclass(frozen=True)
class Instant:
    """A time of time.perf_counter. Implements Moment."""

    seconds: float  # by time.perf_counter

    def since(self, earlier: Any) -> float:
        """Implements Moment.since."""
        return self.seconds - float(earlier.seconds)


class _Now:
    """A stream whose work is done at once. Implements Stream."""

    def after(self, event: Event) -> None:
        """Implements Stream.after."""

    def run(self, work: Callable[[], object]) -> None:
        """Implements Stream.run."""
        work()

    def record(self, event: Event) -> None:
        """Implements Stream.record."""


class HostMemory:
    """Memory of the host. Implements Memory."""

    host = True
    device = torch.device("cpu")

    def zeros(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Implements Memory.zeros; by NumPy, whose untouched pages cost nothing."""
        if not count:
            return torch.zeros(0, dtype=dtype, device="cpu")
        return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype)

    def staging(self, count: int) -> torch.Tensor:
        return self.zeros(count, torch.uint8)

    def array(self, tensor: torch.Tensor) -> Any:
        return tensor.detach().numpy()

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
        """Refuses Memory.capture: host memory has no graphs."""
        raise NotImplementedError("host memory has no graphs")

    def future(self) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future()
