"""Time until a training reaches float32's final loss, by method and link.

    python -m bench.losses         # measures losses by step
    python -m bench.training --optimizer adamw --rate 100mbit --output FOLDER   # and step times
    python -m bench.time_to_loss FOLDER/hosts2.json --chart docs/time-to-loss.png
    hipress bench --model bench.loss_workloads:gpt --rate 100mbit --output FOLDER   # another model
    python -m bench.time_to_loss FOLDER/bench.json --workload gpt

A loss by step does not depend on the link, so a curve of many steps (losses.jsonl) and the step
times of a few give the time. The curve is the training loss, a mean of WINDOW steps on the batches
that all methods have in common; its goal is float32's mean of the last WINDOW steps of the same
seed, plus `--slack`. Methods that average momentum have the step time of WARM_UP until the freeze.
For trainings of `--steps` steps among the step times, the time that they took is printed, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from bench import time_chart
from bench.commands import refusing
from bench.loss_cells import FP32, MOMENTUM, Cell, read
from bench.losses import FREEZE, smoothed
from hipress.tools.results import Results
from hipress.tools.run.figures import FINAL, Report, markdown_table
from hipress.tools.run.jobs import Workload
from hipress.tools.run.methods import OUTER

WINDOW = 100  # steps
SLACK = 0.01  # of float32's loss, by default
WARM_UP = "int4_group"
SEED = Workload().seed  # of bench.training
#: by method of the demo, that whose losses are the same
CURVES = {"ddp-fp32": FP32, "ddp-fp16": "bf16", "powersgd-fp16": "torch-powersgd:rank=4"}


@dataclass(frozen=True)
class Times:
    """Median seconds of a step, by method as in losses.jsonl; of an outer loop, by method of the
    demo, the median of its rounds' means."""

    place: str
    seconds: dict[str, float]
    #: losses and seconds of all steps, by method
    trained: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> list[Times]:
        """Times by link from a file of `hipress bench`. Raises ConfigError for another file."""
        return [cls._of(each) for each in Results.read(path).reports]

    @classmethod
    def _of(cls, report: Report) -> Times:
        seconds, trained = {}, {}
        for each in report.results:
            if each.error is None:
                method, spent = _curve(each.method), each.seconds[each.warmup :]
                seconds[method] = statistics.median(each.timed)
                first = [spent[0]] * (len(each.losses) - len(spent))  # steps that are not timed
                trained[method] = each.losses, first + spent
        return cls(report.place, seconds, trained)

    def until(self, method: str, step: int, steps: int) -> float:
        """Seconds of the first `step` steps of a training of `steps`."""
        first = min(step, round(FREEZE * steps)) if method.startswith(MOMENTUM) else 0
        warm_up = first * self.seconds[WARM_UP] if first else 0.0
        return warm_up + (step - first) * self.seconds[method]


def _curve(method: str) -> str:
    """The name in losses.jsonl of a method of the demo."""
    if method in CURVES:
        return CURVES[method]
    way, _, codec = method.partition(":")
    if way == OUTER:
        return method
    parts = [part for part in codec.split(":") if not part.startswith("freeze=")]
    return (MOMENTUM if way == "momentum" else "") + ":".join(parts)


def reached(curve: Sequence[float], loss: float) -> int | None:
    """The number of steps after which the mean of WINDOW steps is at most `loss`, also in the next
    window; None if that never happens."""
    width = WINDOW // FINAL
    means = [statistics.fmean(curve[at - width : at]) for at in range(width, len(curve) + 1)]
    window = next((at for at, mean in enumerate(means) if mean <= loss), None)
    return None if window is None else (window + width) * FINAL


def _goal(plain: Cell, slack: float) -> float:
    """The loss to reach: float32's at the end of this training."""
    return statistics.fmean(plain.curve[-WINDOW // FINAL :]) * (1 + slack)


@dataclass(frozen=True)
class Reached:
    """The time that a method needs for the loss."""

    method: str  # as in losses.jsonl
    step_seconds: float
    steps: list[int | None]  # by seed; None: not reached
    minutes: list[float]  # by seed; empty if a seed does not reach it

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The line of a table."""
        steps = ", ".join("never" if each is None else str(each) for each in self.steps)
        return self.method, f"{1e3 * self.step_seconds:.0f}", steps, self._range()

    def _range(self) -> str:
        if not self.minutes:
            return "-"
        least, most = min(self.minutes), max(self.minutes)
        return f"{statistics.fmean(self.minutes):.1f} ({least:.1f} to {most:.1f})"


def reach(
    cells: Sequence[Cell], workload: str, steps: int, times: Times, slack: float = SLACK
) -> Iterator[Reached]:
    """The times of each method that has step times and curves."""
    seeds: dict[str, dict[int, Cell]] = {}
    for cell in cells:
        if (cell.workload, cell.steps) == (workload, steps):
            seeds.setdefault(cell.method, {})[cell.seed] = cell
    plain = seeds.get(FP32, {})
    for method, seconds in times.seconds.items():
        if method.startswith(MOMENTUM) and WARM_UP not in times.seconds:
            continue
        needed = []
        for seed in sorted(seeds.get(method, {}).keys() & plain.keys()):
            needed.append(reached(seeds[method][seed].curve, _goal(plain[seed], slack)))
        if needed:
            there = [each for each in needed if each is not None]
            whole = there if len(there) == len(needed) else []
            minutes = [times.until(method, each, steps) / 60 for each in whole]
            yield Reached(method, seconds, needed, minutes)


def in_full(
    cells: Sequence[Cell], workload: str, steps: int, times: Times, slack: float = SLACK
) -> Iterator[str]:
    """Steps and minutes to the loss in trainings of `steps` steps, whose seed is the demo's."""
    key = workload, FP32, SEED, steps
    plain = next((c for c in cells if (c.workload, c.method, c.seed, c.steps) == key), None)
    for method, (losses, seconds) in times.trained.items():
        if plain is not None and method and len(losses) == steps:
            at = reached(smoothed(losses), _goal(plain, slack))
            spent = "never" if at is None else f"{at} steps, {sum(seconds[:at]) / 60:.1f} minutes"
            yield f"{method}, trained in full: {spent}"


def main(
    measured: Annotated[
        list[Path], typer.Argument(help="Results of bench.training or hipress bench.")
    ],
    workload: Annotated[str, typer.Option(help="Workload of bench.losses.")] = "lstm-adamw",
    steps: Annotated[int, typer.Option(help="Steps of the curves.", min=WINDOW)] = 1000,
    slack: Annotated[float, typer.Option(help="Share above float32's loss.", min=0)] = SLACK,
    chart: Annotated[Path | None, typer.Option(help="Where to draw a chart.")] = None,
) -> None:
    """Print a table for each file, and draw a chart of all."""
    with refusing():
        every = [times for path in measured for times in Times.read(path)]
    cells, by_place = read(), {}
    for times in every:
        by_place[times.place] = [*reach(cells, workload, steps, times, slack)]
        head = ("method", "ms a step", "steps, by seed", "minutes (of the seeds)")
        table = markdown_table(head, [each.row for each in by_place[times.place]])
        print(f"{times.place}\n\n{table}\n")
        print(*in_full(cells, workload, steps, times, slack), sep="\n")
    if chart is not None:
        time_chart.draw(by_place, slack, chart)


if __name__ == "__main__":
    typer.run(main)
