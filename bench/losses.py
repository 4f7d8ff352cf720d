"""Losses under codecs: a cell for each seed, workload and method, recorded as it ends.

    python -m bench.losses                          # every cell that is not recorded yet
    python -m bench.losses --workload gpt --steps 200 --method topk:ratio=0.01 --seeds 3

Ranks are imitated in one process (bench/loss_ranks.py), on one thread: a cell takes seconds to
minutes on one core. Those of PyTorch's hooks are processes (bench/loss_hooks.py). Cells are lines
of losses.jsonl, so a run that was stopped continues there. `python -m bench.pages` then makes
the tables and the evidence that hipress reads.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from bench import loss_hooks
from bench.commands import check_codecs, command_line, now, refusing
from bench.loss_cells import BASELINES, CELLS, FP32, MOMENTUM, SHARDED, TRIAL, Cell, read, spec_of
from bench.loss_ranks import Averaged, Compressed, Curve, Tried, fp32, train
from bench.loss_workloads import ALL, WORKLOADS, Workload
from hipress.tools.run import methods as methods_
from hipress.tools.run.figures import FINAL
from hipress.tools.run.synchronize import Synchronized

FREEZE = 0.15  # of the steps: when Adam's second moments are frozen
#: PyTorch's own methods: their names here, and in `hipress demo`
HOOKS = {ours: name for name, ours in BASELINES.items() if ours != FP32}
#: by value: methods that auto or a user would take first
METHODS = (
    *(FP32, "int4_group", "int3_group", "tern_group", "onebit_group", "powersgd:rank=4"),
    *("bf16", "torch-powersgd:rank=4", "topk:ratio=0.01", "dgc:ratio=0.01", "terngrad"),
    *("int8_group", "qsgd", "natural", "fp16", "none"),
    *("momentum:onebit_fine", "momentum:onebit_fine:group=64"),
)


def curve(workload: str, method: str, seed: int, steps: int) -> tuple[Curve, int]:
    """Train once; returns the result and the number of parameters."""
    chosen = ALL[workload]
    model = chosen.build(seed)
    numel = sum(p.numel() for p in model.parameters())
    if method.startswith(SHARDED):
        return loss_hooks.curve(workload, method, seed, steps, chosen.ranks), numel
    if method in HOOKS:
        return loss_hooks.curve(workload, HOOKS[method], seed, steps, chosen.ranks), numel
    if method.startswith(MOMENTUM):
        return _averaged(chosen, model, method, seed, steps), numel
    average: Any = nullcontext(fp32)
    if method != FP32:
        kind = Tried if method.startswith(TRIAL) else Compressed
        average = kind(model, methods_.parse(f"hipress:{spec_of(method)}"), chosen.ranks, seed)
    with average as mean:
        return train(chosen, mean, Synchronized(model), seed, steps, range(chosen.ranks)), numel


def _averaged(chosen: Workload, model: nn.Module, method: str, seed: int, steps: int) -> Curve:
    """The curve of a training whose momentum ranks average."""
    codec = methods_.parse(f"hipress:{spec_of(method)}")
    optimizer = chosen.training.averaged(model.parameters(), round(FREEZE * steps))
    with Averaged(model, optimizer, codec, chosen.ranks, seed) as average:
        synchronized = Synchronized(model, optimizer=optimizer)
        return train(chosen, average, synchronized, seed, steps, range(chosen.ranks))


def measure(workload: str, method: str, seed: int, steps: int, data: str) -> Cell:
    """Train and evaluate."""
    start = time.perf_counter()
    trained, numel = curve(workload, method, seed, steps)
    return Cell(
        workload, method, seed, steps, data,
        loss=round(trained.final, 5),
        curve=[round(each, 4) for each in smoothed(trained.losses)],
        bits=round(8 * trained.sent / steps / numel, 3),
        seconds=round(time.perf_counter() - start, 1),
        date=now(),
        command=command_line("bench.losses"),
        versions={name: version(name) for name in ("hipress", "torch", "numpy")},
    )  # fmt: skip


def smoothed(losses: list[float]) -> list[float]:
    """Means of FINAL steps each."""
    starts = range(0, len(losses), FINAL)
    return [statistics.fmean(losses[at : at + FINAL]) for at in starts]


def missing(
    workloads: Sequence[str], methods: Sequence[str], seeds: int, steps: Sequence[int], path: Path
) -> Iterator[tuple[str, str, int, int, str]]:
    """Keys of cells that are not recorded: few steps first, then quick workloads, fp32 first."""
    known = {cell.key for cell in read(path)}
    cells = itertools.product(steps, workloads, range(1, seeds + 1), methods)
    for count, workload, seed, method in sorted(
        cells, key=lambda cell: (cell[0], workloads.index(cell[1]), cell[3] != FP32)
    ):
        key = (workload, method, seed, count, ALL[workload].data())
        if key not in known:
            yield key


def main(
    workload: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(ALL)}; by default the first {len(WORKLOADS)}."),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A spec, with or without parameters.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds.", min=1)] = 3,
    steps: Annotated[list[int] | None, typer.Option(help="By default 200, then 1000.")] = None,
    output: Annotated[Path, typer.Option(help="JSON lines of results.")] = CELLS,
) -> None:
    """Measure the cells that are not recorded."""
    methods = method or METHODS
    with refusing():
        own = [each for each in methods if each not in BASELINES.values()]
        check_codecs(
            spec for each in own for spec in spec_of(each).removeprefix(SHARDED).split("+")
        )
        for name in workload or ():
            if name not in ALL:
                raise ValueError(f"unknown workload {name!r}; choose from: {', '.join(ALL)}")
        output.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for key in missing(workload or [*WORKLOADS], methods, seeds, steps or (200, 1000), output):
        cell = measure(*key)
        with output.open("a") as file:
            file.write(cell.line() + "\n")
        print(f"{cell.workload} {cell.method} seed {cell.seed} {cell.steps} steps: {cell.loss:.4f}")


if __name__ == "__main__":
    typer.run(main)
