"""`hipress bench`: measure methods on a cluster or on emulated hosts, and compare two results."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hipress.tools.demo_command import trained_by
from hipress.tools.refusals import check_device, check_output, refusing
from hipress.tools.run import methods as methods_
from hipress.tools.run import place
from hipress.tools.run.ending import orderly_end
from hipress.tools.run.jobs import LSTM, PROBED, TRACED, Job, Result, Workload
from hipress.tools.run.netns import parse_rate

METHODS = (
    *("none", "ddp-fp32", "ddp-fp16", "hipress:bf16", "powersgd"),
    *("hipress:int4_group", "hipress:onebit_group", "hipress:auto"),
)
TRACED_AFTER = 8  # steps
AS_IT_IS = "as it is"  # rate of links that are not emulated

app = typer.Typer(add_completion=False, help="Measure a cluster, or compare two results.")


@dataclass(frozen=True)
class Request:
    """The options of a benchmark."""

    methods: tuple[str, ...]
    models: tuple[str, ...]
    rates: tuple[str, ...]
    hosts: int
    optimizer: str
    device: str
    steps: int
    rounds: int
    output: Path
    loopback: bool

    def check(self) -> None:
        """Raise ValueError or OSError for options that cannot be measured."""
        methods_.check(methods_.parse_all(",".join(self.methods)), trained_by(self.optimizer))
        for rate in self.rates:
            parse_rate(rate)
        check_device(self.device)
        for model in self.models:
            check_model(model)
        check_output(self.output)


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    methods: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(METHODS),
    model: Annotated[
        list[str] | None,
        typer.Option(help="lstm, or package.module:function that returns (module, inputs)."),
    ] = None,
    rate: Annotated[list[str] | None, typer.Option(help="Rate of emulated links.")] = None,
    hosts: Annotated[int, typer.Option(help="Emulated hosts.", min=2, max=16)] = 2,
    optimizer: Annotated[str, typer.Option(help="sgd or adamw.")] = "adamw",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int, typer.Option(help="Steps of a method in a round.", min=2)] = 20,
    rounds: Annotated[int, typer.Option(help="Rounds, each with its own seed.", min=1)] = 3,
    output: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("bench-output"),
    loopback: Annotated[bool, typer.Option("--loopback", help="Emulate no links.")] = False,
) -> None:
    """Measure methods on the ranks that torchrun, Slurm, MPI or Ray started, or on emulated hosts.

    Writes bench.html and bench.json. Losses are compared from 100 steps on.
    """
    if context.invoked_subcommand is not None:
        return
    request = Request(
        tuple(part.strip() for part in methods.split(",") if part.strip()),
        tuple(model or (LSTM,)), tuple(rate or ("1gbit",)), hosts, optimizer, device, steps,
        rounds, output, loopback,
    )  # fmt: skip
    with refusing("hipress bench"), orderly_end("hipress bench"):
        run(replace(request, optimizer=trained_by(optimizer)))


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
    """Measure, and write bench.html and bench.json. Raises ValueError or OSError for bad input."""
    from hipress.tools.bench.started import Cluster, Started

    request.check()
    if Started.there(os.environ):
        _run_on_cluster(request, Cluster())
    else:
        _run_on_emulated_hosts(request)


def check_model(name: str) -> None:
    """Raise ValueError for a name that is neither a workload nor a function of a module."""
    if name == LSTM:
        return
    where, colon, function = name.partition(":")
    if not (where and colon and function):
        raise ValueError(f"model {name!r}: expected lstm, or package.module:function")
    sys.path.insert(0, "")
    try:
        spec = importlib.util.find_spec(where)
    except ImportError as error:
        raise ValueError(f"model {name!r}: {error}") from error
    if spec is None:
        raise ValueError(f"model {name!r}: no module {where!r}")


def _run_on_cluster(request: Request, cluster: Any) -> None:
    with cluster:
        tell = print if cluster.first else _nothing
        tell(cluster.sentence)
        ranks = cluster.started.ranks
        profile = _probe(request, ranks, cluster.events, tell)
        reports, traces = [], []
        for model in request.models:
            at = ranks, AS_IT_IS
            report = _measure(request, model, cluster.sentence, at, cluster.run, tell)
            reports.append(report)
            traces.append(_trace(report, cluster.events, tell))
        if cluster.first:
            _write(request, reports, traces, profile)


def _run_on_emulated_hosts(request: Request) -> None:
    from hipress.tools.run import runner

    profile, reports, traces = None, [], []
    for rate in ("none",) if request.loopback else request.rates:
        speed = request.rates[0] if request.loopback else rate
        where = place.choose(request.hosts, speed, loopback=request.loopback)
        print(where.sentence)
        with where.enter() as here:
            events, train = partial(runner.events, here), partial(runner.run, here)
            profile = profile or _probe(request, request.hosts, events, print)
            for model in request.models:
                at = request.hosts, rate if where.emulated else "none"
                reports.append(_measure(request, model, where.sentence, at, train, print))
                traces.append(_trace(reports[-1], events, print))
        if not where.emulated:
            break
    _write(request, reports, traces, profile)


def _probe(
    request: Request,
    ranks: int,
    events: Callable[[Job], Sequence[dict[str, Any]]],
    tell: Callable[[str], object],
) -> dict[str, Any] | None:
    """The profile of link and compressors; None, with a message, if that failed."""
    from hipress.tools.run.runner import RunError

    load = Workload(optimizer=request.optimizer, device=request.device)
    try:
        done = events(Job("none", ranks, workload=load, purpose=PROBED))
    except (RunError, OSError) as error:
        tell(f"probe failed: {error}")
        return None
    profile: dict[str, Any] = done[0]["profile"]
    tell(f"probed the link and {len(profile['digests'])} compressors")
    return profile


def _measure(
    request: Request,
    model: str,
    sentence: str,
    at: tuple[int, str],
    run_: Callable[[Job], Result],
    tell: Callable[[str], object],
) -> Any:
    """The report of a model at this number of ranks and rate."""
    from hipress.tools.bench.measure import Suite, measure
    from hipress.tools.run.figures import Report

    suite = Suite(
        request.methods, hosts=at[0], rate=at[1], device=request.device,
        optimizer=request.optimizer, model=model, steps=request.steps, rounds=request.rounds,
        seeds=True,
    )  # fmt: skip
    results = measure(suite, run_, tell)
    command = shlex.join(["hipress", *sys.argv[1:]])
    return Report(sentence, at[0], at[1], request.steps, suite.workload, results, command)


def _trace(
    report: Any, events: Callable[[Job], Sequence[dict[str, Any]]], tell: Callable[[str], object]
) -> list[Any]:
    """A traced step of each method by `hipress.wrap` that ran."""
    from hipress.tools.results import Trace
    from hipress.tools.run.runner import RunError

    traces = []
    for each in report.results:
        parsed = methods_.parse(each.method)
        if each.error or parsed.way != "hipress" or parsed.codec == methods_.AUTO:
            continue
        job = Job(each.method, report.hosts, TRACED_AFTER, report.workload, purpose=TRACED)
        try:
            traces.append(Trace.of(each.method, each.label, events(job)[0]))
            tell(f"traced {each.label}")
        except (RunError, OSError) as error:
            tell(f"{each.label} was not traced: {error}")
    return traces


def _write(
    request: Request, reports: list[Any], traces: list[list[Any]], profile: dict[str, Any] | None
) -> None:
    from rich.console import Console

    from hipress.tools.bench import page
    from hipress.tools.results import Results
    from hipress.tools.run.figures import tables

    results = Results(
        reports, traces, profile, problems=[] if profile else ["The link was not probed."]
    )
    results.write(request.output / "bench.json")
    page.write(results, request.output / "bench.html")
    for report in reports:
        Console().print(tables(report))
    print(f"Report: {request.output / 'bench.html'}   figures: {request.output / 'bench.json'}")
    if all(each.error for report in reports for each in report.results):
        raise typer.Exit(1)


def _nothing(_: str) -> None:
    """Print nothing, on ranks but the first."""
