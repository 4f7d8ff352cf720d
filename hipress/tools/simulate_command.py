"""`hipress simulate`: predict a model's step on a cluster that is described in a file."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compll.files import write_json
from hipress.errors import ConfigError
from hipress.optim.optimizer_kinds import kind_of
from hipress.reading import SHARE
from hipress.reporting.text_table import WIDTH
from hipress.tools.models import own
from hipress.tools.models.device_speeds import Device
from hipress.tools.refusals import refusing
from hipress.tools.simulate import cluster as clusters
from hipress.tools.simulate import compared, outer_rounds, predictions, sharded, show
from hipress.tools.simulate.compared import BASELINE, FP32
from hipress.tools.simulate.profiles import write_profile
from hipress.tools.simulate.simulation import Simulation

__all__ = ["simulate"]


def simulate(
    cluster: Annotated[
        Path,
        typer.Argument(
            help="A YAML file that describes the cluster: nodes, ranks_per_node, device, and the "
            "bandwidth of its links, between and inside nodes."
        ),
    ],
    model: Annotated[
        str,
        typer.Argument(
            help="A model of the package (bert-large); package.module:function, which returns a "
            "model and its inputs; or shapes (10000x512,512)."
        ),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="fp32, or a compressor such as dgc:ratio=0.01; with --sharding, of gradients and "
            "weights, such as int4_group+int8_group, or fp32+bf16; may be repeated."
        ),
    ] = None,
    sharding: Annotated[
        str | None,
        typer.Option(
            help="fsdp2: the model is sharded over all ranks; hsdp: over those of a node, and "
            "averaged between nodes. See hipress.shard. By default as the cluster file says."
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(help="Also predict hipress.Outer between nodes, with so many local steps."),
    ] = None,
    delay: Annotated[
        int | None, typer.Option(help="Steps that a round of --every may travel.")
    ] = None,
    fragments: Annotated[
        int | None, typer.Option(help="Parts of the model, in turn, of --every.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="Optimizer of the training, such as sgd or adamw: for loss and memory."),
    ] = None,
    step: Annotated[
        float | None,
        typer.Option(help="Milliseconds of one rank's step without communication.", min=1e-3),
    ] = None,
    micro_batches: Annotated[
        int,
        typer.Option(help="Micro-batches of a step, whose gradients add up on each rank.", min=1),
    ] = 1,
    bandwidth_for: Annotated[
        str,
        typer.Option(help="Print the least bandwidth that reaches this efficiency, such as 90%."),
    ] = "",
    chart: Annotated[Path | None, typer.Option(help="Draw efficiency by bandwidth: a PNG.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Draw a step's lanes: a PNG.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write everything as JSON.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Write the costs as a profile, from which `hipress plan` plans."),
    ] = None,
) -> None:
    """Predict a training step on a cluster, by method, before the cluster exists.

    hipress simulate cluster.yaml bert-large --chart crossover.png
    """
    gc.freeze()  # else each full collection, of which parts make some, looks at all of torch: 0.2 s
    with refusing():
        case = clusters.read(cluster), own.find(model)
        sharding = sharding or case[0].sharding
        schedule = outer_rounds.schedule_of(every, delay, fragments, sharding)
        seconds = None if step is None else step * 1e-3
        if schedule is not None and micro_batches > 1:
            raise ConfigError(
                "--every counts steps without micro-batches: leave --micro-batches out"
            )
        simulation = _simulation(sharding, *case, method or (), seconds, micro_batches)
        table = predictions.table(simulation, kind_of(optimizer))
        loop = None
        if schedule is not None:
            loop = outer_rounds.predict(simulation, case[1], schedule, seconds)
        if profile is not None:
            write_profile(profile, simulation.cluster, optimizer)
        wanted = _share(bandwidth_for) if bandwidth_for else None
        if sharding is not None and timeline is not None:
            raise ConfigError("--timeline draws a step of DDP: leave --sharding out")
    show.show(table)
    if loop is not None:
        print(textwrap.fill(show.rounds(loop), WIDTH))
    if isinstance(simulation, sharded.ShardSimulation):
        told = sharded.faster_by_replicas(simulation, table.rows[0], kind_of(optimizer))
        print(textwrap.fill(told, WIDTH), end="\n" * bool(told))
    _warn(simulation.cluster.device, table, sharding is not None)
    if wanted is not None:
        _tell_bandwidths(simulation, wanted)
    _write(simulation, table, loop, chart, timeline, output)


def _simulation(
    sharding: str | None,
    cluster: clusters.Cluster,
    model: own.Description,
    methods: Sequence[str],
    step: float | None,
    micro_batches: int,
) -> Simulation:
    """The simulation of replicas, or of shards. Raises ConfigError."""
    if sharding is None:
        parsed = [compared.parse(each) for each in methods or compared.DEFAULTS]
        return Simulation(cluster, model, parsed, step, micro_batches)
    return sharded.simulation(sharding, cluster, model, methods, step, micro_batches)


def _warn(device: Device, table: predictions.Table, shards: bool) -> None:
    """Warn on standard error if a rank's memory does not hold the model."""
    least = min(row.memory for row in table.rows)
    advice = "shard the model over more ranks"
    if not shards:
        advice = (
            "shard the model by FSDP2 (--sharding fsdp2), and let hipress.Synchronizer average the "
            "replicas"
        )
    if 0 < device.holds < least:
        typer.echo(
            f"warning: weights, gradients and states take {least / 1e9:,.0f} GB a rank, and "
            f"{device.name} is assumed to have {device.holds / 1e9:.0f}: {advice}",
            err=True,
        )


def _share(text: str) -> float:
    share = SHARE.read(text)
    if isinstance(share, str) or not 0 < share < 1:
        raise ConfigError(f"--bandwidth-for {text}: expected a share such as 90%")
    return share


def _tell_bandwidths(simulation: Simulation, wanted: float) -> None:
    """Print, by method, the least bandwidth that reaches the wanted efficiency."""
    for method in simulation.methods:
        least = simulation.bandwidth_for(method, wanted)
        text = "no link is enough" if least is None else f"from {show.bandwidth(least)} on"
        typer.echo(f"{method} reaches {wanted:.0%}: {text}")


def _write(
    simulation: Simulation,
    table: predictions.Table,
    loop: outer_rounds.Rounds | None,
    chart: Path | None,
    timeline: Path | None,
    output: Path | None,
) -> None:
    curve = predictions.curve(simulation) if chart or output else None
    timelines = [predictions.timeline(simulation, each) for each in _drawn(simulation, table)]
    if chart is not None and curve is not None:
        from hipress.tools import charts

        charts.draw_prediction(table, curve, chart)
    if timeline is not None:
        from hipress.tools import charts

        charts.draw_timelines(timelines, timeline)
    if output is not None:
        data = predictions.to_dict(table, curve, timelines)
        if loop is not None:
            data["outer"] = asdict(loop) | {"training": loop.training}
        write_json(output, data)


def _drawn(simulation: Simulation, table: predictions.Table) -> Sequence[str]:
    """The baseline and the fastest codec; nothing of a sharded model."""
    if isinstance(simulation, sharded.ShardSimulation):
        return ()
    ours = [r.outcome.method for r in table.rows if r.outcome.method not in (FP32, BASELINE)]
    base = [name for name in (BASELINE, FP32) if name in simulation.methods]
    return [*base[:1], *ours[:1]]
