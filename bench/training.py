"""Step times of the demo's workload: the figures of the README.

    python -m bench.training                      # every group, about half an hour on two cores
    python -m bench.training --group hosts2       # one of them
    python -m bench.training --group slow --steps 20 --rounds 1 --output somewhere
    torchrun --nnodes 2 ... -m bench.training --group here     # a real cluster: see bench/here.py

The methods of a group take turns, round after round, so that a slow minute of the machine falls on
all of them; a figure is the median over the timed steps of all rounds. Links are emulated
(hipress/demo/netns.py). Writes GROUP.json and GROUP.md. Losses: bench/losses.py.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.commands import RESULTS, given, refusing
from hipress.demo import methods as methods_
from hipress.demo import place, runner
from hipress.demo.command import check_device, check_optimizer, check_output
from hipress.demo.ending import orderly_end
from hipress.demo.job import Job, Result, Workload
from hipress.demo.methods import ALONE, DEFAULTS
from hipress.demo.netns import parse_rate
from hipress.demo.report import Report, markdown, markdown_table, rows

_STEPS = (
    *(*ALONE, *(name for name in DEFAULTS if name not in ALONE)),
    *("hipress:auto", "sync:onebit_group"),
)
HERE = "here"  # the ranks that were started, on links as they are
TRIAL = 80  # steps: three are watched, four plans take 14 each, and codecs are compiled meanwhile
_DGC = "dgc:ratio=0.01:bits=16"


@dataclass(frozen=True)
class Group:
    """A table: its methods run on the same links with the same workload."""

    methods: tuple[str, ...]
    hosts: int = 2
    rate: str = "1gbit"
    device: str = "cpu"
    optimizer: str = "sgd"
    steps: int = 20
    rounds: int = 3
    loopback: bool = False

    @property
    def workload(self) -> Workload:
        """What its methods train."""
        return Workload(optimizer=self.optimizer, device=self.device)


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
    HERE: Group(_STEPS),
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


def measure(
    group: Group, run: Callable[[Job], Result], tell: Callable[[str], object] = print
) -> list[Result]:
    """A result per method, its rounds put together."""
    results: dict[str, list[Result]] = {method: [] for method in group.methods}
    for number in range(group.rounds):
        for method in group.methods:
            results[method].append(_timed(method, group, run))
            tell(f"round {number + 1}/{group.rounds} {describe(results[method][-1])}")
    return [merge(rounds) for rounds in results.values()]


def _timed(method: str, group: Group, run: Callable[[Job], Result]) -> Result:
    """Of "auto" the steps after its trial are timed; losses are of as many steps as for others."""
    job = Job(method, group.hosts, group.steps, group.workload)
    if methods_.parse(method).codec == methods_.AUTO:
        job = dataclasses.replace(job, steps=TRIAL + group.steps, untimed=TRIAL)
    made = run(job)
    return dataclasses.replace(made, losses=made.losses[: group.steps])


def merge(rounds: Sequence[Result]) -> Result:
    """The timed steps of all rounds one after the other; the rest is the last round's.

    Rounds that failed are dropped while another has not, and the label says so.
    """
    good = [each for each in rounds if each.error is None]
    if not good:
        return rounds[-1]
    seconds = [value for each in good for value in each.timed]
    same = None if good[-1].identical is None else all(each.identical for each in good)
    tried = [plan for each in good for plan in each.tried]
    lost = len(rounds) - len(good)
    label = good[-1].label + (f" ({lost} of {len(rounds)} rounds failed)" if lost else "")
    return dataclasses.replace(
        good[-1], label=label, warmup=0, seconds=seconds, identical=same, tried=tried
    )


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


def predictions(results: Sequence[Result]) -> list[str]:
    """Of each plan that "auto" tried: the step as predicted and as measured, and how far apart."""
    tried = [plan for result in results for plan in result.tried if plan["step_seconds"]]
    if not tried:
        return []
    head = ('tried by "auto"', "predicted ms", "step ms", "off", "")
    found = [abs(off(plan)) for plan in tried]
    middle, worst = statistics.median(found), max(found)
    told = f"Predictions are off by {middle:.0%} in the median, at most {worst:.0%}."
    return ["", *markdown_table(head, map(prediction, tried)).splitlines(), "", told]


def prediction(plan: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a plan that was tried."""
    times = (f"{1e3 * plan[key]:.0f}" for key in ("predicted_seconds", "step_seconds"))
    return (plan["plan"], *times, f"{off(plan):+.0%}", plan["verdict"])


def off(plan: dict[str, Any]) -> float:
    """How much longer a step was predicted to take than it took, relative."""
    return float(plan["predicted_seconds"] / plan["step_seconds"] - 1)


def write(name: str, report: Report, folder: Path) -> None:
    """Writes the JSON and the table with its verdicts."""
    report.write(folder / f"{name}.json")
    lines = [f"# {name}: {report.place}", "", f"`{report.command}`, {report.date}", ""]
    lines += [", ".join(f"{key} {value}" for key, value in report.versions.items()), ""]
    lines += [markdown(report), *predictions(report.results), ""]
    lines += [*(f"- {verdict}" for verdict in verdicts(name, report.results))]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def main(
    group: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(GROUPS)}.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated, instead of the group's.")] = "",
    steps: Annotated[int | None, typer.Option(help="Instead of the group's.", min=2)] = None,
    rounds: Annotated[int | None, typer.Option(help="Instead of the group's.", min=1)] = None,
    rate: Annotated[str, typer.Option(help="Of links, instead of the group's.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda: where the model trains.")] = "cpu",
    optimizer: Annotated[str, typer.Option(help="sgd (rate 1, clipping .25) or adamw.")] = "sgd",
    output: Annotated[Path, typer.Option(help="Folder for JSON and tables.")] = RESULTS,
) -> None:
    """Measures groups of methods and says which targets are met."""
    chosen_methods = tuple(part.strip() for part in methods.split(",") if part.strip())
    with refusing():  # before the others take their time
        _check(group or (), chosen_methods, rate, device, optimizer)
        check_output(output)
    for name in group or (each for each in GROUPS if each != HERE):
        usual = GROUPS[name]
        chosen = dataclasses.replace(
            usual,
            methods=chosen_methods or usual.methods,
            steps=steps or usual.steps,
            rounds=rounds or usual.rounds,
            rate=rate or usual.rate,
            device=device,
            optimizer=optimizer,
        )
        (_measure_here if name == HERE else _measure_and_write)(name, chosen, output)


def _check(
    groups: Sequence[str], methods: Sequence[str], rate: str, device: str, optimizer: str
) -> None:
    """ValueError for what is no group, method, speed, device and optimizer."""
    for name in groups:
        if name not in GROUPS:
            raise ValueError(f"unknown group {name!r}; choose from: {', '.join(GROUPS)}")
    methods_.check([methods_.parse(text) for text in methods])
    if rate:
        parse_rate(rate)
    check_device(device)
    check_optimizer(optimizer)


def _measure_and_write(name: str, group: Group, output: Path) -> None:
    where = place.choose(group.hosts, group.rate, loopback=group.loopback)
    print(f"{name}: {where.sentence}")
    if not where.emulated and not group.loopback:
        print(f"{name}: skipped, its links cannot be emulated here")
        return
    with where.enter() as entered:
        results = measure(group, lambda job: runner.run(entered, job))
    rate = "none" if group.loopback else group.rate
    _write_and_tell(name, where.sentence, rate, group, results, output)


def _measure_here(name: str, group: Group, output: Path) -> None:
    """On the ranks that were started; rank 0 tells and writes."""
    from bench.here import Cluster

    with refusing():
        cluster = Cluster()
    group = dataclasses.replace(group, hosts=cluster.started.ranks)
    with cluster:
        cluster.probe()
        tell = print if cluster.first else lambda text: None
        tell(f"{name}: {cluster.sentence}")
        results = measure(group, cluster.run, tell)
        if cluster.first:
            _write_and_tell(name, cluster.sentence, "as it is", group, results, output)


def _write_and_tell(
    name: str, where: str, rate: str, group: Group, results: list[Result], output: Path
) -> None:
    command = given("bench.training")
    report = Report(where, group.hosts, rate, group.steps, group.workload, results, command)
    write(name, report, output)
    print("\n".join([markdown(report), *verdicts(name, report.results)]))


if __name__ == "__main__":
    with orderly_end("bench.training"):
        typer.run(main)
