"""Readers on damaged payloads, specs and files.

    python -m bench.fuzz [--payloads 1000000] [--specs 100000] [--files 100000] [--seconds 0]

Each damaged input must be refused by an error that is meant for it, or be taken and read alike by
all readers; nothing may crash or take long. Trial i of a kind depends on the seed and i alone: a
finding names them, and `--kind specs --first i --specs 1` runs that one again. `--files` are
states, rules, profiles, clusters and results, as many of each. Some texts are nested
deep, have aliases of aliases, or are huge.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from bench.commands import RESULTS, command_line, now, refusing
from bench.fuzz_inputs import KINDS, quiet
from compll.files import write_json

CHUNK = {"payloads": 20_000, "specs": 500, "rules": 500}  # trials of a process; others: 5000
LONGEST = 20  # seconds of a trial
TOLD = 20  # findings of a kind that are kept


@dataclass
class Tally:
    """Outcomes of trials of one kind."""

    kind: str
    trials: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.trials += other.trials
        for outcome, count in other.outcomes.items():
            self.count(outcome, count)
        self.findings += other.findings
        self.seconds += other.seconds

    def count(self, outcome: str, count: int = 1) -> None:
        """Count more trials with this outcome."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count


def run(kind: str, trials: int, seed: int = 0, first: int = 0, seconds: float = 0.0) -> Tally:
    """Run trials of one kind in this process, for at most `seconds` (0: without a limit)."""
    with quiet():
        return _run(kind, trials, seed, first, seconds)


def _run(kind: str, trials: int, seed: int, first: int, seconds: float) -> Tally:
    trial, tally = KINDS[kind][1](), Tally(kind)
    before = signal.signal(signal.SIGALRM, _too_long)
    begun = time.perf_counter()
    for number in range(first, first + trials):
        signal.alarm(LONGEST)
        try:
            outcome = trial(Random(f"{seed} {kind} {number}"))
        except BaseException as error:
            outcome = "found"
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            tally.findings.append(
                f"seed {seed} trial {number}: {type(error).__name__} at {where}: {error}"[:500]
            )
            if isinstance(error, KeyboardInterrupt):
                raise
        finally:
            signal.alarm(0)
        tally.count(outcome)
        tally.trials += 1
        if 0 < seconds <= time.perf_counter() - begun:
            break
    signal.signal(signal.SIGALRM, before)
    tally.seconds = time.perf_counter() - begun
    return tally


def _too_long(*_: object) -> None:
    raise TimeoutError(f"a trial takes more than {LONGEST} s")


def apart(kind: str, trials: int, seed: int, first: int, seconds: float) -> Tally:
    """The same as `run`, in processes of some trials each: a crash or a leak ends with one."""
    tally, at = Tally(kind), first
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["bench.fuzz_inputs"])
    while at < first + trials and not 0 < seconds <= tally.seconds:
        count = min(CHUNK.get(kind, 5000), first + trials - at)
        left = seconds - tally.seconds if seconds else 0.0
        with ProcessPoolExecutor(1, forked) as pool:
            try:
                tally.add(pool.submit(run, kind, count, seed, at, left).result())
            except BrokenProcessPool:
                tally.findings.append(
                    f"seed {seed} trials {at} to {at + count - 1}: a process crashed"
                )
                tally.trials += count
        at += count
        outcomes = ", ".join(f"{n} {what}" for what, n in sorted(tally.outcomes.items()))
        print(f"{kind}: {tally.trials} of {trials}: {outcomes}; {tally.seconds:.0f} s", flush=True)
    return tally


def main(
    payloads: Annotated[
        int, typer.Option(min=0, help="Damaged payloads of every spec.")
    ] = 1_000_000,
    specs: Annotated[int, typer.Option(min=0, help="Damaged texts of specs.")] = 100_000,
    files: Annotated[
        int, typer.Option(min=0, help="Damaged files of each other kind, together.")
    ] = 100_000,
    seed: int = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Limit for each kind; 0: none.")] = 0.0,
    kind: Annotated[list[str] | None, typer.Option(help="The only kind; may repeat.")] = None,
    first: Annotated[int, typer.Option(min=0, help="Number of the first trial.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder of fuzz.json.")] = RESULTS,
) -> None:
    """Run the trials, print findings, and write fuzz.json after each kind.

    Exit status 1 if there are findings. Rows of other kinds stay.
    """
    with refusing():
        if unknown := set(kind or ()) - set(KINDS):
            raise ValueError(f"no kind {unknown.pop()!r}: choose from {', '.join(KINDS)}")
        output.mkdir(parents=True, exist_ok=True)
        path = output / "fuzz.json"
        rows = json.loads(path.read_text()) if path.is_file() else {}
    trials = {
        "payloads": payloads,
        "specs": specs,
        "files": files // sum(option == "files" for option, _ in KINDS.values()),
    }
    findings = 0
    for each in (name for name in KINDS if name in (kind or KINDS)):
        tally = apart(each, trials[KINDS[each][0]], seed, first, seconds)
        findings += len(tally.findings)
        for finding in tally.findings:
            print(f"{each}: {finding}")
        about = {"command": command_line("bench.fuzz"), "date": now(), "seed": seed, "first": first}
        summary = {"findings": tally.findings[:TOLD], "found": len(tally.findings)}
        rows[each] = about | asdict(tally) | summary
        write_json(path, rows)
    raise typer.Exit(int(findings > 0))


if __name__ == "__main__":
    typer.run(main)
