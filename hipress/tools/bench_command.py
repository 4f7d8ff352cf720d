"""`hipress bench`: measure methods on a cluster or on emulated hosts, and compare two results."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hipress.tools.bench.measure import Suite, measure
from hipress.tools.refusals import check_device, check_output, refusing
from hipress.tools.run import methods as methods_
from hipress.tools.run import runner
from hipress.tools.run.ending import orderly_end
from hipress.tools.run.figures import Report, failures, rows, tables
from hipress.tools.run.jobs import (
    LSTM,
    PROBED,
    TRACED,
    Job,
    Result,
    Workload,
    check_model,
    trained_by,
)
from hipress.tools.run.netns import parse_rate

if TYPE_CHECKING:
    from hipress.tools.bench.started import Cluster
    from hipress.tools.results import Trace

METHODS = (
    *("none", "ddp-fp32", "ddp-fp16", "hipress:bf16", "powersgd"),
    *("hipress:int4_group", "hipress:onebit_group", "hipress:auto"),
)
TRACED_AFTER = 8  # steps
MOST = 16  # ranks of emulated hosts
AS_IT_IS = "as it is"  # rate of links that are not emulated
Events = Callable[[Job], Sequence[dict[str, Any]]]
Run = Callable[[Job, runner.OnStep], Result]
Tell = Callable[[str], object]

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Request:
    """The options of a benchmark. quick: neither probe the link nor trace steps."""

    suite: Suite
    models: tuple[str, ...]
    rates: tuple[str, ...]
    output: Path
    quick: bool = False

    def check(self) -> None:
        """Raise ValueError or OSError for options that cannot be measured."""
        suite = self.suite
        if suite.steps < 2:
            raise ValueError(f"{suite.steps} steps: expected 2 or more")
        if suite.hosts < 1 or suite.ranks < 2:
            raise ValueError(f"{suite.ranks} ranks: expected 2 or more, which exchange gradients")
        methods_.check(methods_.parse_all(",".join(suite.methods)), suite.optimizer)
        for rate in self.rates:
            parse_rate(rate)
        check_device(suite.device)
        for model in self.models:
            check_model(model)
        check_output(self.output)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A minute or a few: one round, no probe, no traced steps."),
    ] = False,
    methods: Annotated[
        str | None,
        typer.Option(
            help="With commas: ddp-bf16, powersgd, fsdp2, fsdp2-bf16, hsdp, and hipress:CODEC, "
            "momentum:CODEC, sync:CODEC, shard:CODEC, hsdp:CODEC, outer:CODEC, each with "
            ":option=value.",
            show_default=", ".join(METHODS),  # with spaces, at which help may break lines
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="lstm, or package.module:function that returns (module, inputs)."),
    ] = None,
    rate: Annotated[
        list[str] | None, typer.Option(help="Rate of emulated links, 100kbit to 100gbit.")
    ] = None,
    hosts: Annotated[int, typer.Option(help="Emulated hosts.")] = 2,
    ranks_per_host: Annotated[int, typer.Option(help="Ranks of an emulated host.")] = 1,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="sgd (rate 1, clipping .25) or adamw (.002, 1).",
            show_default="adamw; with --quick sgd",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of a method in a round.", show_default="20; --quick: 60"),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Rounds, each with its own seed.", min=1, show_default="3; --quick: 1"),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("bench-output"),
    loopback: Annotated[bool, typer.Option("--loopback", help="Emulate no links.")] = False,
) -> None:
    """Measure methods on the ranks that torchrun, Slurm, MPI or Ray started, or on emulated hosts.

    Trains a language model of 12M parameters, or --model, with each method in turns. Writes
    bench.html, bench.json and bench.png. Losses are compared from 100 steps on.
    """
    if context.invoked_subcommand is not None:
        return
    usual = methods_.DEFAULTS if quick else METHODS
    chosen = usual if methods is None else tuple(filter(None, map(str.strip, methods.split(","))))
    with refusing("hipress bench"), orderly_end("hipress bench"):
        suite = Suite(
            chosen, hosts=hosts, per_host=ranks_per_host, device=device,
            optimizer=trained_by(optimizer or ("sgd" if quick else "adamw")),
            steps=(60 if quick else 20) if steps is None else steps,
            rounds=rounds or (1 if quick else 3), loopback=loopback, seeds=True,
        )  # fmt: skip
        models, rates = tuple(model or (LSTM,)), tuple(rate or ("1gbit",))
        run(Request(suite, models, rates, output, quick))


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="A bench.json file.")],
    after: Annotated[Path, typer.Argument(help="Another bench.json file.")],
) -> None:
    """Print the differences of two results in steps and losses, and of their machines."""
    from hipress.reporting.text_table import Table
    from hipress.tools import results

    with refusing("hipress bench"):
        one, two = results.Results.read(before), results.Results.read(after)
    for line in results.differences(one, two):
        typer.echo(f"warning: {line}", err=True)
    changes = results.compare(one, two)
    if not changes:
        typer.echo("hipress bench: no method was measured alike in both", err=True)
        raise typer.Exit(1)
    table = Table("Differences")
    table.add_columns(["where", "method"], ["ms before", "ms after", "change"])
    table.add_columns([""], ["loss", "loss after"])
    for each in changes:
        table.add_row(
            each.where, each.label, f"{1e3 * each.before:.0f}", f"{1e3 * each.after:.0f}",
            f"{each.change:+.1%}", each.verdict, f"{each.loss_before:.3f}",
            f"{each.loss_after:.3f}",
        )  # fmt: skip
    table.print()


def run(request: Request) -> None:
    """Measure, and write the report. Raises ValueError or OSError for bad input."""
    from hipress.tools.bench.started import Cluster, Started

    if Started.there(os.environ):
        with Cluster() as cluster:
            _run_on_cluster(request, cluster)
    else:
        if request.suite.ranks > MOST:
            raise ValueError(f"{request.suite.ranks} ranks on one machine: expected at most {MOST}")
        request.check()
        _run_on_emulated_hosts(request)


def _run_on_cluster(request: Request, cluster: Cluster) -> None:
    suite = replace(
        request.suite, hosts=cluster.ranks // cluster.per_host, per_host=cluster.per_host,
        rate=AS_IT_IS,
    )  # fmt: skip
    replace(request, suite=suite).check()
    with _shown(cluster.first) as bars:
        tell = partial(_tell, bars)
        tell(cluster.sentence)
        profile = _probe(request, suite, cluster.events, tell)
        reports, traces = [], []
        for model in request.models:
            own = replace(suite, model=model)
            reports.append(
                _measure(own, cluster.sentence, partial(_barred, bars, cluster.run), tell)
            )
            traces.append(_trace(request, reports[-1], cluster.events, tell))
    if cluster.first:
        _write(request, reports, traces, profile)


def _run_on_emulated_hosts(request: Request) -> None:
    profile, reports, traces = None, [], []
    with _shown(True) as bars:
        tell = partial(_tell, bars)
        for rate in request.rates:
            suite = replace(request.suite, rate=rate)
            where = suite.place()
            tell(where.sentence[:1].upper() + where.sentence[1:])
            with where.enter() as here:
                events, train = partial(runner.events, here), partial(runner.run, here)
                profile = profile or _probe(request, suite, events, tell)
                for model in request.models:
                    own = replace(suite, model=model, rate=rate if where.emulated else "none")
                    watched = partial(_barred, bars, train)
                    reports.append(_measure(own, where.sentence, watched, tell))
                    traces.append(_trace(request, reports[-1], events, tell))
            if not where.emulated:
                break
    _write(request, reports, traces, profile)


@contextmanager
def _shown(first: bool) -> Iterator[Progress | None]:
    """Bars of progress, on the first rank."""
    if not first:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn()) as bars:
        yield bars


def _tell(bars: Progress | None, line: str) -> None:
    """Print a line, on the first rank."""
    if bars is not None:
        bars.console.print(line, markup=False, highlight=False, soft_wrap=True)


def _barred(bars: Progress | None, train: Run, job: Job) -> Result:
    """Train, with a bar of the steps."""
    if bars is None:
        return train(job, lambda done: None)
    task = bars.add_task(methods_.parse(job.method).label, total=job.steps)
    try:
        return train(job, lambda done: bars.update(task, completed=done))
    finally:
        bars.remove_task(task)


def _probe(request: Request, suite: Suite, events: Events, tell: Tell) -> dict[str, Any] | None:
    """The profile of link and compressors; None, with a message, if that failed."""
    if request.quick:
        return None
    load = Workload(optimizer=suite.optimizer, device=suite.device)
    job = Job("none", suite.ranks, workload=load, purpose=PROBED, per_host=suite.per_host)
    try:
        done = events(job)
    except (runner.RunError, OSError) as error:
        tell(f"probe failed: {error}")
        return None
    profile: dict[str, Any] = done[0]["profile"]
    tell(f"probed the link and {len(profile['digests'])} compressors")
    return profile


def _measure(suite: Suite, sentence: str, train: Callable[[Job], Result], tell: Tell) -> Report:
    """The report of a suite's model at its rate."""
    results = measure(suite, train, tell)
    command = shlex.join(["hipress", *sys.argv[1:]])
    return suite.report(sentence, results, command)


def _trace(request: Request, report: Report, events: Events, tell: Tell) -> list[Trace]:
    """A traced step of each method by `hipress.wrap` that ran."""
    from hipress.tools.results import Trace

    traces: list[Trace] = []
    for each in () if request.quick else report.results:
        parsed = methods_.parse(each.method)
        if each.error or parsed.way != "hipress" or parsed.codec == methods_.AUTO:
            continue
        job = Job(
            each.method, report.hosts, TRACED_AFTER, report.workload, purpose=TRACED,
            per_host=report.per_host,
        )  # fmt: skip
        try:
            traces.append(Trace.of(each.method, each.label, events(job)[0]))
            tell(f"traced {each.label}")
        except (runner.RunError, OSError) as error:
            tell(f"{each.label} was not traced: {error}")
    return traces


def _write(
    request: Request,
    reports: list[Report],
    traces: list[list[Trace]],
    profile: dict[str, Any] | None,
) -> None:
    from hipress.tools import charts
    from hipress.tools.bench import page
    from hipress.tools.results import Results

    problems = [] if profile or request.quick else ["The link was not probed."]
    results = Results(reports, traces, profile, problems=problems)
    html, json, png = (request.output / f"bench.{kind}" for kind in ("html", "json", "png"))
    results.write(json)
    page.write(results, html)
    console = Console()
    for report in reports:
        console.print(tables(report))
        for line in failures(report):
            console.print(f"failed: {line}", style="red", highlight=False, markup=False)
    if rows(reports[0].results):
        charts.draw(reports[0], png)
    console.print(f"Report: {html}   chart: {png}   figures: {json}", soft_wrap=True)
    if all(each.error for report in reports for each in report.results):
        raise typer.Exit(1)
