"""Losses by step of an outer loop, and times until a loss.

    python -m bench.outer losses --workload gpt --every 10 --steps 2000 --lr 1 --momentum 0
    python -m bench.outer table bench/results/outer-100mbit.json --workload lstm-adamw --slack 0.015

`losses` trains a workload of bench.losses, a process for each of its ranks, since a loss by step
does not depend on the link. Results are lines of bench/results/outer.jsonl, one for each loop,
workload, seed and number of steps. `table` compares: minutes until the training loss is within a
slack of float32's after 1000 steps (bench.time_to_loss), with step times of bench.training or
`hipress bench`, in which an outer loop is a method such as outer:int4_group:every=30:delay=15.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import loss_hooks, time_chart
from bench.commands import RESULTS, command_line, now, refusing
from bench.loss_cells import FP32, Cell, read
from bench.loss_workloads import ALL
from bench.losses import smoothed
from bench.time_to_loss import WINDOW, Reached, Times, reach, reached
from hipress.tools.run.figures import FINAL, markdown_table
from hipress.tools.run.methods import OUTER, parse

LINES = RESULTS / "outer.jsonl"
ROUNDS = ("every", "delay", "fragments")  # that decide the time of a step
TORCHFT = "torchft"  # in place of a codec: its own DiLoCo, recorded at release 0.2.0
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

    @property
    def method(self) -> str:
        """The loop as a method of hipress.tools.run.methods."""
        options = {name: value for name, value in asdict(self).items() if name != "codec"}
        way = [TORCHFT] if self.codec == TORCHFT else [OUTER, self.codec]
        return ":".join([*way, *(f"{k}={v:g}" for k, v in options.items())])


Codec = Annotated[str, typer.Option(help="A spec.")]
Every = Annotated[int, typer.Option(help="Steps from round to round.")]
Delay = Annotated[int, typer.Option(help="Steps that a round travels.")]
Fragments = Annotated[int, typer.Option(help="Fragments of the model.")]
Lr = Annotated[float, typer.Option(help="Rate of outer SGD.")]
Momentum = Annotated[float, typer.Option(help="Momentum of outer SGD.")]


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
    """Measure the loss by step of sites: as many as the workload has ranks, mostly two."""
    loop = Loop(codec, every, delay, fragments, lr, momentum)
    line: dict[str, Any] = {"kind": "losses", "workload": workload, "seed": seed, "steps": steps}
    line |= asdict(loop)
    with refusing():
        if workload not in ALL:
            raise ValueError(f"unknown workload {workload!r}: {', '.join(ALL)}")
        for recorded in _lines("losses"):
            if line.items() <= recorded.items():
                raise ValueError(
                    f"{LINES.name} has {workload}, {loop.method}, seed {seed}, {steps} steps since "
                    f"{recorded['date']}: give another seed, or delete that line to measure anew"
                )
    trained = loss_hooks.curve(workload, loop.method, seed, steps, ALL[workload].ranks)
    curve = [round(each, 4) for each in smoothed(trained.losses)]
    line |= {
        "sent": round(trained.sent),
        "curve": curve,
        "date": now(),
        "command": command_line("bench.outer"),
    }
    with LINES.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print({key: value for key, value in line.items() if key != "curve"})


@app.command()
def table(
    measured: Annotated[list[Path], typer.Argument(help="Of bench.training or hipress bench.")],
    workload: Annotated[str, typer.Option(help="Workload of bench.losses.")] = "gpt",
    slack: Annotated[float, typer.Option(help="Share above float32's loss.")] = 0.03,
    chart: Annotated[Path | None, typer.Option(help="Where to draw a chart.")] = None,
) -> None:
    """Print minutes until a loss is reached, by link and method, and draw them."""
    with refusing():
        places = [times for path in measured for times in Times.read(path)]
    cells = read()
    by_place: dict[str, list[Reached]] = {}
    for times in places:
        rows = by_place.setdefault(times.place, [])
        rows += reach(cells, workload, 1000, times, slack)
        rows += reach_by_rounds(cells, workload, times, slack)
    head = ("method", "ms a step", "steps, by seed", "minutes (of the seeds)")
    for place, rows in by_place.items():
        text = markdown_table(head, [each.row for each in rows])
        print(f"{place}, within {100 * slack:g}%\n\n{text}\n")
    if chart is not None:
        time_chart.draw(by_place, slack, chart)


def reach_by_rounds(
    cells: list[Cell], workload: str, times: Times, slack: float
) -> Iterator[Reached]:
    """The times of each outer loop that has step times and curves; float32 trains 1000 steps."""
    cells = [each for each in cells if each.workload == workload and each.steps == 1000]
    lines = [line for line in _lines("losses") if line["workload"] == workload]
    if not ALL[workload].decays:  # then a curve is the same for each number of steps
        lines = [{**line, "steps": None} for line in lines]
    for method, seconds in times.seconds.items():
        for each in _by_loop(lines, method):
            yield _reached(each, cells, seconds, slack)


def _by_loop(lines: list[dict[str, Any]], method: str) -> list[list[dict[str, Any]]]:
    """Lines whose rounds are those of a method of the demo, by loop and number of steps."""
    if not method.startswith(f"{OUTER}:"):
        return []
    wanted = parse(method)
    rounds = {name: wanted.options.get(name, asdict(Loop())[name]) for name in ROUNDS}
    by_key: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        if line["codec"] == wanted.codec and rounds == {name: line[name] for name in ROUNDS}:
            key = (line["steps"], *(line[name] for name in asdict(Loop())))
            by_key.setdefault(key, []).append(line)
    return [*by_key.values()]


def _reached(
    lines: list[dict[str, Any]], cells: list[Cell], seconds: float, slack: float
) -> Reached:
    """The time that an outer loop needs, which all lines have; `seconds` is the mean of a step."""
    plain = {cell.seed: cell for cell in cells if cell.method == FP32}
    needed = []
    for line in lines:
        goal = statistics.fmean(plain[line["seed"]].curve[-WINDOW // FINAL :]) * (1 + slack)
        needed.append(reached(line["curve"], goal))
    minutes = [at * seconds / 60 for at in needed if at is not None]
    name = Loop(**{name: lines[0][name] for name in asdict(Loop())}).method
    whole = minutes if len(minutes) == len(needed) else []
    of = f", of {lines[0]['steps']} steps" if lines[0]["steps"] else ""
    return Reached(f"{name}{of}", seconds, needed, whole)


def _lines(kind: str) -> list[dict[str, Any]]:
    """Recorded results of a kind."""
    lines = map(json.loads, LINES.read_text().splitlines()) if LINES.exists() else ()
    return [line for line in lines if line["kind"] == kind]


if __name__ == "__main__":
    app()
