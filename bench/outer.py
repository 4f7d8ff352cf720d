"""The outer loop: share of time in training on emulated hosts, and losses by step.

    python -m bench.outer share --hosts 2 --rate 100mbit --every 30 --delay 15
    python -m bench.outer losses --workload gpt --every 10 --steps 2000 --lr 1 --momentum 0
    python -m bench.outer table bench/results/gpt-adamw.json

`share` trains the demo's LSTM: steps without communication, then rounds, then such steps again; the
share is the time of so many steps without communication, by that of the rounds. `losses` trains a
workload of bench.losses in two processes, since a loss by step does not depend on the link. Results
are lines of bench/results/outer.jsonl. `table` compares: minutes until the training loss is within
a slack of float32's after 1000 steps (bench.time_to_loss), with step times of bench.training or
`hipress bench`, and for the outer loop those without communication by a measured share.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.optim.lr_scheduler import LinearLR

import hipress
from bench.commands import RESULTS, given, now, refusing
from bench.loss_cells import FP32, Cell, read
from bench.loss_workloads import ALL
from bench.losses import smoothed
from bench.netns import Network, require, run_everywhere
from bench.time_to_loss import WINDOW, Reached, Times, reach, reached
from hipress.tools.run import corpus, lstm
from hipress.tools.run.figures import FINAL, markdown_table
from hipress.tools.run.jobs import Workload

LINES = RESULTS / "outer.jsonl"
WARM_UP = 4  # steps
app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)


@dataclass(frozen=True)
class Loop:
    """An outer loop to measure."""

    codec: str = "int4_group"
    every: int = 30
    delay: int = 0
    fragments: int = 1
    lr: float = 0.7
    momentum: float = 0.9

    def around(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> hipress.Outer:
        """The outer loop of a model."""
        sgd = hipress.OuterSGD(self.lr, self.momentum)
        return hipress.Outer(
            model, optimizer, self.codec, every=self.every, delay=self.delay, outer=sgd,
            fragments=self.fragments, timeout=300.0,
        )  # fmt: skip


Hosts = Annotated[int, typer.Option(help="Emulated hosts.")]
Rate = Annotated[str, typer.Option(help="Speed of every link, 100kbit to 100gbit.")]
Codec = Annotated[str, typer.Option(help="A spec.")]
Every = Annotated[int, typer.Option(help="Steps from round to round.")]
Delay = Annotated[int, typer.Option(help="Steps that a round travels.")]
Fragments = Annotated[int, typer.Option(help="Fragments of the model.")]
Lr = Annotated[float, typer.Option(help="Rate of outer SGD.")]
Momentum = Annotated[float, typer.Option(help="Momentum of outer SGD.")]


@app.command()
def share(
    hosts: Hosts = 2,
    rate: Rate = "100mbit",
    codec: Codec = "int4_group",
    every: Every = 30,
    delay: Delay = 15,
    fragments: Fragments = 1,
    rounds: Annotated[int, typer.Option(help="Rounds to time.")] = 4,
) -> None:
    """Measure the share of time in training."""
    loop = Loop(codec, every, delay, fragments)
    with refusing():
        require(hosts, rate)
    with tempfile.TemporaryDirectory() as folder, Network(hosts, rate) as network:
        output, order = Path(folder, "result"), json.dumps(asdict(loop))
        told = [str(corpus.prepare()), order, str(rounds), str(output)]
        if run_everywhere(network, [sys.executable, "-m", "bench.outer", "lstm", *told]):
            raise typer.Exit(1)
        found = json.loads(output.read_text())
    _write({"kind": "share", "hosts": hosts, "rate": rate, **asdict(loop), **found})


@app.command(name="lstm", hidden=True)
def train_lstm(words: str, order: str, rounds: int, output: str) -> None:
    """A host of `share`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loop, task = Loop(**json.loads(order)), lstm.make(Workload(), words)
    optimizer = task.training.make(task.module.parameters())
    outer = loop.around(task.module, optimizer)
    rank, number = dist.get_rank(), 0

    def steps(count: int, *, rounds: bool) -> float:
        """Mean seconds of a step."""
        nonlocal number
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            task.loss(task.module, rank, number).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(task.module.parameters(), task.training.clip)
            optimizer.step()
            if rounds:
                outer.step()
            number += 1
        return (time.perf_counter() - begin) / count

    steps(WARM_UP, rounds=False)
    steps(loop.every + loop.delay, rounds=True)  # the first round meets in the store
    before = hipress.report(outer)
    plain = [steps(loop.every, rounds=False)]
    timed = steps(rounds * loop.every, rounds=True)
    plain.append(steps(loop.every, rounds=False))
    after = hipress.report(outer)
    if rank == 0:
        alone = statistics.fmean(plain)
        done = after.rounds - before.rounds
        found = {
            "plain_ms": [round(1e3 * each, 1) for each in plain],
            "outer_ms": round(1e3 * timed, 1),
            "share": round(alone / timed, 4),
            "stalled": round((after.stalled - before.stalled) / (timed * rounds * loop.every), 4),
            "megabytes": round((after.sent_bytes - before.sent_bytes) / 1e6 / max(1, done), 2),
            "rounds": rounds,
        }
        Path(output).write_text(json.dumps(found))
    dist.barrier()
    hipress.detach(outer)
    dist.destroy_process_group()


@app.command()
def losses(
    workload: Annotated[str, typer.Option(help="Workload of bench.losses.")] = "gpt",
    seed: Annotated[int, typer.Option(help="Seed.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps of a site.")] = 1000,
    codec: Codec = "int4_group",
    every: Every = 10,
    delay: Delay = 0,
    fragments: Fragments = 1,
    lr: Lr = 1.0,
    momentum: Momentum = 0.0,
) -> None:
    """Measure the loss by step of two sites."""
    loop = Loop(codec, every, delay, fragments, lr, momentum)
    ALL[workload].data()  # downloads or reads it once
    with tempfile.TemporaryDirectory() as folder:
        arguments = (2, f"file://{folder}/store", loop, workload, seed, steps, f"{folder}/result")
        torch.multiprocessing.spawn(_site, arguments, nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
        found = json.loads(Path(folder, "result").read_text())
    kind = {"kind": "losses", "workload": workload, "seed": seed, "steps": steps}
    _write({**kind, **asdict(loop), **found})


def _site(
    rank: int, sites: int, store: str, loop: Loop, name: str, seed: int, steps: int, output: str
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=sites)
    workload = ALL[name]
    model = workload.build(seed)
    optimizer = workload.training.make(model.parameters())
    schedule = LinearLR(optimizer, 1.0, 0.0 if workload.decays else 1.0, steps)
    outer, curve = loop.around(model, optimizer), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*workload.batch(seed, rank, step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), workload.training.clip)
        optimizer.step()
        schedule.step()
        outer.step()
        curve.append(float(loss.detach()))
    means = torch.tensor(curve, dtype=torch.float64)
    dist.all_reduce(means)
    if rank == 0:
        mine = [each / sites for each in means.tolist()]
        Path(output).write_text(json.dumps({"curve": [round(x, 4) for x in smoothed(mine)]}))
    dist.barrier()
    hipress.detach(outer)
    dist.destroy_process_group()


@app.command()
def table(
    measured: Annotated[list[Path], typer.Argument(help="Of bench.training or hipress bench.")],
    workload: Annotated[str, typer.Option(help="Workload of bench.losses.")] = "gpt",
    share: Annotated[float, typer.Option(help="Share of time in training.")] = 0.95,
    slack: Annotated[float, typer.Option(help="Share above float32's loss.")] = 0.03,
) -> None:
    """Print minutes until a loss is reached, by link and method."""
    cells = [each for each in read() if each.workload == workload and each.steps == 1000]
    lines = [line for line in _lines("losses") if line["workload"] == workload]
    for times in (times for path in measured for times in Times.read(path)):
        rows = [each.row for each in reach(cells, workload, 1000, times, slack)]
        alone = times.seconds[""]  # "" is no method with losses: no communication
        rows += [_row(each, cells, alone / share, slack) for each in _by_loop(lines)]
        head = ("method", "ms a step", "steps, by seed", "minutes (of the seeds)")
        print(f"{times.place}, within {100 * slack:g}%\n\n{markdown_table(head, rows)}\n")


def _by_loop(lines: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Lines of one loop and number of steps, of several seeds."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault((line["steps"], *(line[name] for name in asdict(Loop()))), []).append(line)
    return [*found.values()]


def _row(
    lines: list[dict[str, Any]], cells: list[Cell], seconds: float, slack: float
) -> tuple[str, str, str, str]:
    """The line of a table for an outer loop, which all lines have."""
    plain = {cell.seed: cell for cell in cells if cell.method == FP32}
    needed = []
    for line in lines:
        goal = statistics.fmean(plain[line["seed"]].curve[-WINDOW // FINAL :]) * (1 + slack)
        needed.append(reached(line["curve"], goal))
    loop = Loop(**{name: lines[0][name] for name in asdict(Loop())})
    text = f"outer {loop.codec}, every {loop.every}, lr {loop.lr:g}, momentum {loop.momentum:g}"
    minutes = [at * seconds / 60 for at in needed if at is not None]
    whole = minutes if len(minutes) == len(needed) else []
    return Reached(f"{text}, of {lines[0]['steps']} steps", seconds, needed, whole).row


def _lines(kind: str) -> list[dict[str, Any]]:
    """Recorded results of a kind."""
    found = map(json.loads, LINES.read_text().splitlines()) if LINES.exists() else ()
    return [line for line in found if line["kind"] == kind]


def _write(line: dict[str, Any]) -> None:
    """Record and print a result."""
    line |= {"date": now(), "command": given("bench.outer")}
    with LINES.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print({key: value for key, value in line.items() if key != "curve"})


if __name__ == "__main__":
    app()
