"""The tables that `hipress simulate` prints."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table as Printed

from hipress.tools.simulate.predictions import Row, Table

__all__ = ["bandwidth", "show"]

_COLUMNS = ("method", "strategy", "step ms", "efficiency", "exposed ms", "MB a node",
            "over bf16", "pays up to", "loss")  # fmt: skip


def show(made: Table) -> None:
    """Print the predictions, and the assumptions below them."""
    console, model = Console(), made.model
    printed = Printed(title=_title(made), title_justify="left")
    for name in _COLUMNS:
        left = name in ("method", "strategy", "loss")
        printed.add_column(name, justify="left" if left else "right", no_wrap=name == "method")
    for row in made.rows:
        printed.add_row(*_cells(row))
    console.print(printed)
    console.print(f"{model.name}: {model.source}" if model.source else model.name)
    _list(console, "Assumed, not measured:", made.assumed)


def _title(made: Table) -> str:
    model = made.model
    return (
        f"{model.name}, {model.numel / 1e6:,.1f}M parameters in {len(model.gradients)} gradients, "
        f"{1e3 * made.alone:,.1f} ms a step alone; {made.cluster}"
    )


def _cells(row: Row) -> tuple[str, ...]:
    each = row.outcome
    return (
        each.method, each.strategy, f"{1e3 * each.step:,.1f}", f"{each.efficiency:.0%}",
        f"{1e3 * each.exposed:,.1f}", f"{each.node_bytes / 1e6:,.1f}",
        "-" if row.gain is None else f"{row.gain:.2f}x", _pays(row.pays_up_to), row.loss,
    )  # fmt: skip


def _pays(value: float | None) -> str:
    if value is None:
        return "-"
    if value == 0:
        return "nowhere"
    return "always" if math.isinf(value) else bandwidth(value)


def bandwidth(value: float) -> str:
    """A bandwidth in bytes a second as text in bits: `12 Gbit/s`."""
    for unit, worth in (("Gbit/s", 1.25e8), ("Mbit/s", 1.25e5)):
        if value >= worth:
            return f"{value / worth:.3g} {unit}"
    return f"{value * 8:.3g} bit/s"


def _list(console: Console, title: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    if lines:
        console.print(title)
    for line in lines:
        console.print(f"- {line}", highlight=False)
