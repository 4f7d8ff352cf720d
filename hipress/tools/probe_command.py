"""`hipress probe`: measurements of the link and the compressors, in a file."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from casync.cost import Line
from hipress import options
from hipress.choose.places import Places
from hipress.choose.search import Registry, Search, candidates
from hipress.errors import ConfigError
from hipress.model.devices import NCCL, ON_HOST, Placement, place
from hipress.ranks import coordinator as coordinators
from hipress.ranks import nodes
from hipress.ranks.groups import Agreement
from hipress.tools import profile as profiles
from hipress.tools.refusals import check_device, refusing

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
    with refusing():
        check_device(device)
        if "RANK" not in os.environ:
            raise ConfigError(
                "start it on every rank: torchrun --nproc-per-node 2 --no-python hipress probe"
            )
        dist.init_process_group("gloo")
        try:
            wanted = options.make("auto", optimizer=optimizer, accept_loss=accept_loss)
            measure_profile(output, wanted, _placement(device, transport))
        finally:
            dist.destroy_process_group()


def _placement(device: str, transport: str) -> Placement:
    """Placement of this rank, which takes one of the host's GPUs in turn."""
    if device == "cuda":
        count, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if ranks > count and transport in NCCL:
            raise ConfigError(
                f"{ranks} ranks share {count} GPUs, which NCCL refuses: add --transport staged"
            )
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
            f"{_describe(measured.reported.exchange[1].line)}",
            err=True,
        )
    coordinator.require_equal({"written": True})
    places.close()


def _describe(line: Line) -> str:
    """Text on the measured link."""
    bits = 8e-9 / line.per_byte if line.per_byte > 0 else math.inf
    return (
        f"a message to another rank takes {line.latency * 1e3:.2f} ms and goes at {bits:.3g} Gbit/s"
    )
