"""The charts of docs/measurements/published.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.published.data import Cell, Data
from bench.published.others import Sidco
from bench.published.readiness import Readiness
from hipress.tools.charts import GRID, INK, png, style

__all__ = ["draw"]

_COLORS = {
    "BytePS": "#a1b4c9", "Ring": "#4b5d73", "BytePS(OSS-onebit)": "#f2a03d",
    "Ring(OSS-DGC)": "#c2185b", "HiPress Ring": "#e4572e", "HiPress PS": "#2e9e6b",
}  # fmt: skip


def draw(
    folder: Path,
    cells: Sequence[Cell],
    ready: Sequence[Readiness],
    curve: Sequence[Sidco],
    data: Data,
) -> None:
    """Draw published-curves.png, published-exposed.png and published-ready.png."""
    _curves([each for each in cells if each.experiment == "hipress curves"], data, folder)
    _exposed([each for each in cells if each.experiment == "hipress table"], curve, data, folder)
    _ready(ready, folder)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    figure = png(size)
    panels = [axes for row in figure.subplots(rows, columns, squeeze=False) for axes in row]
    for axes in panels:
        style(axes)
        axes.grid(color=GRID, lw=0.8)
    return figure, panels


def _curves(cells: Sequence[Cell], data: Data, folder: Path) -> None:
    """Per cent of linear scaling: marks as published, lines as predicted."""
    models: Mapping[str, Data] = data["hipress"]["models"]
    figure, panels = _figure(2, 3, (12, 6.6))
    shown: dict[str, Artist] = {}
    for axes, (model, row) in zip(panels, models.items(), strict=True):
        lines = defaultdict(list)
        for cell in (each for each in cells if each.row == model):
            system, gpus = cell.column.split(", ")
            linear = row["linear"].value * int(gpus) / 128
            point = (int(gpus), 100 * cell.published / linear, 100 * cell.predicted / linear)
            lines[system].append(point)
        for system, points in lines.items():
            x, published, predicted = zip(*points, strict=True)
            shown[system] = axes.plot(x, predicted, color=_COLORS[system], lw=2)[0]
            axes.plot(x, published, "o", color=_COLORS[system], ms=5)
        axes.set(xscale="log", ylim=(0, 104))
        axes.set_xticks([8, 16, 32, 64, 128], ["8", "16", "32", "64", "128"])
        axes.minorticks_off()
        axes.set_title(f"{model}, {row['codec']}", fontsize=10.5, color=INK, loc="left")
    panels[0].set_ylabel("% of linear scaling", color=INK)
    panels[4].set_xlabel("V100 GPUs, 8 a node", color=INK)
    figure.legend(
        [*shown.values()], [*shown], loc="outside lower center", ncols=6, frameon=False, fontsize=9
    )
    figure.suptitle(
        "HiPress's scaling curves: marks as published, lines as predicted; rings and BytePS were "
        "fitted at 128", fontsize=12, color=INK, x=0.01, ha="left",
    )  # fmt: skip
    figure.savefig(folder / "published-curves.png")


def _exposed(cells: Sequence[Cell], curve: Sequence[Sidco], data: Data, folder: Path) -> None:
    """Milliseconds that communication adds, and SIDCo's factor over the rate that TCP reaches."""
    figure, (bars, line) = _figure(1, 2, (12, 4.6))
    predicted = [each for each in cells if each.kind == "predicted" and each.exposed]
    places = np.arange(len(predicted))
    for shift, color, which, label in (
        (-0.2, "#b9c0c8", 0, "published"),
        (0.2, "#2e9e6b", 1, "predicted"),
    ):
        values = [each.exposed[which] for each in predicted if each.exposed]
        bars.bar(places + shift, values, 0.38, color=color, label=label)
    names = [f"{each.row}\n{each.column}" for each in predicted]
    bars.set_xticks(places, names, rotation=40, ha="right", fontsize=7.5)
    bars.set_yscale("log")
    bars.set_title(
        "Milliseconds a step that communication adds, 128 GPUs", fontsize=10.5, loc="left"
    )
    bars.legend(frameon=False, fontsize=9)
    x = [100 * each.share for each in curve]
    line.plot(x, [each.over_none for each in curve], color="#e4572e", lw=2.2, marker="o", ms=4)
    line.axhline(data["sidco"]["over_none"].value, color=INK, lw=1, ls=":")
    line.annotate("published: up to 41.7x", (45, 43), fontsize=9, color=INK)
    line.set(ylim=(0, None))
    line.set_xlabel("% of 25 Gbit/s that TCP reaches", color=INK)
    line.set_title("SIDCo's LSTM: times as fast as without compression", fontsize=10.5, loc="left")
    figure.savefig(folder / "published-exposed.png")


def _ready(ready: Sequence[Readiness], folder: Path) -> None:
    """Share of the pass after which a share of the bytes is ready."""
    figure, panels = _figure(2, 4, (12, 5.4))
    x = 100 * (np.arange(400) + 0.5) / 400
    for axes, each in zip(panels, ready, strict=True):
        axes.plot(x, x, color="#b9c0c8", lw=1.2, ls="--", label="by elements")
        axes.plot(x, 100 * each.measured, color=INK, lw=2.4, label="measured on a V100")
        axes.plot(
            x, 100 * each.predicted, color="#e4572e", lw=1.6, label="roofline on the meta device"
        )
        title = f"{each.model}: off by {100 * each.roofline:.1f}%"
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        axes.set(xlim=(0, 100), ylim=(0, 100))
    panels[4].set_xlabel("% of the bytes", color=INK)
    panels[4].set_ylabel("% of the backward pass", color=INK)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  frameon=False, fontsize=9)  # fmt: skip
    figure.savefig(folder / "published-ready.png")
