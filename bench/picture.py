"""The chart in README.md, as `hipress bench --quick` draws it, from recorded results.

    python -m bench.picture    # draws docs/demo.png, measures nothing

Step times and bytes are those of the group hosts2, losses those of lstm-sgd.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import typer

from bench import loss_cells
from bench.commands import RESULTS
from hipress.tools import charts
from hipress.tools.results import Results
from hipress.tools.run.figures import FINAL, Report
from hipress.tools.run.jobs import Result
from hipress.tools.run.methods import DEFAULTS

PATH = Path(__file__).parents[1] / "docs" / "demo.png"


def recorded(results: Path = RESULTS) -> Report:
    """The demo's methods: losses of a long run, with the step times of runs over links."""
    (timed,) = Results.read(results / "hosts2.json").reports
    losses = {
        cell.method: [loss for loss in cell.curve for _ in range(FINAL)]
        for cell in loss_cells.read(results / loss_cells.CELLS.name)
        if (cell.workload, cell.seed, cell.steps) == ("lstm-sgd", 1, 200)
    }
    times = {each.method: each for each in timed.results}
    shown = [_joined(times[name], losses.get(_recorded_as(name), [])) for name in DEFAULTS]
    return dataclasses.replace(timed, steps=200, results=shown)


def _recorded_as(method: str) -> str:
    """The name that bench.losses has for a method of the demo."""
    return loss_cells.BASELINES.get(method, method.removeprefix("hipress:"))


def _joined(times: Result, losses: list[float]) -> Result:
    """The result with as many steps as losses; the recorded steps are repeated."""
    rounds, warmup = divmod(len(losses), len(times.timed))
    if not rounds:  # trained without communication: no losses
        return times
    seconds = [0.0] * warmup + times.timed * rounds
    return dataclasses.replace(times, losses=losses, seconds=seconds, warmup=warmup, curves=[])


def main() -> None:
    """Draw README's chart from recorded results."""
    charts.draw(recorded(), PATH)


if __name__ == "__main__":
    typer.run(main)
