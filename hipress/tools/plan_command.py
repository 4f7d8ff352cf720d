"""`hipress probe` and `hipress plan`: measurements in a file, and the plans of "auto" from it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import torch.distributed as dist
import typer

from casync.cost import Line
from casync.errors import TransportError
from hipress import options
from hipress.auto.candidates import candidates
from hipress.auto.places import Places
from hipress.auto.registry import Registry
from hipress.auto.search import Search
from hipress.auto.workload import timed
from hipress.errors import ConfigError, HipressError
from hipress.model.devices import NCCL, ON_HOST, Placement, place
from hipress.model.params import Param
from hipress.plan.plan import Decision, Plan
from hipress.ranks import coordinator as coordinators
from hipress.ranks import nodes
from hipress.ranks.link import Agreement
from hipress.reporting.text_table import Table
from hipress.tools import profile as profiles
from hipress.tools.models import own
from hipress.tools.models.device_speeds import DEVICES

Optimizer = Annotated[
    str | None, typer.Option(help="Optimizer of the training, such as sgd or adamw.")
]


AcceptLoss = Annotated[
    float | None,
    typer.Option(help="Share of the loss that auto may lose, such as 0.01; needs --optimizer."),
]
Device = Annotated[str, typer.Option(help="Device of the model: cpu or cuda.")]


def probe(
    output: Annotated[Path, typer.Option(help="File that rank 0 writes.")] = Path("profile.json"),
    optimizer: Optimizer = None,
    accept_loss: AcceptLoss = None,
    device: Device = "cpu",
    transport: Annotated[
        str, typer.Option(help="Transport of a GPU: nccl, nccl4py, pynccl or staged.")
    ] = "nccl",
) -> None:
    """Measure link and compressors on the ranks that torchrun started, and write a profile.

    For a GPU it measures the compressors of the GPU, and those of the CPU with copies.

    torchrun --nproc-per-node 2 --no-python hipress probe
    """
    _check_device(device)
    if "RANK" not in os.environ:
        _fail("start it on every rank: torchrun --nproc-per-node 2 --no-python hipress probe")
    if device == "cuda" and not torch.cuda.is_available():
        _fail("--device cuda: torch finds no CUDA device here")
    dist.init_process_group("gloo")
    try:
        wanted = options.make("auto", optimizer=optimizer, accept_loss=accept_loss)
        measure_profile(output, wanted, _placement(device, transport))
    except (HipressError, TransportError) as error:
        _fail(str(error))
    finally:
        dist.destroy_process_group()


def _placement(device: str, transport: str) -> Placement:
    """Placement of this rank, which takes one of the host's GPUs in turn."""
    if device == "cuda":
        count, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if ranks > count and transport in NCCL:
            _fail(f"{ranks} ranks share {count} GPUs, which NCCL refuses: add --transport staged")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % count)
    return placed(device, transport)


def placed(device: str, transport: str) -> Placement:
    """Placement for a model on the current device."""
    if device == "cpu":
        return ON_HOST
    return place([("a model", torch.device("cuda", torch.cuda.current_device()))], transport, {})


def measure_profile(output: Path, wanted: options.Options, placement: Placement) -> None:
    """Measure link and the compressors that "auto" may take by these options, on all ranks of the
    default group; rank 0 writes the profile.

    Raises HipressError or TransportError."""
    assert dist.group.WORLD is not None
    coordinator = coordinators.coordinator(dist.group.WORLD, wanted.timeout)
    with coordinator.failures_told():
        if coordinator.rank == 0:
            profiles.refuse_unwritable(output)
        codecs = candidates(wanted, placement.target)
    facts = {"codecs": sorted(codecs), "transport": placement.transport}
    spots = coordinator.require_equal(facts, nodes.place())
    topology = nodes.topology_of(None, spots, coordinator.ranks)
    search = Search((), Registry(codecs, wanted, placement.target), wanted, topology)
    with coordinator.failures_told():
        places = Places.of(search, coordinator, placement)
        places.use_compiled(places.compile())
    link, begun = Agreement(coordinator, "probe"), time.perf_counter()
    measured = link.run(places.measure, "measuring the link")
    if coordinator.rank == 0:
        profiles.write(output, measured.by_name, topology, codecs, placement.device.type)
        seconds = time.perf_counter() - begun
        typer.echo(
            f"{output}: {topology}, {len(codecs)} compressors, {seconds:.1f} s; "
            f"{_told(measured.told.exchange[1].line)}",
            err=True,
        )
    coordinator.require_equal({"written": True})
    places.close()


def _told(line: Line) -> str:
    """Text on the measured link."""
    bits = 8e-9 / line.per_byte if line.per_byte > 0 else math.inf
    return (
        f"a message to another rank takes {line.latency * 1e3:.2f} ms and goes at {bits:.3g} Gbit/s"
    )


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
    device: Device = "cpu",
) -> None:
    """Print the plans that "auto" would try for a model on a profile, with reasons by tensor; for
    a GPU also the device that compresses. It needs no GPU."""
    _check_device(device)
    try:
        wanted = options.make("auto", optimizer=optimizer, accept_loss=accept_loss)
        read, codecs = _read(profile), candidates(wanted, "reference")
        found = own.find(model)
        params = found.params
        if read.device != device:
            raise ConfigError(
                f"{profile} is for models on {read.device}, not {device}: add --device "
                f"{read.device}, or measure one by hipress probe --device {device}"
            )
    except HipressError as error:
        _fail(str(error))
    for difference in read.differences(codecs):
        typer.echo(f"warning: {profile} may not hold here: {difference}", err=True)
    known = {name: codec for name, codec in codecs.items() if name in read.digests}
    places = Places.read(
        Search(params, Registry(known, wanted), wanted, read.topology), read.places
    )
    for assumption in found.assumed if step else ():
        typer.echo(f"assumed: {assumption}", err=True)
    alone = found.model.timed(DEVICES["v100" if device == "cuda" else "cpu"].speed)
    alone = alone.scaled(step * 1e-3)
    workload = timed(found.backwards, alone.ready, alone.forward)
    _show(places.plans(workload), params, places.reasons(workload) if device == "cuda" else ())


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


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        _fail(f"unknown device {device!r}; choose from: cpu, cuda")


def _show(plans: Sequence[Plan], params: Sequence[Param], reasons: Iterable[str]) -> None:
    table = Table("Tried, in this order")
    table.add_columns(["plan"], ["ms a step"])
    for each in plans:
        table.add_row(each.label, f"{each.seconds * 1e3:.2f}")
    table.print()
    print(f"\n{plans[0].label}: {plans[0].why}")
    for line in reasons:
        print(line)
    table = Table(
        "\nThe first, by tensor",
        "gain: ms that a step would take longer if this tensor alone had no codec; otherwise: with "
        "the next best. Tensors share lanes, so gains do not add up.",
    )
    table.add_columns(["tensor", "choice", "why"], ["gain"])
    table.add_columns(["otherwise"], ["ms"])
    for param, decision in zip(params, plans[0].decisions, strict=True):
        cells = [param.named_shape, _way(decision), decision.why, _ms(decision.gain)]
        table.add_row(*cells, decision.runner_up or "-", _ms(decision.margin))
    table.print()


def _way(decision: Decision) -> str:
    cut = f", {decision.partitions} parts" if decision.partitions > 1 else ""
    return f"{decision.codec or 'no compression'} ({decision.strategy}{cut})"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def _fail(message: str) -> NoReturn:
    typer.echo(f"hipress: {message}", err=True)
    raise typer.Exit(2)
