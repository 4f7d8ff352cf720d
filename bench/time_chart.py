"""The chart of bench.time_to_loss: minutes until the loss, a panel for each link."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from hipress.tools.charts import INK, label, style
from hipress.tools.run.methods import OUTER, parse

OURS, THEIRS = "#2166ac", "#b8bfc7"
LABELS = {
    "fp32": "DDP, 32 bits",
    "bf16": "DDP, 16 bits",
    "torch-powersgd:rank=4": "DDP, PowerSGD in its fp16 wrapper",
    "int4_group": "HiPress, 4 bits of the gradient",
    "momentum:onebit_fine": "HiPress, 1 bit of the momentum",
}


class Timed(Protocol):
    """A method in the chart, such as a time_to_loss.Reached."""

    @property
    def method(self) -> str: ...
    @property
    def minutes(self) -> list[float]: ...


def draw(by_place: Mapping[str, Sequence[Timed]], slack: float, path: Path) -> None:
    """Draw the methods of each place into a PNG, those of LABELS in its order."""
    every = dict.fromkeys(each.method for methods in by_place.values() for each in methods)
    names = sorted(every, key=lambda name: [*LABELS, name].index(name))
    size = (11, 1.2 + 0.42 * len(names))
    figure, panels = plt.subplots(
        1, len(by_place), figsize=size, squeeze=False, layout="constrained"
    )
    for axes, (place, methods) in zip(panels[0], by_place.items(), strict=True):
        style(axes, _rate(place))
        _bars(axes, {each.method: each for each in methods}, names)
    for axes in panels[0][1:]:
        axes.set_yticklabels([])
    wanted = f"Minutes until the training loss is {slack:.1%} above the one that float32 ends at"
    figure.suptitle(wanted, fontsize=11, color=INK)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _rate(place: str) -> str:
    """The link of a place, such as 100 Mbit/s."""
    link = place.rpartition("links of ")[2]
    return re.sub(r"(\d+)([mg])bit$", lambda match: f"{match[1]} {match[2].upper()}bit/s", link)


def _bars(axes: Axes, methods: Mapping[str, Timed], names: Sequence[str]) -> None:
    """Draw the mean of the seeds as a bar, with their range."""
    for position, name in enumerate(names):
        minutes = methods[name].minutes if name in methods else []
        if not minutes:
            text = "not with each seed" if name in methods else "not measured"
            label(axes, 0.0, position, text)
            continue
        mean, color = statistics.fmean(minutes), OURS if _ours(name) else THEIRS
        around = [[mean - min(minutes)], [max(minutes) - mean]]
        axes.barh(position, mean, color=color, height=0.68, xerr=around, ecolor=INK)
        label(axes, max(minutes), position, f"{mean:.1f}")
    axes.set_yticks(range(len(names)), [_title(name) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.12)


def _title(name: str) -> str:
    """The method's name in the chart."""
    if not name.startswith(f"{OUTER}:"):
        return LABELS.get(name, name)
    method = parse(name.partition(", ")[0])
    return f"HiPress, {method.codec} of the weights every {method.options['every']} steps"


def _ours(name: str) -> bool:
    return LABELS.get(name, "HiPress").startswith("HiPress")
