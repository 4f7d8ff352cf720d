"""Step times of the demo's workload: the figures of the README.

    python -m bench.training                      # every group, about half an hour on two cores
    python -m bench.training --group hosts2       # one of them
    python -m bench.training --group slow --steps 20 --rounds 1 --output somewhere

The methods of a group take turns, round after round, so that a slow minute of the machine falls on
all of them; a figure is the median over the timed steps of all rounds. Links are emulated
(hipress/demo/netns.py). Writes GROUP.json and GROUP.md. Losses: bench/losses.py.
"""

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hipress.demo import methods as methods_
from hipress.demo import place, runner
from hipress.demo.job import Job, Result, Workload
from hipress.demo.methods import ALONE, DEFAULTS
from hipress.demo.netns import parse_rate
from hipress.demo.report import Report, markdown, rows

RESULTS = Path(__file__).parent / "results"
_STEPS = (
    *(*ALONE, *(name for name in DEFAULTS if name not in ALONE)),
    *("hipress:auto", "sync:onebit_group"),
)
_DGC = "dgc:ratio=0.01:bits=16"


@dataclass(frozen=True)
class Group:
    """A table: its methods run on the same links with the same workload."""

    methods: tuple[str, ...]
    hosts: int = 2
    rate: str = "1gbit"
    steps: int = 20
    rounds: int = 3
    loopback: bool = False


@dataclass(frozen=True)
class Target:
    """`method` takes at most `limit` times what `versus` takes."""

    group: str
    method: str
    versus: str
    limit: float


GROUPS = {
    "hosts2": Group(_STEPS),
    "hosts4": Group(_STEPS, hosts=4),
    "slow": Group(
        (*ALONE, "ddp-fp16", "powersgd", f"hipress:{_DGC}", f"sync:{_DGC}", "hipress:auto"),
        rate="100mbit",
    ),
    "loopback": Group(("ddp-fp32", "hipress:auto"), loopback=True, steps=40, rounds=5),
}

TARGETS = (
    Target("hosts2", "hipress:onebit_group", "ddp-fp16", 0.55),
    Target("hosts2", "hipress:onebit_group", "none", 1.2),
    Target("hosts2", "sync:onebit_group", "none", 1.15),
    Target("hosts2", "hipress:int4_group", "ddp-fp16", 0.62),
    Target("hosts4", "hipress:onebit_group", "ddp-fp16", 0.60),
    Target("hosts4", "hipress:int4_group", "ddp-fp16", 0.68),
    Target("hosts4", "hipress:onebit_group", "none", 1.15),
    Target("hosts4", "sync:onebit_group", "none", 1.12),
    Target("slow", f"hipress:{_DGC}", "powersgd", 0.60),
    Target("slow", f"sync:{_DGC}", "none", 1.2),
    Target("loopback", "hipress:auto", "ddp-fp32", 1.03),
)


def measure(group: Group, where: place.Choice) -> list[Result]:
    """A result per method, its rounds put together."""
    results: dict[str, list[Result]] = {method: [] for method in group.methods}
    with where.enter() as here:
        for number in range(group.rounds):
            for method in group.methods:
                job = Job(method, group.hosts, group.steps)
                results[method].append(runner.run(here, job))
                print(f"round {number + 1}/{group.rounds} {describe(results[method][-1])}")
    return [merge(rounds) for rounds in results.values()]


def merge(rounds: Sequence[Result]) -> Result:
    """The timed steps of all rounds one after the other; the rest is the last round's.

    Rounds that failed are dropped while another has not.
    """
    good = [each for each in rounds if each.error is None]
    if not good:
        return rounds[-1]
    seconds = [value for each in good for value in each.timed]
    same = None if good[-1].identical is None else all(each.identical for each in good)
    return dataclasses.replace(good[-1], warmup=0, seconds=seconds, identical=same)


def describe(result: Result) -> str:
    """A line for the person who waits."""
    if result.error is not None:
        return f"{result.label}: failed: {result.error}"
    row = rows([result])[0]
    return f"{result.label}: {1e3 * row.median:.0f} ms a step, loss {row.loss:.3f}"


def verdicts(name: str, results: Sequence[Result]) -> Iterator[str]:
    """A line for each target of the group: met, missed, or not measured."""
    found = {row.result.method: row for row in rows(results)}
    for target in (each for each in TARGETS if each.group == name):
        what = f"{target.method} against {target.versus}, step time"
        if target.method in found and target.versus in found:
            ratio = found[target.method].median / found[target.versus].median
            met = "met" if ratio <= target.limit else "MISSED"
            yield f"{what}: {ratio:.3f}, at most {target.limit:g}: {met}"
        else:
            yield f"{what}: not measured"


def write(name: str, report: Report, folder: Path) -> None:
    """Writes the JSON and the table with its verdicts."""
    folder.mkdir(parents=True, exist_ok=True)
    report.write(folder / f"{name}.json")
    lines = [f"# {name}: {report.place}", "", f"`{report.command}`, {report.date}", ""]
    lines += [", ".join(f"{key} {value}" for key, value in report.versions.items()), ""]
    lines += [markdown(report), *(f"- {verdict}" for verdict in verdicts(name, report.results))]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def main(
    group: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(GROUPS)}.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated, instead of the group's.")] = "",
    steps: Annotated[int | None, typer.Option(help="Instead of the group's.", min=2)] = None,
    rounds: Annotated[int | None, typer.Option(help="Instead of the group's.", min=1)] = None,
    rate: Annotated[str, typer.Option(help="Of links, instead of the group's.")] = "",
    output: Annotated[Path, typer.Option(help="Folder for JSON and tables.")] = RESULTS,
) -> None:
    """Measures groups of methods and says which targets are met."""
    unknown = sorted(set(group or ()) - set(GROUPS))
    if unknown:
        print(f"unknown group {unknown[0]!r}; choose from: {', '.join(GROUPS)}", file=sys.stderr)
        raise typer.Exit(2)
    given = tuple(part.strip() for part in methods.split(",") if part.strip())
    _check(given, rate, output)
    for name in group or GROUPS:
        usual = GROUPS[name]
        chosen = dataclasses.replace(
            usual,
            methods=given or usual.methods,
            steps=steps or usual.steps,
            rounds=rounds or usual.rounds,
            rate=rate or usual.rate,
        )
        _measure_and_write(name, chosen, output)


def _check(given: Sequence[str], rate: str, output: Path) -> None:
    """Refuses what is no method, no speed and no folder, before the others take their time."""
    try:
        methods_.check([methods_.parse(text) for text in given])
        if rate:
            parse_rate(rate)
        output.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None


def _measure_and_write(name: str, group: Group, output: Path) -> None:
    where = place.choose(group.hosts, group.rate, loopback=group.loopback)
    print(f"{name}: {where.sentence}")
    if not where.emulated and not group.loopback:
        print(f"{name}: skipped, its links cannot be emulated here")
        return
    results = measure(group, where)
    command = shlex.join(["python", "-m", "bench.training", *sys.argv[1:]])
    rate = "none" if group.loopback else group.rate
    report = Report(where.sentence, group.hosts, rate, group.steps, Workload(), results, command)
    write(name, report, output)
    print("\n".join([markdown(report), *verdicts(name, report.results)]))


if __name__ == "__main__":
    typer.run(main)
