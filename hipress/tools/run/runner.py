"""Execution of a job, for demo and benchmarks: starts its ranks, watches them, gathers a Result.

with place.choose(2, "1gbit").enter() as here:
    result = run(here, Job("ddp-fp16"))
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import IO, Any

from hipress.tools.run import corpus, methods
from hipress.tools.run.jobs import Job, Result
from hipress.tools.run.place import Loopback, TestNetwork

Event = dict[str, Any]
OnStep = Callable[[int], None]  # called with the number of steps done

#: environment of ranks whose steps are timed. One thread each, also in the BLAS that numpy brings:
#: two ranks share two cores. By luck of a heap's layout, glibc returns memory in every step and
#: faults it in again in the next: 0 to 45 ms; here it keeps it.
STEADY = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}  # fmt: skip


class RunError(RuntimeError):
    """A rank failed, ended early or stalled; the message is for the table."""


def run(place: TestNetwork, job: Job, on_step: OnStep = lambda done: None) -> Result:
    """Train with one method. A failure is in the Result, never raised; processes have ended."""
    try:
        return result(job, events(place, job, on_step))
    except (RunError, OSError) as error:
        return result(job, [], str(error))


def events(place: TestNetwork, job: Job, on_step: OnStep = lambda done: None) -> list[Event]:
    """The `done` events of all ranks, in order. Raises RunError or OSError."""
    with tempfile.TemporaryDirectory(prefix="hipress-") as folder:
        meet = Path(folder, "rendezvous").as_uri()
        one = isinstance(place, Loopback)  # throttled links exclude NCCL, which would bypass them
        sharers, nccl = (job.hosts, gpus(job) >= job.hosts) if one else (job.per_host, False)
        ranks = Ranks(range(job.hosts), str(corpus.prepare()), meet, sharers, nccl)
        return watch(place, job, ranks, on_step)


def gpus(job: Job) -> int:
    """Number of GPUs of this machine for the ranks of a job, which may share one if NCCL is told to
    allow that (2.30 and later)."""
    if job.workload.device != "cuda":
        return 0
    import torch  # not above: it takes its time

    here = torch.cuda.device_count()
    return job.hosts if here and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else here


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job that are started at this place."""

    numbers: Sequence[int]
    corpus: str  # .npy file of word numbers
    rendezvous: str  # URL: a file that does not exist yet, or a host and port
    sharers: int = 1  # ranks whose bytes an interface counts together
    nccl: bool = False  # True if each rank has a GPU, and these use NCCL
    gpu: int | None = None  # number of the GPU, for a single rank; by default the rank's number


def watch(
    place: TestNetwork, job: Job, ranks: Ranks, on_step: OnStep = lambda done: None
) -> list[Event]:
    """Start ranks and wait for them; return their `done` events, in order. Raises RunError or
    OSError; all processes have ended afterwards."""
    with _start_ranks(place, job, ranks) as started:
        return _watch(started, job, on_step)


def result(job: Job, done: Sequence[Event], error: str | None = None) -> Result:
    """The result from the `done` events of all ranks, in order; or from an error."""
    label = methods.parse(job.method).label
    if error is not None:
        return Result(job.method, label, job.hosts, error=error)
    return Result(
        job.method,
        label,
        job.hosts,
        warmup=job.warmup,
        seconds=done[0]["seconds"],
        losses=[fmean(losses) for losses in zip(*(each["losses"] for each in done), strict=True)],
        payload_bytes=fmean([each["payload_bytes"] for each in done]),
        wire_bytes=_mean_if_any([each["wire_bytes"] for each in done]),
        peak_bytes=_mean_if_any([each["peak_bytes"] for each in done]),
        identical=done[0]["identical"],
        tried=done[0]["tried"],
        parameters=done[0]["parameters"],
        phases=done[0]["phases"],
    )


@dataclass(frozen=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def complaint(self) -> str:
        """The last line of the process's standard error."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"


class _Ranks:
    def __init__(self) -> None:
        self.every: list[_Rank] = []
        self._listeners: list[threading.Thread] = []
        self.events: queue.Queue[tuple[_Rank, Event]] = queue.Queue()

    def add(self, rank: _Rank) -> None:
        self.every.append(rank)
        listener = threading.Thread(target=self._listen, args=(rank,), daemon=True)
        self._listeners.append(listener)
        listener.start()

    def _listen(self, rank: _Rank) -> None:
        assert rank.process.stdout is not None
        with rank.process.stdout as lines:
            self._hear(rank, lines)
        self.events.put((rank, {"event": "end"}))

    def _hear(self, rank: _Rank, lines: Iterable[bytes]) -> None:
        for line in lines:
            if line.startswith(b'{"event"'):  # libraries may print, too
                self.events.put((rank, json.loads(line)))

    def end(self) -> None:
        """Close the processes' inputs, which ends them, and kill those that remain."""
        for rank in self.every:
            assert rank.process.stdin is not None
            rank.process.stdin.close()
        deadline = time.monotonic() + 5
        for rank in self.every:
            try:
                rank.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        for listener in self._listeners:
            listener.join(5)


@contextmanager
def _start_ranks(place: TestNetwork, job: Job, wanted: Ranks) -> Iterator[_Ranks]:
    ranks = _Ranks()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hipress-")))
        stack.callback(ranks.end)
        for rank in wanted.numbers:
            log = stack.enter_context(open(folder / f"rank{rank}.log", "w+b"))
            ranks.add(_Rank(rank, _start(place, job, rank, wanted, log), log))
        yield ranks


def _start(
    place: TestNetwork, job: Job, rank: int, wanted: Ranks, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    order = {
        "job": asdict(job),
        "rank": rank,
        "corpus": wanted.corpus,
        "rendezvous": wanted.rendezvous,
        "interface": place.interface,
        "sharers": wanted.sharers,
        "nccl": wanted.nccl,
        "gpu": rank if wanted.gpu is None else wanted.gpu,
    }
    return place.start(
        rank // job.per_host,
        [sys.executable, "-m", "hipress.tools.run.worker", json.dumps(order)],
        env=_environment(place),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
    )


def _environment(place: TestNetwork) -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    interface = {"GLOO_SOCKET_IFNAME": place.interface} if place.interface else {}
    return {**os.environ, **STEADY, **interface, "PYTHONPATH": path}


def _watch(ranks: _Ranks, job: Job, on_step: OnStep) -> list[Event]:
    """The ranks' `done` events, in rank order; RunError if a rank fails, or all stall."""
    done: dict[int, Event] = {}
    first = ranks.every[0].number
    while len(done) < len(ranks.every):
        try:
            rank, event = ranks.events.get(timeout=job.timeout)
        except queue.Empty:
            raise RunError(f"timed out: no step for {job.timeout:g} s") from None
        if event["event"] == "done":
            done[rank.number] = event
        elif event["event"] == "step" and rank.number == first:
            on_step(event["step"] + 1)
        elif event["event"] == "error":
            raise RunError(f"rank {rank.number}: {event['message']}")
        elif event["event"] == "end" and rank.number not in done:
            raise RunError(
                f"rank {rank.number} ended with status {rank.process.wait()}: {rank.complaint()}"
            )
    return [done[rank.number] for rank in ranks.every]


def _mean_if_any(values: list[Any]) -> float | None:
    return None if None in values else fmean(values)
