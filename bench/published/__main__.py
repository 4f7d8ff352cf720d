"""Published results beside their predictions, and the relative errors.

    python -m bench.published                  # every table
    python -m bench.published --charts docs    # and the charts of docs/measurements/published.md
    python -m bench.published --fit            # fits the numbers that published.yaml marks for it

published.yaml has the fitted, predicted and assumed numbers; see docs/measurements/published.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.commands import refusing
from bench.published import ablation, emulated, others, readiness
from bench.published import data as data_
from bench.published.data import Cell, Data
from bench.published.hipress_paper import Paper

CLOSE, NEAR = 0.15, 0.30  # of a figure, and of exposed milliseconds


def main(
    charts: Annotated[Path | None, typer.Option(help="Draw charts into this folder.")] = None,
    fit: Annotated[bool, typer.Option(help="Fit the numbers marked so, and print them.")] = False,
) -> None:
    """Predict published results and print the relative errors."""
    with refusing():
        data = data_.load()
    paper, console = Paper(data["hipress"]), Console()
    hosts = emulated.Emulated.of(data["emulated"])
    places = [*emulated.read_places(data["emulated"])]
    if fit:
        console.print(paper.fitted(), hosts.fitted(places))
        return
    _print_kinds(console, data)
    ready = [*readiness.readiness()]
    _print_readiness(console, ready)
    cells = [*_cells(data, paper)]
    for title, some in groupby(cells, key=lambda each: each.experiment):
        _print_cells(console, title, [*some])
    _print_orders(console, cells)
    curve = others.sidco(data["sidco"])
    _print_sidco(console, curve)
    _print_null(console, paper)
    own = [*hosts.cells(places)]
    _print_cells(console, "this repository's emulated hosts, ms a step", own)
    count, median, worst = emulated.quality(own)
    console.print(
        f"{count} cells not fitted: off by {median:.1%} in the median, at most {worst:.1%}"
    )
    console.print(_summary(cells))
    if charts is not None:
        from bench.published.charts import draw

        draw(charts, cells, ready, curve, data)


def _cells(data: Data, paper: Paper) -> Iterable[Cell]:
    yield from paper.table()
    yield from paper.curves()
    yield from ablation.ablation(data["ablation"])
    yield from others.espresso(data["espresso"], paper)
    yield from others.sidco_cells(data["sidco"])
    yield from others.onebit_adam(data["onebit_adam"])
    yield from others.sdp4bit(data["sdp4bit"])


def _print_kinds(console: Console, data: Data) -> None:
    counted = data_.kinds(data)
    console.print("numbers in published.yaml:", ", ".join(f"{n} {k}" for k, n in counted.items()))


def _print_readiness(console: Console, rows: Sequence[readiness.Readiness]) -> None:
    table = Table("model", title="When gradients are ready, against a V100", title_justify="left")
    for name in ("backward ms", "off by, of the pass", "by elements"):
        table.add_column(name, justify="right")
    for each in rows:
        shares = (f"{100 * share:.1f}%" for share in (each.roofline, each.elements))
        table.add_row(each.model, f"{each.milliseconds:.1f}", *shares)
    console.print(table)


def _print_cells(console: Console, title: str, cells: Sequence[Cell]) -> None:
    table = Table("", "", title=title, title_justify="left")
    for name in ("published", "predicted", "error", "exposed ms"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in cells:
        exposed = "" if each.exposed is None else f"{each.exposed[0]:.0f} -> {each.exposed[1]:.0f}"
        numbers = (_number(each.published), _number(each.predicted), f"{100 * each.error:+.1f}%")
        table.add_row(each.row, each.column, *numbers, exposed, each.kind)
    console.print(table)
    console.print(_summary(cells))


def _print_orders(console: Console, cells: Sequence[Cell]) -> None:
    """Print the order of systems by speed, and the gain of each part of HiPress."""
    table = [each for each in cells if each.experiment == "hipress table"]
    steps = [each for each in cells if each.experiment == "hipress ablation"]
    rows = {row: [*some] for row, some in groupby(table, key=lambda each: each.row)}
    right = [row for row, some in rows.items() if ordered(some)]
    console.print(f"order of systems as published: {len(right)} of {len(rows)} models")
    console.print(f"the ablation's order is as published: {ablation.in_order(steps)}")


def ordered(cells: Sequence[Cell]) -> bool:
    """True if systems that differ by more than CLOSE are predicted in their published order."""
    return all(
        (a.predicted < b.predicted)
        for a in cells
        for b in cells
        if a.published * (1 + CLOSE) < b.published
    )


def _print_sidco(console: Console, curve: Sequence[others.Sidco]) -> None:
    shares = ", ".join(f"{each.over_none:.1f}x at {each.share:.0%}" for each in curve)
    console.print(f"SIDCo over none, by what TCP reaches of 25 Gbit/s: {shares}")


def _print_null(console: Console, paper: Paper) -> None:
    """A rule without a model, which every prediction has to beat."""
    ours = [c for c in paper.table() if c.column.startswith("HiPress")]
    null = [*paper.null()]
    console.print(
        f"null model, HiPress scales to 90% whatever is trained: off by {_mean(null):.1%} in the "
        f"mean, at most {_worst(null):.1%}; predicted: {_mean(ours):.1%}, {_worst(ours):.1%}"
    )


def _mean(cells: Sequence[Cell]) -> float:
    return sum(abs(each.error) for each in cells) / len(cells)


def _worst(cells: Sequence[Cell]) -> float:
    return max(abs(each.error) for each in cells)


def _summary(cells: Sequence[Cell]) -> str:
    predicted = [each for each in cells if each.kind == "predicted"]
    close = sum(abs(each.error) <= CLOSE for each in predicted)
    text = f"predicted cells within {CLOSE:.0%}: {close} of {len(predicted)}"
    own = [e for e in predicted if e.exposed_error is not None and _is_table(e)]
    if not own:
        return text
    near = sum(abs(each.exposed_error or 0.0) <= NEAR for each in own)
    return f"{text}; exposed within {NEAR:.0%}: {near} of {len(own)}"


def _is_table(cell: Cell) -> bool:
    """True for HiPress's columns at 128 GPUs, where throughput says little: see the null model."""
    return cell.experiment == "hipress table" and cell.column.startswith("HiPress")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    typer.run(main)
