"""Charts of predictions: efficiency against bandwidth, and the lanes of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from casync.stages import ENTER, INSIDE, LEAVE, WIRE, WORK
from hipress.tools.simulate.methods import BASELINE, FP32
from hipress.tools.simulate.results import Curve, Table, Timeline
from hipress.tools.simulate.show import bandwidth

__all__ = ["draw", "draw_timelines"]

_INK, _GRID = "#26303b", "#e8ebef"
_COLORS = ("#2e9e6b", "#e4572e", "#7b3fa0", "#f2a03d", "#c2185b", "#8d6e63", "#1f7a8c", "#5c6bc0")
_TICKS = (1e-2, 1e-1, 1, 10, 100, 1000, 10000)  # Gbit/s
_LANES = {WORK: "codec", WIRE: "between nodes", INSIDE: "within a node", LEAVE: "to the host",
          ENTER: "to the device"}  # fmt: skip
_SHADES = ("#4b5d73", "#a1b4c9")


def draw(made: Table, curve: Curve, path: Path) -> None:
    """Draw a PNG of 1104 by 744 pixels: per cent of the speed of a rank alone, by bandwidth."""
    figure = Figure(figsize=(9.2, 6.2), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _style(axes)
    x = [each * 8e-9 for each in curve.bandwidths]
    _gain(axes, x, curve)
    colors = _colored(curve)
    for row in made.rows:
        method = row.outcome.method
        y = [100 * each for each in curve.efficiencies[method]]
        plain = method in (FP32, BASELINE)
        axes.plot(
            x, y, color=colors[method], lw=2.0 if plain else 2.4, label=_label(method, row.loss)
        )
    _here(axes, made)
    axes.set(xscale="log", xlim=(x[0], x[-1]), ylim=(0, 103))
    axes.set_xticks([t for t in _TICKS if x[0] <= t <= x[-1]], minor=False)
    axes.set_xticklabels([f"{t:g}" for t in _TICKS if x[0] <= t <= x[-1]])
    axes.set_xlabel("Gbit/s of a link, each way", color=_INK)
    axes.set_ylabel("% of the speed without communication", color=_INK)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor=_INK)
    figure.suptitle(_headline(made), fontsize=12, color=_INK, x=0.01, ha="left")
    figure.savefig(path)


def draw_timelines(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw a PNG with a panel per timeline: the lanes during the backward pass, and after it."""
    figure = Figure(figsize=(10, 2.4 * len(timelines) + 0.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), 1, squeeze=False, sharex=True)[:, 0]
    for axes, each in zip(panels, timelines, strict=True):
        _lanes(axes, each)
    panels[-1].set_xlabel("ms since the first gradients were ready", color=_INK)
    figure.savefig(path)


def _lanes(axes: Axes, made: Timeline) -> None:
    """Draw a timeline; successive buckets have different shades."""
    names = [*dict.fromkeys(event.lane for event in made.events)]
    order = [lane for lane in _LANES if lane in names]
    order += [lane for lane in names if lane not in _LANES]
    axes.broken_barh([(0, 1e3 * made.backward)], (-0.36, 0.72), color="#f2c14e")
    for place, lane in enumerate(order, 1):
        for shade, color in enumerate(_SHADES):
            bars = [
                (1e3 * event.begin, 1e3 * (event.end - event.begin))
                for event in made.events
                if event.lane == lane and event.load % 2 == shade
            ]
            axes.broken_barh(bars, (place - 0.36, 0.72), color=color, lw=0)
    axes.set_yticks(range(len(order) + 1), ["backward pass", *(_LANES.get(o, o) for o in order)])
    axes.axvline(1e3 * made.step, color="#e4572e", lw=1.4)
    _style(axes)
    axes.grid(axis="y", visible=False)
    axes.set_title(
        f"{made.method}: {1e3 * made.step:.1f} ms", fontsize=10.5, color=_INK, loc="left"
    )
    axes.set_xlim(0, None)
    axes.invert_yaxis()


def _gain(axes: Axes, x: Sequence[float], curve: Curve) -> None:
    """Shade the gain of the best codec over the baseline."""
    codecs = [y for name, y in curve.efficiencies.items() if name not in (FP32, BASELINE)]
    if BASELINE not in curve.efficiencies or not codecs:
        return
    base = [100 * each for each in curve.efficiencies[BASELINE]]
    best = [100 * max(each) for each in zip(*codecs, strict=True)]
    gains = [b > a for a, b in zip(base, best, strict=True)]
    axes.fill_between(
        x, base, best, where=gains, interpolate=True, color=_COLORS[0], alpha=0.12, lw=0,
        label="gained over bf16",
    )  # fmt: skip


def _colored(curve: Curve) -> dict[str, str]:
    others = [name for name in curve.efficiencies if name not in (FP32, BASELINE)]
    colors = {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(others)}
    return {FP32: "#b9c0c8", BASELINE: _INK, **colors}


def _label(method: str, loss: str) -> str:
    if method in (FP32, BASELINE):
        return f"{method} all-reduce"
    return f"{method}, loss {loss}"


def _here(axes: Axes, made: Table) -> None:
    axes.axvline(made.bandwidth * 8e-9, color=_INK, lw=0.9, ls=":")
    axes.annotate(
        bandwidth(made.bandwidth), (made.bandwidth * 8e-9, 2), (4, 0), textcoords="offset points",
        fontsize=9, color=_INK,
    )  # fmt: skip


def _headline(made: Table) -> str:
    return (
        f"{made.model.name} on {made.cluster}\npredicted; {1e3 * made.alone:,.1f} ms a step alone"
    )


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(color=_GRID, lw=0.8)
    axes.set_axisbelow(True)
