"""Charts of all commands: measured methods, predictions by bandwidth, and lanes of a step."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from casync.stages import ENTER, INSIDE, LEAVE, WIRE, WORK
from compll.files import replacing
from hipress.tools.results import ENOUGH, Trace
from hipress.tools.run.figures import Report, Row, rows, smooth
from hipress.tools.run.jobs import LSTM, Curve, Result
from hipress.tools.run.methods import ALONE, is_ours
from hipress.tools.simulate import predictions
from hipress.tools.simulate.compared import BASELINE, FP32
from hipress.tools.simulate.show import bandwidth
from hipress.tools.tracing import spans

INK, GRID = "#26303b", "#e8ebef"
_STYLE = rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "hipress"})
_FLOOR, _PASS, _END = "#b9c0c8", "#f2c14e", "#e4572e"
_BASELINES = ("#4b5d73", "#7389a3", "#a1b4c9")
_HIPRESS = (
    "#e4572e", "#f2a03d", "#c2185b", "#7b3fa0", "#2e9e6b", "#8d6e63", "#1f7a8c", "#5c6bc0",
)  # fmt: skip
_DOING = {spans.BACKWARD: _PASS, spans.WIRE: "#7389a3", spans.ENCODE: "#e4572e",
          spans.MERGE: "#c2185b", spans.DECODE: "#7b3fa0"}  # fmt: skip
_LANES = {WORK: "codec", WIRE: "between nodes", INSIDE: "within a node", LEAVE: "to the host",
          ENTER: "to the device"}  # fmt: skip
_TICKS = (1e-2, 1e-1, 1, 10, 100, 1000, 10000)  # Gbit/s


class _Line(NamedTuple):
    """A method's share of the speed without communication, by bandwidth; from 0 to 1."""

    label: str
    values: Sequence[float]
    color: str


class _Bar(NamedTuple):
    """A span of a lane, in seconds."""

    begin: float
    end: float
    color: str


@_STYLE
def draw(report: Report, path: Path) -> None:
    """Write a PNG of 1800 by 660 pixels; methods that failed are left out."""
    good, colors = rows(report.results), colors_of(report.results)
    figure = png((15, 5.5))
    times, sizes, losses = figure.subplots(1, 3, width_ratios=(1.2, 0.85, 1.15))
    _step_times(times, good, colors)
    _sizes(sizes, good, colors)
    _losses(losses, [row.result for row in good], colors)
    load = report.workload
    model = "LSTM language model" if load.model == LSTM else load.model
    size = next((row.result.parameters for row in good if row.result.parameters), load.parameters)
    figure.suptitle(
        f"{report.place}\n{model}, {size / 1e6:.1f}M parameters, "
        f"{load.optimizer.upper()}, {report.steps} steps",
        fontsize=12, color=INK, x=0.01, ha="left",
    )  # fmt: skip
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:] or None)


@_STYLE
def steps(report: Report) -> str:
    """Milliseconds and megabytes a step by method, as SVG."""
    good, colors = rows(report.results), colors_of(report.results)
    figure = Figure(figsize=(7.2, 0.9 + 0.34 * len(good)), layout="constrained", facecolor="none")
    times, sizes = figure.subplots(1, 2, width_ratios=(1.3, 1))
    _step_times(times, good, colors)
    _sizes(sizes, good, colors)
    return _svg(figure)


@_STYLE
def time_to_loss(report: Report) -> str:
    """Loss against seconds of training, the median of the rounds and their spread, as SVG."""
    shown = [each for each in report.results if each.error is None and each.curves]
    figure = Figure(figsize=(7.2, 3.6), layout="constrained", facecolor="none")
    _losses(figure.subplots(), shown, colors_of(report.results))
    return _svg(figure)


@_STYLE
def crossover(report: Report, traces: Sequence[Trace]) -> str:
    """Predicted per cent of the speed without communication, by a link's bandwidth, as SVG."""
    colors, first = colors_of(report.results), traces[0]
    losses = {row.result.method: row.loss_difference for row in rows(report.results)}
    long = any(len(each.curves[0].losses) >= ENOUGH for each in report.results[:1] if each.curves)
    lines = []
    for name, color in (("fp32", _FLOOR), ("bf16", INK)):
        values = [(first.alone + first.rest) / getattr(point, name) for point in first.sweep]
        lines.append(_Line(f"{name} all-reduce", values, color))
    for trace in traces:
        values = [(trace.alone + trace.rest) / point.seconds for point in trace.sweep]
        lost = losses.get(trace.method)
        loss = f", loss {lost:+.1%}" if long and lost is not None else ""
        lines.append(_Line(trace.label + loss, values, colors[trace.method]))
    figure = Figure(figsize=(7.2, 3.6), layout="constrained", facecolor="none")
    axes = figure.subplots()
    style(axes, "Predicted % of the speed without communication")
    _efficiencies(axes, [point.bandwidth for point in first.sweep], lines)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    return _svg(figure)


@_STYLE
def timeline(trace: Trace) -> str:
    """Rank 0's lanes during a step, measured above predicted, as SVG."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained", facecolor="none")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, each in zip(panels, (trace.real, trace.predicted), strict=True):
        shown = [span for span in each.spans if span.what in _DOING]
        lanes = {
            title: [_Bar(s.begin, s.end, _DOING[s.what]) for s in shown if s.lane == lane]
            for lane, title in (("pass", "backward"), ("codec", "codec"), ("wire", "wire"))
        }
        _draw_lanes(axes, f"{trace.label}, {each.name}", lanes, each.seconds)
    panels[-1].set_xlabel("ms", color=INK)
    return _svg(figure)


@_STYLE
def draw_prediction(table: predictions.Table, curve: predictions.Curve, path: Path) -> None:
    """Write a PNG of 1104 by 744 pixels: per cent of the speed of a rank alone, by bandwidth."""
    figure = png((9.2, 6.2))
    axes = figure.subplots()
    style(axes)
    others = [name for name in curve.efficiencies if name not in (FP32, BASELINE)]
    colors = {name: _HIPRESS[i % len(_HIPRESS)] for i, name in enumerate(others)}
    colors |= {FP32: _FLOOR, BASELINE: INK}
    lines = []
    for row in table.rows:
        name = row.outcome.method
        native = "all-reduce" if row.outcome.strategy == "allreduce" else "FSDP2"
        label = f"{name} {native}" if name in (FP32, BASELINE) else f"{name}, loss {row.loss}"
        lines.append(_Line(label, curve.efficiencies[name], colors[name]))
    x = [each * 8e-9 for each in curve.bandwidths]
    _gain(axes, x, curve, others)
    _efficiencies(axes, curve.bandwidths, lines)
    axes.axvline(table.bandwidth * 8e-9, color=INK, lw=0.9, ls=":")
    axes.annotate(
        bandwidth(table.bandwidth), (table.bandwidth * 8e-9, 2), (4, 0), textcoords="offset points",
        fontsize=9, color=INK,
    )  # fmt: skip
    axes.set_xlim(x[0], x[-1])
    axes.set_xticks([t for t in _TICKS if x[0] <= t <= x[-1]], minor=False)
    axes.set_ylabel("% of the speed without communication", color=INK)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor=INK)
    alone = f"predicted; {1e3 * table.alone:,.1f} ms a step alone"
    title = f"{table.model.name} on {table.cluster}\n{alone}"
    figure.suptitle(title, fontsize=12, color=INK, x=0.01, ha="left")
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:] or None)


@_STYLE
def draw_timelines(timelines: Sequence[predictions.Timeline], path: Path) -> None:
    """Write a PNG with a panel per timeline: the lanes during the backward pass, and after it."""
    figure = png((10, 2.4 * len(timelines) + 0.6))
    panels = figure.subplots(len(timelines), 1, squeeze=False, sharex=True)[:, 0]
    for axes, each in zip(panels, timelines, strict=True):
        names = {event.lane for event in each.events}
        lanes = {"backward pass": [_Bar(0.0, each.backward, _PASS)]}
        for lane in (*(n for n in _LANES if n in names), *sorted(names - _LANES.keys())):
            lanes[_LANES.get(lane, lane)] = [
                _Bar(e.begin, e.end, _BASELINES[2 * (e.load % 2)])  # buckets differ in shade
                for e in each.events
                if e.lane == lane
            ]
        _draw_lanes(axes, each.method, lanes, each.step)
    panels[-1].set_xlabel("ms since the first gradients were ready", color=INK)
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:] or None)


def colors_of(results: Sequence[Result]) -> dict[str, str]:
    """A color for each method: grey for baselines, bright ones for HiPress."""
    ours = [each.method for each in results if is_ours(each.method)]
    theirs = [each.method for each in results if each.method not in (*ours, "none")]
    colors = {"none": _FLOOR}
    colors |= {name: _BASELINES[i % len(_BASELINES)] for i, name in enumerate(theirs)}
    return colors | {name: _HIPRESS[i % len(_HIPRESS)] for i, name in enumerate(ours)}


def style(axes: Axes, title: str = "") -> None:
    """Apply the look that charts share."""
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_axisbelow(True)


def label(axes: Axes, x: float, y: float, text: str) -> None:
    """Write a text beside a mark."""
    axes.annotate(
        text, (x, y), (6, 0), textcoords="offset points", va="center", fontsize=9, color=INK
    )


def _step_times(axes: Axes, good: Sequence[Row], colors: dict[str, str]) -> None:
    style(axes, "Step time, ms (median, p10 to p90)")
    for position, row in enumerate(good):
        method = row.result.method
        low, middle, high = (1e3 * each for each in (row.low, row.median, row.high))
        axes.barh(position, middle, color=colors[method], height=0.68)
        span = [[max(0, middle - low)], [max(0, high - middle)]]
        axes.errorbar(middle, position, xerr=span, color=INK, lw=1, capsize=2)
        compared = row.over_fp16 is not None and method not in (*ALONE, "ddp-fp16")
        gain = f"   {row.over_fp16:.2f}x vs fp16" if compared else ""
        label(axes, max(high, middle), position, f"{middle:.0f}{gain}")
    _name_bars(axes, [row.result.label for row in good])
    floor = [row.median for row in good if row.result.method == "none"]
    if floor:
        axes.axvline(1e3 * floor[0], color=INK, lw=0.8, ls=":", zorder=0)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.45)


def _sizes(axes: Axes, good: Sequence[Row], colors: dict[str, str]) -> None:
    """Draw payloads as bars, with their numbers above the middle, and bytes on the interface as
    marks, with theirs below; these are fewer if repeated blocks are not sent."""
    style(axes, "MB per step and rank; | marks the interface's")
    for position, row in enumerate(good):
        payload, wire = (each or 0 for each in (row.result.payload_bytes, row.result.wire_bytes))
        axes.barh(position, payload / 1e6, color=colors[row.result.method], height=0.68)
        half = 0.17 if wire else 0
        label(axes, payload / 1e6, position - half, _megabytes(payload))
        if wire:
            axes.plot(wire / 1e6, position + half, "|", color=INK, ms=9, mew=1.6)
            label(axes, max(payload, wire) / 1e6, position + half, _megabytes(wire))
    _name_bars(axes, [""] * len(good))
    axes.set_xlim(0, axes.get_xlim()[1] * 1.2)


def _losses(axes: Axes, results: Iterable[Result], colors: dict[str, str]) -> None:
    style(axes, "Loss against training time, s (mean of 10 steps)")
    axes.grid(axis="y", color=GRID, lw=0.8)
    for result in results:
        if result.method in ALONE:
            continue  # not synchronized: its loss is that of several drifting models
        curves = result.curves or [_curve(result)]
        clocks = zip(*(accumulate(curve.seconds) for curve in curves), strict=False)
        losses = list(zip(*(smooth(curve.losses) for curve in curves), strict=False))
        clock, middle = ([statistics.median(each) for each in of] for of in (clocks, losses))
        color, ours = colors[result.method], is_ours(result.method)
        axes.plot(clock, middle, color=color, label=result.label, lw=2.2 if ours else 1.6,
                  zorder=3 if ours else 2)  # fmt: skip
        if len(curves) > 1:
            low, high = [min(each) for each in losses], [max(each) for each in losses]
            axes.fill_between(clock, low, high, color=color, alpha=0.18, lw=0)
    if axes.lines:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    axes.set_xlim(left=0)


def _curve(result: Result) -> Curve:
    """The curve of a single round, whose warm-up counts as ordinary steps: compilation, once, says
    nothing about training."""
    typical = statistics.median(result.timed)
    after = result.seconds[result.warmup :]
    return Curve([typical] * result.warmup + after, result.losses)


def _efficiencies(axes: Axes, bandwidths: Sequence[float], lines: Iterable[_Line]) -> None:
    for each in lines:
        y = [100 * value for value in each.values]
        axes.plot([b * 8e-9 for b in bandwidths], y, color=each.color, lw=2.2, label=each.label)
    axes.grid(color=GRID, lw=0.8)
    axes.set(xscale="log", ylim=(0, 103))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("Gbit/s of a link, each way", color=INK)


def _gain(axes: Axes, x: Sequence[float], curve: predictions.Curve, codecs: Sequence[str]) -> None:
    """Shade the gain of the best codec over the baseline."""
    if BASELINE not in curve.efficiencies or not codecs:
        return
    base = [100 * each for each in curve.efficiencies[BASELINE]]
    every = zip(*(curve.efficiencies[name] for name in codecs), strict=True)
    best = [100 * max(each) for each in every]
    gains = [b > a for a, b in zip(base, best, strict=True)]
    axes.fill_between(
        x, base, best, where=gains, interpolate=True, color="#2e9e6b", alpha=0.12, lw=0,
        label="gained over bf16",
    )  # fmt: skip


def _draw_lanes(axes: Axes, title: str, lanes: dict[str, list[_Bar]], end: float) -> None:
    """Draw the bars of each lane, and a line at the step's end."""
    style(axes, f"{title}: {1e3 * end:.1f} ms")
    for place, bars in enumerate(lanes.values()):
        spans_ = [(1e3 * bar.begin, 1e3 * max(bar.end - bar.begin, 1e-4)) for bar in bars]
        axes.broken_barh(spans_, (place - 0.37, 0.74), color=[bar.color for bar in bars], lw=0)
    axes.axvline(1e3 * end, color=_END, lw=1.2)
    axes.set_yticks(range(len(lanes)), [*lanes])
    axes.set_xlim(0, None)
    axes.invert_yaxis()


def _name_bars(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def _megabytes(count: float) -> str:
    """Bytes in MB, three digits; a few packets of the kernel itself are negligible."""
    return "<0.001" if 0 < count < 1e3 else f"{count / 1e6:.3g}"


def png(size: tuple[float, float]) -> Figure:
    """A figure of this many inches, for a file of pixels."""
    figure = Figure(figsize=size, dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _svg(figure: Figure) -> str:
    """An SVG element with real text, as wide as its container."""
    FigureCanvasSVG(figure)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return "<svg" + text.getvalue().partition("<svg")[2]
