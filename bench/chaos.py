"""Ranks that end, stop or are slow at some moment: what the others report, and when they end.

    python -m bench.chaos                        # 200 runs, some 10 minutes on two cores
    python -m bench.chaos --runs 50 --seed 3 --fault stop --way auto
    python -m bench.chaos --only 17 --verbose    # one of them again, with all output of its ranks

In each run one rank fails at some moment of `wrap` or of a step, in a training by some way, codec
and strategy. Every other rank must end with an error that names this rank, at most LATE seconds
after the time-out; or the store, if that ended with it before the rank came. If it was only slow,
all ranks must do their steps, with the same weights; so must the other sites of `Members`, where a
slow one may be a newcomer. In between ranks save and load states of all kinds. No rank may end by
another signal than the fault's. At most EXIT seconds later, everything that casync and hipress run
at the end of the program must have run. The rest of that end belongs to torch and the interpreter:
a second of a core, as with plain DDP, or some 20 s on a busy machine.
"""

from __future__ import annotations

import json
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import IO, Annotated, Any

import typer

TIMEOUT = 10.0  # seconds, of the process group and so of all that a rank waits for
LATE, EXIT = 5.0, 2.0  # seconds
GONE = 30.0  # seconds; of the interpreter's own end, on a busy machine, 20 have been seen
FAULTS = ("kill", "stop", "interrupt", "raise", "exit", "leave", "slow")
#: where a slow rank waits, or that it takes a message of that step late
PLACES = ("join", "wrap", "step", "message", "checkpoint")
KEEPS = ("", "own", "portable", "dcp")  # states that ranks save, and load, on their way
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "interrupt": signal.SIGINT}
CODECS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("onebit", "hierarchical", {"topology": 2}),
    ("int8_group", "ps", {}), ("int8_group", "ring", {}),
    ("topk", "exchange", {}), ("thc", "allreduce", {}), ("signsgd", "vote", {}),
    ("topk", "gtopk", {}), ("powersgd", "auto", {}), ("none", "auto", {}),
)  # fmt: skip
WAYS = ("wrap", "attach", "Synchronizer", "verify", "Gossip", "all_reduce", "auto", "trial",
        "momentum", "policy", "shard", "Outer", "Members")  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A run of chaos: its job, and its fault."""

    number: int
    way: str
    codec: str
    strategy: str
    options: dict[str, Any]
    ranks: int
    keeper: str  # keeper of the store: "agent" or "rank 0"
    fault: str
    victim: int
    step: int  # step of the fault; -1: while wrapping the model
    delay: float  # seconds, of signals
    place: str = ""  # of a slow rank
    keeps: str = ""  # kind of the states that are saved and loaded
    timeout: float = TIMEOUT

    @property
    def lasts(self) -> bool:
        """True if all other ranks end well."""
        return self.fault == "slow" or self.way == "Members"

    @classmethod
    def draw(
        cls,
        number: int,
        seed: int,
        faults: Sequence[str],
        ways: Sequence[str],
        codecs: Sequence[str] = (),
    ) -> Run:
        """Draw a random run."""
        chance = random.Random(f"{seed}/{number}")
        fault, way = chance.choice(faults), chance.choice(ways)
        codec, strategy, options = chance.choice(
            [each for each in CODECS if not codecs or each[0] in codecs]
        )
        ranks = chance.choice((2, 3, 3, 4))
        if strategy == "hierarchical":
            ranks = 4
        if codec == "none" and way in ("wrap", "attach", "verify", "all_reduce"):
            codec, strategy = "int8_group", "ps"
        wraps = fault in SIGNALS and chance.random() < 0.4
        step = -1 if wraps else chance.choice((0, 1, 3, 7, 25))
        delay = chance.uniform(0.0, 0.6 if wraps else 0.01)
        keeper = chance.choice(("agent", "rank 0"))
        victim = 0 if chance.random() < 0.3 else chance.randrange(ranks)
        place = keeps = ""
        if fault == "slow":
            place, delay = chance.choice(PLACES), chance.uniform(0.5, TIMEOUT / 3)
            step = chance.choice((0, 2, 8))
        if way not in ("all_reduce", "trial", "Members"):
            keeps = chance.choice(KEEPS)
        if way == "Gossip" and keeps in ("portable", "dcp"):  # which it does not have
            keeps = "own"
        if way == "Members":  # of sites, each a job of its own
            keeper = "agent"
        return cls(
            number, way, codec, strategy, options, ranks, keeper, fault, victim, step, delay,
            place, keeps,
        )  # fmt: skip


@dataclass
class Process:
    """The process of a rank, as this program sees it."""

    pid: int
    pipe: IO[bytes]
    log: IO[bytes]
    wrapping: bool = False  # set when `wrap` begins: its errors are checked from then on
    error: dict[str, Any] | None = None
    ended: float | None = None  # time.monotonic(); None: not yet
    code: int | None = None  # exit status; negative: of a signal
    left: dict[str, Any] | None = None

    @property
    def exit_seconds(self) -> tuple[float, float]:
        """Seconds from the time its error was shown: those in which it waited, other than for a
        core, until our exit handlers had run; and those until the process had ended."""
        assert self.error is not None
        now = time.monotonic()
        left = self.left or {"at": now, "busy": self.error["busy"]}
        waited = (left["at"] - self.error["at"]) - (left["busy"] - self.error["busy"])
        return waited, (self.ended or now) - self.error["at"]


@dataclass
class Job:
    """A run under way."""

    run: Run
    keeper: int | None  # process
    processes: list[Process] = field(default_factory=list)
    fault_at: float | None = None
    due: float | None = None  # time to send a signal
    begun: float = field(default_factory=time.monotonic)

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        """Take a message of a rank."""
        process = self.processes[rank]
        process.wrapping |= message["what"] == "wrap"
        if message["what"] in ("error", "done"):
            process.error = message
        if message["what"] == "left":
            process.left = message
        if rank != self.run.victim or self.due or self.fault_at:
            return
        step = message.get("number", -1)
        if self.run.fault == "slow":
            self.fault_at = message["at"]
        elif (message["what"], step) in (("wrap", self.run.step), ("step", self.run.step)):
            if self.run.fault in SIGNALS:
                self.due = message["at"] + self.run.delay
            else:
                self.fault_at = message["at"]

    def strike(self) -> None:
        """Send the signal, if it is time."""
        if self.due is not None and self.fault_at is None and time.monotonic() >= self.due:
            self.fault_at = time.monotonic()
            os.kill(self.processes[self.run.victim].pid, SIGNALS[self.run.fault])

    @property
    def others(self) -> list[Process]:
        return [p for rank, p in enumerate(self.processes) if rank != self.run.victim]

    @property
    def over(self) -> bool:
        """True if all other ranks have ended, a slow one too, or should have."""
        awaited = self.processes if self.run.fault == "slow" else self.others
        if all(each.ended for each in awaited):
            return True
        limit = self.run.timeout + LATE + GONE
        start = self.fault_at or self.begun + 60
        return time.monotonic() > start + limit


class Server:
    """The process that forks ranks."""

    def __init__(self) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        codecs = sorted({codec for codec, _, _ in CODECS} - {"none"})
        program = [sys.executable, "-m", "bench.chaos_ranks", str(there.fileno()), *codecs]
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self._process = subprocess.Popen(program, pass_fds=[there.fileno()], env=environment)
        there.close()
        self._orders = here

    def fork(self, order: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Fork a rank; returns its process number."""
        socket.send_fds(self._orders, [json.dumps(order).encode()], descriptors)
        return int(self._orders.recv(64))

    def reap(self, pid: int) -> int:
        """Reap a process that has ended; returns its exit status, negative for a signal."""
        self._orders.send(str(pid).encode())
        return int(self._orders.recv(64))

    def close(self) -> None:
        self._orders.close()
        self._process.wait()


def start(server: Server, run: Run) -> Job:
    """Start a run: fork its ranks, and the process that keeps the store."""
    with socket.socket() as listener, tempfile.TemporaryFile() as log:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        job = Job(run, None)
        order = asdict(run)
        if run.keeper == "agent":
            reading, writing = os.pipe()
            fds = [listener.fileno(), writing, log.fileno()]
            job.keeper = server.fork({**order, "rank": None}, fds)
            os.close(reading)
            os.close(writing)
        for rank in range(run.ranks):
            reading, writing = os.pipe()
            own = tempfile.TemporaryFile()  # noqa: SIM115 # the process's
            pid = server.fork({**order, "rank": rank}, [listener.fileno(), writing, own.fileno()])
            os.close(writing)
            job.processes.append(Process(pid, os.fdopen(reading, "rb", buffering=0), own))
    return job


def end(server: Server, job: Job) -> None:
    """Kill the remaining processes; ranks that hang first write their stacks."""
    left = [each for each in job.processes if not each.ended]
    for each in left:
        if each is not job.processes[job.run.victim]:
            os.kill(each.pid, signal.SIGUSR1)
            time.sleep(0.2)
        os.kill(each.pid, signal.SIGKILL)
        server.reap(each.pid)
    if job.keeper is not None:
        os.kill(job.keeper, signal.SIGKILL)


def perform(server: Server, runs: Iterator[Run], together: int) -> Iterator[Job]:
    """Perform runs, `together` at a time; yields them as they end."""
    jobs: list[Job] = []
    with selectors.DefaultSelector() as selector:
        more = True
        while more or jobs:
            while more and len(jobs) < together:
                run = next(runs, None)
                more = run is not None
                if run is not None:
                    job = start(server, run)
                    jobs.append(job)
                    for rank, each in enumerate(job.processes):
                        selector.register(each.pipe, selectors.EVENT_READ, (job, rank))
            for job in jobs:
                job.strike()
            soon = min((j.due for j in jobs if j.due and not j.fault_at), default=None)
            wait = 0.05 if soon is None else max(0.0, min(0.05, soon - time.monotonic()))
            for key, _ in selector.select(wait):
                job, rank = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    job.processes[rank].ended = time.monotonic()
                    job.processes[rank].code = server.reap(job.processes[rank].pid)
                    selector.unregister(key.fileobj)
                for line in data.splitlines():
                    job.hear(rank, json.loads(line))
            for job in [job for job in jobs if job.over]:
                jobs.remove(job)
                for each in job.processes:
                    if not each.ended:
                        selector.unregister(each.pipe)
                end(server, job)
                yield job


def wrong(job: Job) -> list[str]:
    """Errors of a job, one line each."""
    problems, run = [], job.run
    for rank, each in enumerate(job.processes):
        sent = SIGNALS.get(run.fault) if rank == run.victim else None
        if each.code is not None and each.code < 0 and each.code != -(sent or 0):
            problems.append(f"rank {rank}: ended by {signal.Signals(-each.code).name}")
        if (rank == run.victim and run.fault != "slow") or not each.wrapping:
            continue
        if run.lasts:
            problems += _not_well(rank, each)
            continue
        late = (
            None if each.error is None or job.fault_at is None else each.error["at"] - job.fault_at
        )
        if each.error is None or late is None:
            end = "ended without a word" if each.ended else "hangs"
            problems.append(f"rank {rank}: {end}")
            continue
        said = each.error.get("text", "done")
        if not _named(run.victim, said) and not _no_store(run, said):
            problems.append(f"rank {rank}: does not name it: {said}")
        if late > run.timeout + LATE:
            problems.append(f"rank {rank}: its error came after {late:.1f} s")
        if each.ended is None:
            problems.append(f"rank {rank}: its process did not end")
        elif each.exit_seconds[0] > EXIT:
            problems.append(f"rank {rank}: it waited {each.exit_seconds[0]:.1f} s as it ended")
    return problems


def _not_well(rank: int, process: Process) -> list[str]:
    """The problem of a rank that was to do its steps."""
    if process.error is None:
        return [f"rank {rank}: " + ("ended without a word" if process.ended else "hangs")]
    text = process.error.get("text")
    return [] if text is None else [f"rank {rank}: {text}"]


def differing(job: Job) -> list[str]:
    """The problem of ranks that did their steps, and have not the same weights."""
    ends = [each.error for each in job.processes if each.error is not None]
    digests = {each["digest"] for each in ends if each.get("digest")}
    return [f"weights differ: {digests}"] if job.run.lasts and len(digests) > 1 else []


def _no_store(run: Run, said: str) -> bool:
    """True if a rank came to its `wrap` when rank 0, which kept the store, had ended with the
    victim: it has met nobody, so it can name the store only."""
    return run.keeper == "rank 0" and run.step < 0 and "cannot use the job's store" in said


def _named(victim: int, said: str) -> bool:
    """True if a rank names the victim in the first line of its error or of a note on it."""
    lines = said.split("\n")
    return any(re.search(rf"\brank (\d+, )*{victim}\b", line) for line in (lines[0], lines[-1]))


def main(
    runs: Annotated[int, typer.Option(help="number of runs")] = 200,
    seed: Annotated[int, typer.Option(help="seed that chooses runs")] = 0,
    fault: Annotated[list[str] | None, typer.Option(help=", ".join(FAULTS))] = None,
    way: Annotated[list[str] | None, typer.Option(help=", ".join(WAYS))] = None,
    codec: Annotated[list[str] | None, typer.Option(help="compressors")] = None,
    only: Annotated[int | None, typer.Option(help="number of the only run")] = None,
    together: Annotated[int, typer.Option(help="runs at a time")] = 4,
    verbose: Annotated[bool, typer.Option(help="show output of failed runs")] = False,
) -> None:
    """Perform runs, and report those that went wrong."""
    numbers = range(runs) if only is None else [only]
    chosen = (Run.draw(n, seed, fault or FAULTS, way or WAYS, codec or ()) for n in numbers)
    server = Server()
    bad, begun = 0, time.monotonic()
    detect: defaultdict[str, list[float]] = defaultdict(list)
    exits: list[tuple[float, float]] = []
    try:
        for job in perform(server, chosen, together):
            problems = wrong(job) + differing(job)
            bad += bool(problems)
            for each in job.others:
                if each.error and job.fault_at:
                    detect[job.run.fault].append(each.error["at"] - job.fault_at)
                    exits.append(each.exit_seconds)
            if problems:
                print(job.run, *problems, sep="\n  ", flush=True)
            if (problems and verbose) or only is not None:
                for rank, each in enumerate(job.processes):
                    each.log.seek(0)
                    print(f"--- rank {rank}\n{each.log.read().decode()}")
    finally:
        server.close()
    print(f"{bad} of {len(numbers)} runs went wrong, {time.monotonic() - begun:.0f} s")
    for name, seconds in detect.items():
        seconds.sort()
        print(
            f"{name}: error after median {seconds[len(seconds) // 2]:.2f}, most {seconds[-1]:.2f}"
        )
    if exits:
        for what, which in (("waited at its end", 0), ("gone", 1)):
            those = sorted(each[which] for each in exits)
            print(f"{what}: median {those[len(those) // 2]:.2f}, most {those[-1]:.2f} s")
    raise typer.Exit(bool(bad))


if __name__ == "__main__":
    typer.run(main)
