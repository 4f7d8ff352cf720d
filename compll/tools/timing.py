"""Timing: jobs take turns, after a warm-up, and the median of their samples counts.

A sample repeats a job until it lasts long enough for the clock. Turns are interleaved, so that a
machine that slows down for a while slows all jobs, and comparisons within a run stay fair.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Job = Callable[[], object]
#: least seconds of a sample
SAMPLE = 2e-3


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median of the samples, and their quartiles."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, as a share of the median."""
        return (self.high - self.low) / 2 / self.median


def timings(
    work: Mapping[str, Job], repeat: int, wait: Job = lambda: None, shortest: float = SAMPLE
) -> dict[str, Timing]:
    """Time every job in `repeat` turns; `wait` returns when all started work has ended."""
    counts = {name: calibrate(job, wait, shortest) for name, job in work.items()}
    samples: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeat):
        for name, job in work.items():
            samples[name].append(sample(job, counts[name], wait))
    return {name: summary(found) for name, found in samples.items()}


def calibrate(job: Job, wait: Job, shortest: float) -> int:
    """Calls per sample. The calls made here also warm up caches and compile lazily compiled
    code."""
    sample(job, 1, wait)
    count = 1
    while (took := sample(job, count, wait) * count) < shortest and count < 1 << 20:
        count = max(2 * count, int(count * min(shortest / max(took, 1e-9), 100)))
    return count


def sample(job: Job, count: int, wait: Job) -> float:
    """Seconds per call of `count` calls."""
    start = time.perf_counter()
    for _ in range(count):
        job()
    wait()
    return (time.perf_counter() - start) / count


def summary(samples: list[float]) -> Timing:
    """Median and quartiles of samples."""
    if len(samples) == 1:
        return Timing(samples[0], samples[0], samples[0])
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, low, high)
