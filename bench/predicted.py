"""Steps on emulated hosts, predicted from a description and measured, one by one.

    python -m bench.predicted                    # all cells, about 9 minutes on two quiet cores
    python -m bench.predicted --hosts 2 --rate 1gbit --steps 3 --output somewhere

There are 2 and 4 hosts, and links of 100 Mbit/s, 1 and 10 Gbit/s. The demo's language model trains
with three codecs and three strategies each; the same model trains with rank 1 late in each backward
pass; and a model of one large tensor trains also by a tree, whose root has all of it. No number is
fitted to these cells: those of bench/published/published.yaml were fitted to others. Writes
predicted.json and predicted.md.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from bench import ranks
from bench.commands import RESULTS, refusing
from bench.emulated_models import KINDS, LATE
from bench.netns import Network, require
from bench.published import data as data_
from bench.published.data import Cell
from bench.published.emulated import Emulated, Measured, quality
from hipress.tools.refusals import check_output
from hipress.tools.run import runner
from hipress.tools.run.figures import markdown_table

HOSTS, RATES = (2, 4), ("10gbit", "1gbit", "100mbit")
CODECS = ("onebit_group", "int4_group", "int8_group")
STRATEGIES = ("ps", "ring", "exchange")
ALONE, FP32 = "ddp-noop", "ddp-fp32"
WARM_UP = 2  # steps, that are not timed
MEDIAN, WORST = 0.07, 0.25  # aims


def methods(rate: str) -> Iterator[tuple[str, str]]:
    """Kinds of models, each with its methods, in the order of their measurement."""
    yield "lstm", ALONE
    for codec in CODECS:
        for strategy in STRATEGIES:
            yield "lstm", f"hipress:{codec}:strategy={strategy}"
    yield "lstm", ALONE  # again: all predictions are in its terms, and the first steps are slow
    raw = [] if rate == "100mbit" else [FP32]  # it takes seconds there
    for text in (*raw, *(f"hipress:{codec}:strategy=ps" for codec in CODECS[:2])):
        yield "late", text
    yield "huge", ALONE
    for text in (*raw, *(f"hipress:int4_group:strategy={each}" for each in STRATEGIES)):
        yield "huge", text
    yield "huge", "hipress:topk:strategy=gtopk"
    yield "huge", ALONE


def measure(hosts: int, rate: str, steps: int) -> list[Measured]:
    """Measured steps of each kind of model. Raises NetworkError if a rank fails."""
    by_kind: dict[str, dict[str, float]] = {}
    with Network(hosts, rate) as network:
        for row in ranks.run_module(network, "bench.predicted", [rate, str(steps)]):
            print(f"{hosts} hosts, {rate}, {row['kind']}: {row['method']}", end=" ", flush=True)
            print(f"{1e3 * row['seconds']:.0f} ms", flush=True)
            known = by_kind.setdefault(row["kind"], {})
            known[row["method"]] = min(row["seconds"], known.get(row["method"], math.inf))
    alone = {kind: steps.pop(ALONE) for kind, steps in by_kind.items() if ALONE in steps}
    return [
        Measured(
            f"{hosts} hosts, {rate}, {kind}", hosts, rate, "sgd", alone.get(kind, alone["lstm"]),
            steps, kind, LATE * (kind == "late"),
        )
        for kind, steps in by_kind.items()
    ]  # fmt: skip


def rank(rate: str, steps: int) -> None:
    """Train on this host by each method in turn, and report the median step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as Wrapped

    import hipress
    from hipress.tools.run import corpus, lstm, worker
    from hipress.tools.run import methods as texts
    from hipress.tools.run.jobs import Workload
    from hipress.tools.run.synchronize import synchronize

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for kind, text in methods(rate):
        task = lstm.make(Workload(model=KINDS[kind]), str(corpus.prepare()))
        synchronized = synchronize(task.module, texts.parse(text), task.training)
        trainer = worker.Trainer(task, dist.get_rank(), synchronized)
        for step in range(WARM_UP + steps):
            trainer.step(step)
        ranks.tell(kind=kind, method=text, seconds=statistics.median(trainer.seconds[WARM_UP:]))
        if texts.parse(text).codec is not None and isinstance(synchronized.module, Wrapped):
            hipress.detach(synchronized.module)
        dist.barrier()
    dist.destroy_process_group()


def text(cells: Sequence[Cell]) -> str:
    """All cells, and errors of the predictions."""
    head = ("where", "method", "measured ms", "predicted ms", "off")
    rows = [
        (c.row, c.column, f"{c.published:.0f}", f"{c.predicted:.0f}", f"{c.error:+.0%}")
        for c in cells
    ]
    count, median, worst = quality(cells)
    met = "met" if median <= MEDIAN and worst <= WORST else "MISSED"
    return "\n".join(
        [
            markdown_table(head, rows), "",
            f"- {count} cells: off by {median:.1%} in the median (aim {MEDIAN:.0%}), by "
            f"{worst:.1%} at most (aim {WORST:.0%}): {met}",
        ]
    )  # fmt: skip


def main(
    hosts: Annotated[list[int] | None, typer.Option(help="2, 4; default both.")] = None,
    rate: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(RATES)}.")] = None,
    steps: Annotated[int, typer.Option(help="Timed of each method.", min=1)] = 4,
    output: Annotated[Path, typer.Option(help="Folder of predicted.json and .md.")] = RESULTS,
) -> None:
    """Measure cells and print the errors of the predictions."""
    with refusing():
        for each in rate or RATES:
            require(max(hosts or HOSTS), each, least=2)
        check_output(output)
    os.environ.update(runner.STEADY)
    places = [
        each for n in hosts or HOSTS for speed in rate or RATES for each in measure(n, speed, steps)
    ]
    cells = [*Emulated.of(data_.load()["emulated"]).cells(places)]
    ranks.record(
        output, "bench.predicted", "Steps on emulated hosts, predicted and measured", text(cells),
        rows=[asdict(each) for each in places],
    )  # fmt: skip


if __name__ == "__main__":
    ranks.run(main, rank)
