"""The output of `compll bench`: a table, JSON, and a roofline plot."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.table import Table

from compll.files import replacing
from compll.tools.measure import OPERATIONS, Rate, Row

TITLES = {
    "encode": "encode", "encode_feedback": "feedback", "decode": "decode", "decode_add": "add",
    "merge": "merge",
}  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    """A row per codec and size. feedback: encode with its states; add: decode and add; merge:
    decode, add and encode in one kernel, as an aggregator does (if the backend has one). ±: the
    largest spread of the row's medians. copy: GB/s read plus written."""
    found = Table(
        title="GB/s of gradient, and % of a copy of the moved bytes",
        title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for head in ("spec", "size", "saves", *TITLES.values(), "±", "copy"):
        found.add_column(head, justify="left" if head == "spec" else "right", overflow="fold")
    for row in rows:
        cells = [cell(row.rates.get(name)) for name in OPERATIONS]
        spread = max(rate.spread for rate in row.rates.values())
        found.add_row(
            row.codec, short(row.elements), f"{row.ratio:.4g}x", *cells,
            f"{spread:.0%}", f"{row.copy:.3g}",
        )  # fmt: skip
    return found


def cell(rate: Rate | None) -> str:
    """A rate and its share of the bound."""
    return "-" if rate is None else f"{rate.rate:.3g} {rate.share:.0%}"


def short(count: int) -> str:
    """A number of elements: 12M, 100k, 4096."""
    for scale, letter in ((10**6, "M"), (10**3, "k")):
        if count % scale == 0:
            return f"{count // scale}{letter}"
    return str(count)


def about() -> dict[str, str]:
    """The machine and the versions that the figures belong to."""
    found = {"date": date.today().isoformat(), "cpu": cpu(), "python": platform.python_version()}
    for package in ("numpy", "llvmlite"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def cpu() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def data(rows: Sequence[Row]) -> dict[str, Any]:
    """All measurements, for JSON."""
    return {"about": about(), "rows": [row.data() for row in rows]}


def formats() -> set[str]:
    """Kinds of pictures that can be written, by the endings of their files."""
    from matplotlib.figure import Figure

    return set(Figure().canvas.get_supported_filetypes())


def plot(rows: Sequence[Row], path: Path) -> None:
    """A roofline: the rate of each operation of the largest size over its intensity.

    Intensity is bytes of gradient per byte moved; the roof is the copy bandwidth times that.
    """
    from matplotlib.figure import Figure

    most = max(row.elements for row in rows)
    rows = [row for row in rows if row.elements == most]
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    marks = dict(zip(OPERATIONS, "o^sDv", strict=True))
    for name, mark in marks.items():
        points = [(4 / r.rates[name].moved, r.rates[name].rate, r.codec)
                  for r in rows if name in r.rates]  # fmt: skip
        axes.scatter([p[0] for p in points], [p[1] for p in points], marker=mark, s=28,
                     label=TITLES[name], zorder=3)  # fmt: skip
        for x, y, codec in points if len(rows) <= 12 or name.startswith("encode") else ():
            axes.annotate(codec, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
    copy = sorted(row.copy for row in rows)[len(rows) // 2]
    spots = [4 / r.moved for row in rows for r in row.rates.values()]
    ends = [min(spots) * 0.8, max(spots) * 1.25]
    axes.plot(ends, [copy * x for x in ends], color="black", label=f"copy: {copy:.1f} GB/s moved")
    axes.set(
        xscale="log", yscale="log", xlabel="bytes of gradient per byte moved",
        ylabel="GB/s of gradient", title=f"{most:,} elements, {rows[0].target}",
    )  # fmt: skip
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)
