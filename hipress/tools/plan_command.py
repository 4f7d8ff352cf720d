"""`hipress plan`: the plans of "auto" from a profile, and the rounds of an outer loop."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from hipress import options
from hipress.choose.places import Places
from hipress.choose.plan import Decision, Plan
from hipress.choose.search import Registry, Search, candidates
from hipress.choose.workload import timed
from hipress.errors import ConfigError
from hipress.model.params import Param
from hipress.optim.optimizer_kinds import kind_of
from hipress.outer.schedule import Schedule
from hipress.reporting.text_table import WIDTH, Table
from hipress.tools import profile as profiles
from hipress.tools.models import own
from hipress.tools.models.device_speeds import DEVICES
from hipress.tools.probe_command import AcceptLoss, Device, Optimizer
from hipress.tools.refusals import refusing
from hipress.tools.simulate import cluster as clusters
from hipress.tools.simulate import compared, outer_rounds, sharded, show
from hipress.tools.simulate.simulation import Simulation


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A model of the package; package.module:function, which returns a model, also "
            "with its inputs; or shapes (10000x512,512)."
        ),
    ],
    profile: Annotated[Path, typer.Option(help="File of `hipress probe`.")] = Path("profile.json"),
    optimizer: Optimizer = None,
    accept_loss: AcceptLoss = None,
    step: Annotated[
        float, typer.Option(help="Milliseconds of a step without communication.", min=0)
    ] = 0.0,
    every: Annotated[
        int | None,
        typer.Option(
            help="Also predict hipress.Outer between the profile's nodes, with so many local "
            "steps; needs --step."
        ),
    ] = None,
    delay: Annotated[
        int | None, typer.Option(help="Steps that a round of --every may travel.")
    ] = None,
    fragments: Annotated[
        int | None, typer.Option(help="Parts of the model, in turn, of --every.")
    ] = None,
    device: Device = "cpu",
    sharding: Annotated[
        str | None,
        typer.Option(
            help="fsdp2 or hsdp: instead, the methods of `hipress simulate --sharding` on the "
            "profile."
        ),
    ] = None,
) -> None:
    """Print the plans that "auto" would try for a model on a profile, with reasons by tensor; for
    a GPU also the device that compresses. It needs no GPU."""
    with refusing():
        wanted = options.make("auto", optimizer=optimizer, accept_loss=accept_loss)
        read, codecs = _read(profile), candidates(wanted, "reference")
        description = own.find(model)
        params = description.params
        if read.device != device:
            raise ConfigError(
                f"{profile} is for models on {read.device}, not {device}: add --device "
                f"{read.device}, or measure one by hipress probe --device {device}"
            )
        schedule = outer_rounds.schedule_of(every, delay, fragments, sharding)
        shards = _shards(read, description, sharding, step)
        loop = _rounds(read, description, schedule, step)
    for difference in read.differences(codecs):
        typer.echo(f"warning: {profile} may not hold here: {difference}", err=True)
    if shards is not None:
        _show_shards(shards, description.backwards, kind_of(optimizer))
        return
    known = {name: codec for name, codec in codecs.items() if name in read.digests}
    places = Places.read(
        Search(params, Registry(known, wanted), wanted, read.topology), read.places
    )
    for assumption in description.assumed if step else ():
        typer.echo(f"assumed: {assumption}", err=True)
    alone = description.model.timed(DEVICES["v100" if device == "cuda" else "cpu"].speed)
    alone = alone.scaled(step * 1e-3)
    workload = timed(description.backwards, alone.ready, alone.forward)
    _show(places.plans(workload), params, places.reasons(workload) if device == "cuda" else ())
    if loop is not None:
        print("\n" + textwrap.fill(show.rounds(loop), WIDTH))


def _rounds(
    read: profiles.Profile, description: own.Description, schedule: Schedule | None, step: float
) -> outer_rounds.Rounds | None:
    """Rounds of an outer loop on the profile's link, as `hipress simulate` predicts them. step:
    milliseconds. Raises ConfigError."""
    if schedule is None:
        return None
    if not step:
        raise ConfigError("--every: rounds are compared with steps: add --step MILLISECONDS")
    methods = [compared.parse(each) for each in compared.DEFAULTS]
    simulation = Simulation(clusters.probed(read), description, methods, step * 1e-3)
    return outer_rounds.predict(simulation, description, schedule, step * 1e-3)


def _shards(
    read: profiles.Profile, description: own.Description, sharding: str | None, step: float
) -> sharded.ShardSimulation | None:
    """The model's shards on the profile's link, as `hipress simulate` predicts them. step:
    milliseconds. Raises ConfigError."""
    if sharding is None:
        return None
    return sharded.simulation(sharding, clusters.probed(read), description, step=step * 1e-3)


def _show_shards(
    simulation: sharded.ShardSimulation, params: Sequence[Param], optimizer: str | None
) -> None:
    """Print the methods, fastest first, and the choices of the first one by tensor."""
    first, *_ = outcomes = simulation.outcomes()
    table = Table(f"Methods of {first.strategy}, {simulation.cluster}")
    table.add_columns(["method", "loss"], ["ms a step", "MB a node"])
    for each in outcomes:
        loss = simulation.methods[each.method].loss(optimizer)
        table.add_row(each.method, loss, f"{each.step * 1e3:.2f}", f"{each.node_bytes / 1e6:.2f}")
    table.print()
    for argument, decisions in simulation.decisions(first.method).items():
        table = Table(f"\n{argument} of {first.method}, by tensor")
        table.add_columns(["tensor", "choice", "why"])
        for param, decision in zip(params, decisions, strict=True):
            table.add_row(param.named_shape, _way(decision), decision.why)
        table.print()


def _read(path: Path) -> profiles.Profile:
    """The profile of this file. Raises ConfigError that tells what writes one."""
    try:
        return profiles.read(path)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\nA profile is measured on the ranks of your job, by `torchrun "
            "--nproc-per-node 2 --no-python hipress probe`, or predicted for a described cluster, "
            "by `hipress simulate CLUSTER.yaml MODEL --profile profile.json`."
        ) from error


def _show(plans: Sequence[Plan], params: Sequence[Param], reasons: Iterable[str]) -> None:
    table = Table("Tried, in this order")
    table.add_columns(["plan"], ["ms a step"])
    for each in plans:
        table.add_row(each.label, f"{each.seconds * 1e3:.2f}")
    table.print()
    print(f"\n{plans[0].label}: {plans[0].why}")
    for line in reasons:
        print(line)
    table = Table("\nThe first, by tensor")
    table.add_columns(["tensor", "choice", "why"])
    for param, decision in zip(params, plans[0].decisions, strict=True):
        table.add_row(param.named_shape, _way(decision), decision.why)
    table.print()


def _way(decision: Decision) -> str:
    cut = f", {decision.partitions} parts" if decision.partitions > 1 else ""
    return f"{decision.codec or 'no compression'} ({decision.strategy}{cut})"
