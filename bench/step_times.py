"""The table of step times in docs/measurements/steps.md, from results of bench.training."""

from __future__ import annotations

from pathlib import Path

from hipress.tools.results import Results
from hipress.tools.run.figures import rows

#: titles of columns, by group of bench.training
COLUMNS = {
    "hosts2": "2 hosts, 1 Gbit/s",
    "hosts4": "4 hosts, 1 Gbit/s",
    "slow": "2 hosts, 100 Mbit/s",
    "loopback": "2 ranks, loopback",
}
HEAD = ("ms a step", *COLUMNS.values())
#: methods that would need an explanation here; bench/results has them
_LEFT_OUT = ("ddp-noop", "sync:")


def cells(results: Path) -> list[tuple[str, ...]]:
    """A line for each method: median milliseconds a step by group, empty if not measured."""
    by_column = {
        name: rows(Results.read(results / f"{name}.json").reports[0].results) for name in COLUMNS
    }
    every = [row.result for group in by_column.values() for row in group]
    labels = dict.fromkeys(each.label for each in every if not each.method.startswith(_LEFT_OUT))
    medians = {
        (name, row.result.label): f"{1e3 * row.median:.0f}"
        for name, group in by_column.items()
        for row in group
    }
    return [(label, *(medians.get((name, label), "") for name in COLUMNS)) for label in labels]
