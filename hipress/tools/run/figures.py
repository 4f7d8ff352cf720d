"""Figures of results: medians and ratios, the table, and the JSON from which both are made."""

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from rich import box
from rich.console import Group
from rich.table import Table

from compll.tools.measure import cpu
from hipress.tools.run.jobs import Result, Workload
from hipress.tools.run.methods import ALONE, is_ours

SPEED = ("step ms", "p10-p90", "vs fp16", "vs fp32", "x no comm.")
PRICE = ("payload MB", "wire MB", "peak MB", "loss", "to fp32", "ranks")
PRICE_TITLE = (
    "MB sent by a rank in a step (payload: for other ranks; wire: on its interface, less where "
    "blocks repeat), peak MB of its process's memory, and loss"
)
FINAL = 10  # number of last steps whose mean is the final loss
_PACKAGES = ("hipress", "torch", "numpy", "llvmlite")


@dataclass(frozen=True)
class Report:
    """A run of several methods, with all that is needed to repeat it."""

    place: str  # a sentence: emulated links or loopback
    hosts: int  # ranks
    rate: str
    steps: int
    workload: Workload
    results: list[Result]
    command: str
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    versions: dict[str, str] = field(default_factory=lambda: versions_here())
    per_host: int = 1  # of the ranks


@dataclass(frozen=True)
class Row:
    """Figures of a method: seconds, bytes sent by a rank in a step, and ratios, or None."""

    result: Result
    median: float
    low: float  # 10th percentile
    high: float  # 90th percentile
    over_fp16: float | None  # speed-up: the baseline's step time over this one's
    over_fp32: float | None
    of_floor: float | None  # step time relative to no communication
    loss: float
    loss_difference: float | None  # relative to fp32


def rows(results: Sequence[Result]) -> list[Row]:
    """A row for each method that ran."""
    good = {result.method: result for result in results if result.error is None}
    return [_row(result, good) for result in good.values()]


def final_loss(result: Result) -> float:
    """The mean loss of the last steps, nats per word."""
    return statistics.fmean(result.losses[-FINAL:])


def smooth(values: Sequence[float], width: int = 10) -> list[float]:
    """The running mean of up to `width` last values."""
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def tables(report: Report) -> Group:
    """Tables of speed and price, one above the other, so that 80 columns suffice."""
    return Group(
        _table(report, "speed", SPEED, slice(0, 5)),
        _table(report, PRICE_TITLE, [head.removesuffix(" MB") for head in PRICE], slice(5, None)),
    )


def _table(report: Report, title: str, heads: Sequence[str], part: slice) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("method", overflow="fold")  # the others are never cut
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    ran = {row.result.method: row for row in rows(report.results)}
    for result in report.results:
        style = "bold green" if is_ours(result.method) else ""
        if result.error is None:
            table.add_row(result.label, *cells(ran[result.method])[part], style=style)
        else:
            table.add_row(result.label, "failed", style="red")
    return table


def failures(report: Report) -> list[str]:
    """A line for each method that failed."""
    return [f"{each.label}: {each.error}" for each in report.results if each.error is not None]


def markdown(report: Report) -> str:
    """The figures as Markdown."""
    body = [(row.result.label, *cells(row)) for row in rows(report.results)]
    text = markdown_table(("method", *SPEED, *PRICE), body)
    return "\n".join([text, *(f"\nFailed: {line}" for line in failures(report))]) + "\n"


def markdown_table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(result: Result, good: dict[str, Result]) -> Row:
    median = statistics.median(result.timed)
    fp32 = good.get("ddp-fp32")
    loss = final_loss(result)
    compared = fp32 is not None and result.method not in ALONE
    return Row(
        result,
        median,
        percentile(result.timed, 0.1),
        percentile(result.timed, 0.9),
        _ratio(good.get("ddp-fp16"), median),
        _ratio(fp32, median),
        None if "none" not in good else median / statistics.median(good["none"].timed),
        loss,
        loss / final_loss(fp32) - 1 if compared and fp32 else None,
    )


def percentile(values: Sequence[float], part: float) -> float:
    """The value below which `part` of the values lie, by the nearest rank."""
    ordered = sorted(values)
    return ordered[round(part * (len(ordered) - 1))]


def _ratio(baseline: Result | None, median: float) -> float | None:
    return None if baseline is None else statistics.median(baseline.timed) / median


def cells(row: Row) -> tuple[str, ...]:
    """The figures of a row as text, in the order of SPEED and PRICE."""
    result = row.result
    same = {None: "-", True: "equal", False: "DIFFER"}[result.identical]
    alone = result.method in ALONE  # the models drift apart: their loss means nothing
    return (
        f"{1e3 * row.median:.0f}",
        f"{1e3 * row.low:.0f}-{1e3 * row.high:.0f}",
        _format(row.over_fp16, "{:.2f}x"),
        _format(row.over_fp32, "{:.2f}x"),
        _format(row.of_floor, "{:.2f}"),
        "-" if alone else _format(_mega(result.payload_bytes), "{:.2f}"),
        "-" if alone else _format(_mega(result.wire_bytes), "{:.2f}"),
        _format(_mega(result.peak_bytes), "{:.0f}"),
        "-" if alone else f"{row.loss:.3f}",
        "-" if alone else _format(row.loss_difference, "{:+.2%}"),
        same,
    )


def _format(value: float | None, pattern: str) -> str:
    return "-" if value is None else pattern.format(value)


def _mega(value: float | None) -> float | None:
    return None if value is None else value / 1e6


def versions_here() -> dict[str, str]:
    """Processor and versions of this machine, by name."""
    versions = {"cpu": f"{cpu()} ({os.cpu_count()} cores)", "python": platform.python_version()}
    versions["kernel"] = platform.release()
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions
