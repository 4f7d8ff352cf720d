"""Times of jobs on a GPU, and on the host that queues them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

#: of a millisecond, on a device at its highest clock: a lower one spins for longer
CYCLES_PER_MS = 2_000_000
LONGEST_SPIN_MS = 50.0
#: uncounted calls before the others, and calls whose median is the host's time
WARM, HOST_CALLS = 2, 5
Job = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Times of a job.

    ms: milliseconds from the device's first to its last work. host_ms: until the call returns.
    queued: True if it returned before the device began.
    """

    ms: float
    host_ms: float
    queued: bool


def require_gpu() -> None:
    """Raise ValueError if there is no GPU."""
    if not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device")


def timed(work: Mapping[str, Job], repeat: int) -> dict[str, Times]:
    """Medians of each job; the jobs take turns."""
    host = {name: host_ms(job) for name, job in work.items()}
    turns: dict[str, list[tuple[float, bool]]] = {name: [] for name in work}
    for _ in range(WARM + repeat):
        for name, job in work.items():
            turns[name].append(device_ms(job, spin_for(host[name])))
    return {name: times(host[name], turn[WARM:]) for name, turn in turns.items()}


def times(host: float, turns: Sequence[tuple[float, bool]]) -> Times:
    """The medians of turns."""
    queued = 2 * sum(early for _, early in turns) > len(turns)
    return Times(statistics.median(ms for ms, _ in turns), host, queued)


def host_ms(job: Job) -> float:
    """Median milliseconds until a call returns; the first calls compile and upload."""
    times = []
    for _ in range(WARM + HOST_CALLS):
        torch.cuda.synchronize()
        begin = perf_counter()
        job()
        times.append(1e3 * (perf_counter() - begin))
    return statistics.median(times[WARM:])


def spin_for(host: float) -> int:
    """Cycles for which the device spins while the host queues a job: twice the host's time."""
    return int(min(2 * host + 0.1, LONGEST_SPIN_MS) * CYCLES_PER_MS)


def device_ms(job: Job, cycles: int) -> tuple[float, bool]:
    """Milliseconds of a job on the device; True if it was queued before the device began."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    start.record()  # after the spin, which does not count
    job()
    end.record()
    queued = not start.query()  # type: ignore[no-untyped-call]
    end.synchronize()
    return start.elapsed_time(end), queued
