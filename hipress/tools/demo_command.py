"""`hipress demo`: trains with several methods, one after the other, and shows the cost of each."""

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from hipress.optim.optimizer_kinds import kind_of
from hipress.tools.refusals import check_device, check_output, refusing
from hipress.tools.run import methods, place
from hipress.tools.run.ending import orderly_end
from hipress.tools.run.jobs import Job, Result, Workload, patience


def demo(
    hosts: Annotated[
        int, typer.Option(help="Processes; as root on Linux each on a host of its own.")
    ] = 2,
    rate: Annotated[str, typer.Option(help="Speed of every link, 100kbit to 100gbit.")] = "1gbit",
    steps: Annotated[int, typer.Option(help="Training steps of each method.")] = 60,
    method_list: Annotated[
        str | None,
        typer.Option(
            "--methods",
            help="Comma-separated; hipress:CODEC[:option=value].",
            show_default=", ".join(methods.DEFAULTS),  # with spaces, at which help may break lines
        ),
    ] = None,
    outer: Annotated[
        bool,
        typer.Option(
            "--outer",
            help="Rounds between sites (hipress.Outer) beside one bit of momentum and DDP, in "
            "place of --methods.",
        ),
    ] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="sgd (rate 1, clipping .25) or adamw (.002, 1).",
            show_default="sgd, with --outer adamw",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the model: cpu or cuda.")] = "cpu",
    output: Annotated[Path, typer.Option(help="Folder for the chart and the figures.")] = Path(
        "demo-output"
    ),
    loopback: Annotated[
        bool, typer.Option("--loopback", help="No emulated links even as root.")
    ] = False,
) -> None:
    """Train a 12M-parameter language model over throttled links, with and without compression."""
    with refusing("hipress demo"):
        if outer and method_list is not None:
            raise ValueError("--outer names methods, as --methods does: leave one out")
        named = methods.BESIDE_OUTER if outer else methods.DEFAULTS
        chosen = methods.parse_all(method_list or ",".join(named))
        optimizer = trained_by(optimizer or ("adamw" if outer else "sgd"))
        methods.check(chosen, optimizer)
        _check(hosts, steps)
        check_device(device)
        where = place.choose(hosts, rate, loopback=loopback)
        check_output(output)
    workload = Workload(optimizer=optimizer, device=device)
    jobs = [Job(each.text, hosts, steps, workload, patience(hosts, rate)) for each in chosen]
    console = Console()
    console.print(where.sentence[:1].upper() + where.sentence[1:])
    with orderly_end("hipress demo"):
        results = _train(console, where, jobs)
    _show(console, where, jobs[0], results, output)


def trained_by(optimizer: str) -> str:
    """The workload's optimizer that a name stands for, sgd or adamw. Raises ValueError."""
    kind = kind_of(optimizer)
    if optimizer.lower() not in ("sgd", "adam", "adamw"):
        raise ValueError(f"optimizer {optimizer!r}: the workload trains with sgd or adamw")
    return "adamw" if kind == "adam" else "sgd"


def _check(hosts: int, steps: int) -> None:
    if not 2 <= hosts <= 16:
        raise ValueError(f"--hosts {hosts}: expected 2 to 16, which exchange gradients")
    if not 2 <= steps <= 100_000:
        raise ValueError(f"{steps} steps: expected 2 to 100000")


def _train(console: Console, where: place.Choice, jobs: Sequence[Job]) -> list[Result]:
    from hipress.tools.run import runner

    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    results = []
    with (
        where.enter() as here,
        Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as bars,
    ):
        tasks = [_bar(bars, job) for job in jobs]
        for task, job in zip(tasks, jobs, strict=True):
            bars.start_task(task)
            result = runner.run(here, job, partial(_advance, bars, task))
            bars.update(task, note=_note(result))
            bars.stop_task(task)
            results.append(result)
    return results


def _bar(bars: Progress, job: Job) -> TaskID:
    label = methods.parse(job.method).label
    return bars.add_task(label, total=job.steps, start=False, note="")


def _advance(bars: Progress, task: TaskID, done: int) -> None:
    bars.update(task, completed=done)


def _note(result: Result) -> str:
    from hipress.tools.run.figures import rows

    return "[red]failed" if result.error else f"{1e3 * rows([result])[0].median:.0f} ms a step"


def _show(
    console: Console, where: place.Choice, job: Job, results: list[Result], output: Path
) -> None:
    from hipress.tools import charts
    from hipress.tools.run import figures

    command = shlex.join(["hipress", *sys.argv[1:]])
    rate = where.rate if where.emulated else "none"
    done = figures.Report(
        where.sentence, job.hosts, rate, job.steps, job.workload, results, command
    )
    done.write(output / "demo.json")
    console.print(figures.tables(done))
    for line in figures.failures(done):
        console.print(f"[red]failed[/red] {line}", highlight=False)
    if figures.rows(results):
        charts.draw(done, output / "demo.png")
        console.print(f"Chart: {output / 'demo.png'}   figures: {output / 'demo.json'}")
    if len(figures.failures(done)) == len(results):
        raise typer.Exit(1)
