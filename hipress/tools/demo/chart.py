"""Chart of a run: step times, bytes a step, loss against time."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hipress.tools.demo.job import Result
from hipress.tools.demo.methods import ALONE
from hipress.tools.demo.report import Report, Row, rows

_FLOOR = "#b9c0c8"
_BASELINES = ("#4b5d73", "#7389a3", "#a1b4c9")
_HIPRESS = ("#e4572e", "#f2a03d", "#c2185b", "#7b3fa0", "#2e9e6b", "#8d6e63")
INK = "#26303b"


def draw(report: Report, path: Path) -> None:
    """Write a PNG of 1800 by 660 pixels; methods that failed are left out."""
    with rc_context({"text.parse_math": False}):
        _draw(report, path)


def _draw(report: Report, path: Path) -> None:
    good = rows(report.results)
    figure = Figure(figsize=(15, 5.5), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    times, sizes, losses = figure.subplots(1, 3, width_ratios=(1.2, 0.85, 1.15))
    colors = colors_of(report.results)
    _step_times(times, good, colors)
    _sizes(sizes, good, colors)
    _losses(losses, [row.result for row in good], colors)
    workload = report.workload
    figure.suptitle(
        f"{report.place}\nLSTM language model, {workload.parameters / 1e6:.1f}M parameters, "
        f"{workload.optimizer.upper()}, {report.steps} steps",
        fontsize=12, color=INK, x=0.01, ha="left",
    )  # fmt: skip
    figure.savefig(path)


def colors_of(results: Sequence[Result]) -> dict[str, str]:
    """A color for each method: grey for baselines, bright ones for HiPress."""
    ours = [each.method for each in results if each.method.startswith("hipress")]
    theirs = [each.method for each in results if each.method not in (*ours, "none")]
    colors = {"none": _FLOOR}
    colors |= {name: _BASELINES[i % len(_BASELINES)] for i, name in enumerate(theirs)}
    return colors | {name: _HIPRESS[i % len(_HIPRESS)] for i, name in enumerate(ours)}


def _step_times(axes: Axes, good: Sequence[Row], colors: dict[str, str]) -> None:
    style(axes, "Step time, ms (median, p10 to p90)")
    for position, row in enumerate(good):
        method = row.result.method
        axes.barh(position, 1e3 * row.median, color=colors[method], height=0.68)
        span = 1e3 * (row.median - row.low), 1e3 * (row.high - row.median)
        axes.errorbar(
            1e3 * row.median, position, xerr=[[span[0]], [span[1]]], color=INK, lw=1, capsize=2
        )
        gain = "" if method in (*ALONE, "ddp-fp16") else _gain(row)
        _annotate(axes, 1e3 * max(row.high, row.median), position, f"{1e3 * row.median:.0f}{gain}")
    _name_bars(axes, [row.result.label for row in good])
    floor = [row.median for row in good if row.result.method == "none"]
    if floor:
        axes.axvline(1e3 * floor[0], color=INK, lw=0.8, ls=":", zorder=0)
    _room(axes, 1.45)


def _gain(row: Row) -> str:
    return "" if row.over_fp16 is None else f"   {row.over_fp16:.2f}x vs fp16"


def _sizes(axes: Axes, good: Sequence[Row], colors: dict[str, str]) -> None:
    """Draw payloads as bars, with their numbers above the middle, and bytes on the interface as
    marks, with theirs below; these are fewer if repeated blocks are not sent."""
    style(axes, "MB per step and rank (|: interface)")
    for position, row in enumerate(good):
        payload, wire = (each or 0 for each in (row.result.payload_bytes, row.result.wire_bytes))
        axes.barh(position, payload / 1e6, color=colors[row.result.method], height=0.68)
        half = 0.17 if wire else 0
        _annotate(axes, payload / 1e6, position - half, _megabytes(payload))
        if wire:
            axes.plot(wire / 1e6, position + half, "|", color=INK, ms=9, mew=1.6)
            _annotate(axes, max(payload, wire) / 1e6, position + half, _megabytes(wire))
    _name_bars(axes, [""] * len(good))
    _room(axes, 1.2)


def _losses(axes: Axes, results: Sequence[Result], colors: dict[str, str]) -> None:
    style(axes, "Loss against training time, s (mean of 10 steps)")
    axes.grid(axis="y", color="#e8ebef", lw=0.8)
    for result in results:
        if result.method in ALONE:
            continue  # not synchronized: its loss is that of several drifting models
        ours = result.method.startswith("hipress")
        axes.plot(
            _clock(result), smooth(result.losses), color=colors[result.method], label=result.label,
            lw=2.2 if ours else 1.6, zorder=3 if ours else 2,
        )  # fmt: skip
    if axes.lines:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    axes.set_xlim(left=0)


def smooth(values: Sequence[float], width: int = 10) -> list[float]:
    """The running mean of up to `width` last values."""
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def _clock(result: Result) -> list[float]:
    # The warm-up counts as ordinary steps: compilation, once, says nothing about training.
    typical, now, clock = statistics.median(result.timed), 0.0, []
    for step, seconds in enumerate(result.seconds):
        now += typical if step < result.warmup else seconds
        clock.append(now)
    return clock


def style(axes: Axes, title: str) -> None:
    """Apply the look that charts share."""
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)


def _name_bars(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def _megabytes(count: float) -> str:
    """Bytes in MB, three digits; a few packets of the kernel itself are negligible."""
    return "<0.001" if 0 < count < 1e3 else f"{count / 1e6:.3g}"


def _annotate(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(
        text, (x, y), (6, 0), textcoords="offset points", va="center", fontsize=9, color=INK
    )


def _room(axes: Axes, factor: float) -> None:
    axes.set_xlim(0, axes.get_xlim()[1] * factor)
