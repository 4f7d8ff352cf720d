"""The chart in README.md: `hipress demo`'s, from what bench.training recorded.

    python -m bench.picture    # draws docs/demo.png, measures nothing

Step times and bytes are those of the group hosts2, losses those of loss-sgd.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from bench.codecs import RESULTS
from hipress.demo import chart
from hipress.demo.job import Result
from hipress.demo.methods import DEFAULTS
from hipress.demo.report import Report

PATH = Path(__file__).parents[1] / "docs" / "demo.png"


def recorded(results: Path = RESULTS) -> Report:
    """The demo's methods: losses of a long run, at the step times of runs over links."""
    timed, trained = (Report.read(results / f"{name}.json") for name in ("hosts2", "loss-sgd"))
    losses = {each.method: each.losses for each in trained.results}
    times = {each.method: each for each in timed.results}
    shown = [_joined(times[name], losses.get(name, [])) for name in DEFAULTS]
    return dataclasses.replace(timed, steps=trained.steps, results=shown)


def _joined(times: Result, losses: list[float]) -> Result:
    """As many steps as there are losses; the recorded steps are repeated."""
    rounds, warmup = divmod(len(losses), len(times.timed))
    if not rounds:  # trained without communication: no losses
        return times
    seconds = [0.0] * warmup + times.timed * rounds
    return dataclasses.replace(times, losses=losses, seconds=seconds, warmup=warmup)


if __name__ == "__main__":
    chart.draw(recorded(), PATH)
