"""The charts of a benchmark's report, as SVG."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from hipress.demo.chart import INK, colors_of, smooth, style
from hipress.demo.job import Curve, Result
from hipress.demo.methods import ALONE
from hipress.demo.report import Report, Row, rows

_WIDTH = 7.2  # inches


def steps(report: Report) -> str:
    """Milliseconds a step and megabytes a step, by method."""
    good = rows(report.results)
    colors = colors_of(report.results)

    def draw(figure: Figure) -> None:
        times, sizes = figure.subplots(1, 2, width_ratios=(1.3, 1))
        style(times, "Step, ms (median, p10 to p90)")
        style(sizes, "MB a step and rank")
        for position, row in enumerate(good):
            _step_bar(times, position, row, colors[row.result.method])
            sent = (row.result.payload_bytes or 0) / 1e6
            sizes.barh(position, sent, color=colors[row.result.method], height=0.68)
            _label(sizes, sent, position, f"{sent:.3g}")
        _names(times, [row.result.label for row in good])
        _names(sizes, [""] * len(good))
        for axes in (times, sizes):
            axes.set_xlim(0, axes.get_xlim()[1] * 1.25)

    return _svg(draw, 0.9 + 0.34 * len(good))


def _step_bar(axes: Axes, position: int, row: Row, color: str) -> None:
    low, middle, high = (1e3 * each for each in (row.low, row.median, row.high))
    axes.barh(position, middle, color=color, height=0.68)
    span = [[max(0, middle - low)], [max(0, high - middle)]]
    axes.errorbar(middle, position, xerr=span, color=INK, lw=1, capsize=2)
    _label(axes, max(high, middle), position, f"{middle:.0f}")


def time_to_loss(report: Report) -> str:
    """Loss against seconds of training: the median of the rounds, and their spread."""
    colors = colors_of(report.results)
    shown = [e for e in report.results if e.error is None and e.method not in ALONE and e.curves]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        style(axes, "Loss (mean of 10 steps) against seconds of training")
        axes.grid(color="#e8ebef", lw=0.8)
        for each in shown:
            clock, middle, low, high = _band(each)
            axes.plot(clock, middle, color=colors[each.method], lw=2, label=each.label)
            axes.fill_between(clock, low, high, color=colors[each.method], alpha=0.18, lw=0)
        if shown:
            axes.legend(frameon=False, fontsize=9, labelcolor=INK)
        axes.set_xlim(left=0)

    return _svg(draw, 3.6)


def _band(result: Result) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds, and the median, least and largest loss of the rounds, by step."""
    losses = list(zip(*(smooth(curve.losses) for curve in result.curves), strict=False))
    clocks = zip(*(_clock(curve) for curve in result.curves), strict=False)
    middle = [statistics.median(each) for each in losses]
    clock = [statistics.median(each) for each in clocks]
    return clock, middle, [min(each) for each in losses], [max(each) for each in losses]


def _clock(curve: Curve) -> list[float]:
    return list(accumulate(curve.seconds))


def _label(axes: Axes, x: float, y: float, text: str) -> None:
    axes.annotate(
        text, (x, y), (5, 0), textcoords="offset points", va="center", fontsize=9, color=INK
    )


def _names(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def _svg(draw: Callable[[Figure], None], height: float) -> str:
    """An SVG element whose text stays text, as wide as what holds it."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hipress"}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "<svg" + text.getvalue().partition("<svg")[2]
