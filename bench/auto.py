""" "auto" beside the best method that a person could choose, cell by cell.

    python -m bench.auto                                    # all cells, about an hour on two cores
    python -m bench.auto --hosts 2 --rate 1gbit --optimizer adamw

A cell is a number of hosts, a link and an optimizer, with the demo's workload. It compares
`hipress.wrap(model, optimizer=...)` after its trial, each of its candidates of few bits by itself,
and DDP in 32 and 16 bits. Cells are lines of auto.jsonl; auto.md has the tables of all of them.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from bench.commands import RESULTS, command_line, now, refusing
from hipress import options
from hipress.choose.search import candidates
from hipress.tools.bench.measure import Suite, describe, measure, off, prediction
from hipress.tools.refusals import check_output
from hipress.tools.run import place, runner
from hipress.tools.run.ending import orderly_end
from hipress.tools.run.figures import markdown_table, percentile, versions_here
from hipress.tools.run.jobs import Job, Result
from hipress.tools.run.netns import parse_rate

#: methods that need no planner; DDP's own hook for bf16 needs a GPU
DDP = ("ddp-fp32", "ddp-fp16", "hipress:bf16")
FEW = 5  # bits per element: methods with more are DDP in 16 bits, or slower than one with less
LOOPBACK = "loopback"  # a rate
HOSTS, RATES, OPTIMIZERS = (2, 4), ("100mbit", "1gbit", "10gbit", LOOPBACK), ("sgd", "adamw")
FIRST = 100  # steps of a job that should take little longer than with DDP in fp16
PATIENCE = 30.0  # seconds that a baseline's gradients may take on the link, in all its steps
LIMITS = {"fixed": 1.05, "ddp": 1.03, "first": 1.10}


@dataclass(frozen=True)
class Steps:
    """A method's step times. Seconds."""

    median: float
    low: float  # 10th percentile
    high: float  # 90th percentile
    first: float  # of FIRST steps; of a method with fewer, its median for those that it lacks
    payload_bytes: float | None  # of a rank in a step
    identical: bool | None

    @classmethod
    def of(cls, result: Result, first: float) -> Self:
        """Combine the rounds of a method."""
        times = result.timed
        ends = percentile(times, 0.1), percentile(times, 0.9)
        same, sent = result.identical, result.payload_bytes
        return cls(statistics.median(times), *ends, first, sent, same)


@dataclass(frozen=True)
class Cell:
    """A line of auto.jsonl."""

    hosts: int
    rate: str
    optimizer: str
    methods: dict[str, Steps]
    tried: list[dict[str, Any]]  # by "auto", in all rounds: plan.trial.Tried
    rounds: int
    date: str
    command: str
    versions: dict[str, str]

    @property
    def key(self) -> tuple[int, str, str]:
        """The identity of a cell."""
        return self.hosts, self.rate, self.optimizer

    @classmethod
    def parse(cls, line: str) -> Self:
        """Read a line that `json.dumps(asdict(cell))` wrote."""
        data = json.loads(line)
        data["methods"] = {name: Steps(**each) for name, each in data["methods"].items()}
        return cls(**data)

    @property
    def auto(self) -> Steps:
        """The times of "auto"."""
        return self.methods[_auto(self.optimizer)]

    def best(self, *, ddp: bool) -> str:
        """The fastest of DDP's methods, or of single candidates."""
        others = [name for name in self.methods if name != _auto(self.optimizer)]
        names = [name for name in others if (name in DDP) == ddp]
        return min(names, key=lambda name: self.methods[name].median)

    @property
    def ratios(self) -> dict[str, float]:
        """Ratios of auto's times to those of others, by the keys of LIMITS."""
        fp16, step = self.methods["ddp-fp16"], self.auto.median
        fixed, ddp = (self.methods[self.best(ddp=each)].median for each in (False, True))
        return {"fixed": step / fixed, "ddp": step / ddp, "first": self.auto.first / fp16.first}

    @property
    def off(self) -> list[float]:
        """Relative errors of predictions, over the steps."""
        return [abs(off(each)) for each in self.tried if each["step_seconds"]]


def _auto(optimizer: str) -> str:
    return f"hipress:auto:optimizer={optimizer}"


def methods(optimizer: str) -> tuple[str, ...]:
    """The methods of a cell; single ones are auto's candidates of few bits."""
    size = 1 << 20
    fixed = [
        f"hipress:{name.replace(' ', ':')}"
        for name, codec in candidates(
            options.make("auto", optimizer=optimizer), "reference"
        ).items()
        if 8 * codec.payload_bytes(size) <= FEW * size
    ]
    return (*DDP, *fixed, _auto(optimizer))


def run_cell(hosts: int, rate: str, optimizer: str, rounds: int) -> Cell:
    """Run a cell. Raises RuntimeError if links cannot be emulated, or a method failed."""
    loopback = rate == LOOPBACK
    group = Suite(
        methods(optimizer), hosts, "1gbit" if loopback else rate, optimizer=optimizer,
        rounds=rounds, loopback=loopback,
    )  # fmt: skip
    first: dict[str, list[float]] = {}
    where = place.choose(group.hosts, group.rate, loopback=loopback)
    if not (where.emulated or loopback):
        raise RuntimeError(where.sentence)
    with where.enter() as entered:

        def run(job: Job) -> Result:
            result = runner.run(entered, job if loopback else _shortened(job, rate))
            if result.error is not None:
                raise RuntimeError(describe(result))
            first.setdefault(job.method, []).append(_first(result))
            return result

        results = measure(group, run)
    steps = {each.method: Steps.of(each, statistics.median(first[each.method])) for each in results}
    about = (now(), command_line("bench.auto"), versions_here())
    return Cell(hosts, rate, optimizer, steps, results[-1].tried, rounds, *about)


def _shortened(job: Job, rate: str) -> Job:
    """The job with fewer steps if DDP sends it over a slow link; "auto" keeps all of its steps."""
    if job.method not in DDP:
        return job
    bits = 8 * 4 * job.workload.parameters * 2 * (job.hosts - 1) / job.hosts
    return replace(job, steps=max(8, min(job.steps, int(PATIENCE * parse_rate(rate) / bits))))


def _first(result: Result) -> float:
    """Seconds of the first steps of a job; see Steps."""
    first = result.seconds[:FIRST]
    return sum(first) + (FIRST - len(first)) * statistics.median(result.timed)


def tables(cells: Sequence[Cell]) -> Iterator[str]:
    """All recorded cells, as Markdown tables."""
    yield markdown_table(
        ("hosts, link, optimizer", "auto", "ms", "best of its candidates", "ms", "ratio",
         "best of DDP", "ms", "ratio", "first 100 steps, s", "fp16", "ratio"),
        [list(_compared(cell)) for cell in cells],
    )  # fmt: skip
    yield ""
    for name, limit in LIMITS.items():
        missed = [cell for cell in cells if cell.ratios[name] > limit]
        yield f"- {_WHAT[name]}, at most {limit:g}: {len(cells) - len(missed)} of {len(cells)} met"
    errors = [each for cell in cells for each in cell.off]
    if errors:
        yield f"- predictions are off by {statistics.median(errors):.0%} in the median, at most "
        yield f"  {max(errors):.0%}, of {len(errors)} plans that were tried"
    yield ""
    head = ("hosts, link, optimizer", "tried", "predicted ms", "ms", "off", "")
    yield markdown_table(head, [row for cell in cells for row in _plans(cell)])


_WHAT = {
    "fixed": "auto beside the best of its candidates",
    "ddp": "auto beside the best of DDP in 32 and 16 bits",
    "first": "the first 100 steps beside DDP in fp16",
}


def _compared(cell: Cell) -> Iterator[str]:
    plans = [each["plan"] for each in cell.tried if each["verdict"] == "kept"]
    yield from (_name(cell), " / ".join(dict.fromkeys(plans)), _ms(cell.auto.median))
    for ddp, ratio in ((False, "fixed"), (True, "ddp")):
        name = cell.best(ddp=ddp)
        yield from (f"`{name.removeprefix('hipress:')}`", _ms(cell.methods[name].median))
        yield _judged(cell, ratio)
    yield f"{cell.auto.first:.1f}"
    yield f"{cell.methods['ddp-fp16'].first:.1f}"
    yield _judged(cell, "first")


def _judged(cell: Cell, ratio: str) -> str:
    value = cell.ratios[ratio]
    return f"{value:.2f}" if value <= LIMITS[ratio] else f"**{value:.2f}**"


def _plans(cell: Cell) -> Iterator[tuple[str, ...]]:
    for each in cell.tried:
        if each["step_seconds"]:
            yield (_name(cell), *prediction(each))


def _name(cell: Cell) -> str:
    return f"{cell.hosts}, {cell.rate}, {cell.optimizer}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def record(cells: Sequence[Cell], folder: Path) -> list[Cell]:
    """Add the cells to those recorded, replacing older ones; returns all of them, in order."""
    path = folder / "auto.jsonl"
    old = map(Cell.parse, path.read_text().splitlines()) if path.exists() else ()
    every = {cell.key: cell for cell in (*old, *cells)}
    places = [*itertools.product(HOSTS, RATES, OPTIMIZERS)]
    ordered = sorted(every.values(), key=lambda cell: places.index(cell.key))
    path.write_text("".join(json.dumps(asdict(cell)) + "\n" for cell in ordered))
    lines = ["# `auto`, cell by cell", "", *tables(ordered)]
    (folder / "auto.md").write_text("\n".join(lines) + "\n")
    return ordered


def main(
    hosts: Annotated[list[int] | None, typer.Option(help="Hosts: 2 or 4; by default both.")] = None,
    rate: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(RATES)}.")] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="sgd or adamw; by default both.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds; methods take turns.", min=1)] = 1,
    output: Annotated[Path, typer.Option(help="Folder of auto.jsonl and auto.md.")] = RESULTS,
) -> None:
    """Measure cells, and report where auto misses its targets."""
    chosen = (hosts or HOSTS, rate or RATES, optimizer or OPTIMIZERS)
    with refusing():
        for wanted, known in zip(chosen, (HOSTS, RATES, OPTIMIZERS), strict=True):
            for each in wanted:
                if each not in known:
                    raise ValueError(f"{each!r}: choose from {', '.join(map(str, known))}")
        check_output(output)
    for key in itertools.product(*chosen):
        print(f"{key[0]} hosts, {key[1]}, {key[2]}")
        try:
            cell = run_cell(*key, rounds)
        except RuntimeError as error:
            print(f"skipped: {error}")
            continue
        record([cell], output)
        print("\n".join(tables([cell])))


if __name__ == "__main__":
    with orderly_end("bench.auto"):
        typer.run(main)
