"""`hipress trace`: a real step of each rank and its prediction, in one file for Perfetto."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hipress.tools.refusals import check_device, check_output, refusing
from hipress.tools.run import methods, place
from hipress.tools.run.ending import orderly_end
from hipress.tools.run.jobs import LSTM, TRACED, Job, Workload, check_model, trained_by


def trace(
    method: Annotated[
        str, typer.Option(help="hipress:CODEC[:option=value].")
    ] = "hipress:int4_group",
    model: Annotated[
        str, typer.Option(help="lstm, or package.module:function that returns (module, inputs).")
    ] = LSTM,
    optimizer: Annotated[str, typer.Option(help="sgd or adamw.")] = "adamw",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    hosts: Annotated[int, typer.Option(help="Emulated hosts.", min=2, max=16)] = 2,
    rate: Annotated[str, typer.Option(help="Rate of emulated links, such as 1gbit.")] = "1gbit",
    loopback: Annotated[bool, typer.Option("--loopback", help="Emulate no links.")] = False,
    steps: Annotated[int, typer.Option(help="Steps before the traced one.", min=4)] = 12,
    output: Annotated[Path, typer.Option(help="File for ui.perfetto.dev.")] = Path("trace.json"),
) -> None:
    """Trace a training step on every rank, beside the step that the planner predicts.

    Runs on the ranks that torchrun, Slurm or MPI started, or on emulated hosts.
    """
    with refusing("hipress trace"), orderly_end("hipress trace"):
        optimizer = trained_by(optimizer)
        _check(method, model, device, output)
        where = place.choose(hosts, rate, loopback=loopback)
        load = Workload(optimizer=optimizer, device=device, model=model)
        _run(Job(method, hosts, steps, load, purpose=TRACED), where, output)


def _check(method: str, model: str, device: str, output: Path) -> None:
    parsed = methods.parse(method)
    if parsed.way != "hipress" or parsed.codec == methods.AUTO:
        raise ValueError(
            f"method {method!r}: expected a compressor by hipress.wrap, such as hipress:int4_group"
        )
    methods.check([parsed])
    check_model(model)
    check_device(device)
    check_output(output.parent)


def _run(job: Job, where: place.Choice, output: Path) -> None:
    import dataclasses
    import os

    from hipress.tools.bench.started import Cluster, Started
    from hipress.tools.run import runner

    try:
        if not Started.there(os.environ):
            print(where.sentence)
            with where.enter() as here:
                _write(runner.events(here, job), output)
            return
        with Cluster() as cluster:
            events = cluster.events(dataclasses.replace(job, hosts=cluster.started.ranks))
            if cluster.first:
                print(cluster.sentence)
                _write(events, output)
    except runner.RunError as error:
        print(f"hipress trace: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _write(events: Sequence[dict[str, Any]], output: Path) -> None:
    from hipress.reporting.text_table import Table
    from hipress.tools.tracing import spans

    processes = [
        *(_process(f"rank {rank}", each["spans"]) for rank, each in enumerate(events)),
        _process("predicted", events[0]["predicted"]),
    ]
    spans.write(processes, output)
    table = Table("Where a step's time goes")
    table.add_columns(["ms"], ["rank 0", "predicted", "off"])
    for row in spans.comparison(processes[0], processes[-1]):
        table.add_row(*row)
    table.add_row("backward pass alone", f"{1e3 * events[0]['alone']:.1f}", "", "")
    table.print()
    print(f"{output}: open it at ui.perfetto.dev")


def _process(name: str, rows: Sequence[Sequence[Any]]) -> Any:
    from hipress.tools.tracing.spans import Process, Span

    return Process(name, tuple(Span(*each) for each in rows))
