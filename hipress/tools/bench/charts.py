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

from hipress.tools.bench.results import ENOUGH, Trace
from hipress.tools.demo.chart import INK, colors_of, smooth, style
from hipress.tools.demo.job import Curve, Result
from hipress.tools.demo.methods import ALONE
from hipress.tools.demo.report import Report, Row, rows
from hipress.tools.tracing.spans import BACKWARD, DECODE, ENCODE, MERGE, WIRE

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


def crossover(report: Report, traces: Sequence[Trace]) -> str:
    """Predicted per cent of the speed without communication, by a link's bandwidth."""
    colors = colors_of(report.results)
    losses = {row.result.method: row.loss_difference for row in rows(report.results)}
    steps = len(report.results[0].curves[0].losses) if report.results[0].curves else 0

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        style(axes, "Predicted % of the speed without communication")
        axes.grid(color="#e8ebef", lw=0.8)
        x = [point.bandwidth * 8e-9 for point in traces[0].sweep]
        floor = traces[0].alone + traces[0].rest
        for name, color in (("fp32", "#b9c0c8"), ("bf16", INK)):
            y = [100 * floor / getattr(point, name) for point in traces[0].sweep]
            axes.plot(x, y, color=color, lw=1.8, label=f"{name} all-reduce")
        for trace in traces:
            y = [100 * (trace.alone + trace.rest) / point.seconds for point in trace.sweep]
            lost = losses.get(trace.method)
            loss = "" if lost is None or steps < ENOUGH else f", loss {lost:+.1%}"
            x = [point.bandwidth * 8e-9 for point in trace.sweep]
            axes.plot(x, y, color=colors[trace.method], lw=2.2, label=trace.label + loss)
        axes.set(xscale="log", ylim=(0, 103))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("Gbit/s of a link, each way", color=INK)
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)

    return _svg(draw, 3.6)


def timeline(trace: Trace) -> str:
    """A chart of rank 0's lanes during a step, measured above predicted, as SVG."""
    shades = {BACKWARD: "#f2c14e", WIRE: "#7389a3", ENCODE: "#e4572e", MERGE: "#c2185b",
              DECODE: "#7b3fa0"}  # fmt: skip
    lanes = ("pass", "codec", "wire")

    def draw(figure: Figure) -> None:
        panels = figure.subplots(2, 1, sharex=True)
        for axes, each in zip(panels, (trace.real, trace.predicted), strict=True):
            style(axes, f"{trace.label}, {each.name}: {1e3 * each.seconds:.0f} ms")
            for span in each.spans:
                if span.what in shades:
                    bar = (1e3 * span.begin, 1e3 * max(span.end - span.begin, 1e-4))
                    row = lanes.index(span.lane) - 0.38
                    axes.broken_barh([bar], (row, 0.76), color=shades[span.what], lw=0)
            axes.axvline(1e3 * each.seconds, color=INK, lw=1)
            axes.set_yticks(range(3), ["backward", "codec", "wire"])
            axes.invert_yaxis()
        panels[-1].set_xlabel("ms", color=INK)

    return _svg(draw, 3.2)


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
    """An SVG element with real text, as wide as its container."""
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hipress", "text.parse_math": False}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        draw(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "<svg" + text.getvalue().partition("<svg")[2]
