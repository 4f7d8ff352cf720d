"""The tables that `hipress simulate` prints."""

from __future__ import annotations

import math
import textwrap

from hipress.reporting.text_table import WIDTH, Table
from hipress.tools.simulate import predictions
from hipress.tools.simulate.outer_rounds import ENOUGH, Rounds

__all__ = ["bandwidth", "rounds", "show"]

_TEXTS = ("method", "strategy", "loss")
_NUMBERS = ("step ms", "efficiency", "exposed ms", "MB a node", "over bf16", "pays up to", "GB")


def show(predicted: predictions.Table) -> None:
    """Print the predictions, and the assumptions below them."""
    model = predicted.model
    table = Table(
        _title(predicted),
        "exposed: what communication adds to a step. MB a node: sent in a step. over bf16: speed "
        "over that of PyTorch in bf16 (DDP's hook, or FSDP2), and the bandwidth up to which it is "
        "2% higher. GB: memory of a rank for weights, gradients and states, without activations.",
    )
    table.add_columns(_TEXTS, _NUMBERS)
    for row in predicted.rows:
        table.add_row(*_cells(row))
    table.print()
    print(f"\n{model.name}: {model.source}" if model.source else f"\n{model.name}")
    print("Assumed, not measured:")
    for line in predicted.assumed:
        print(textwrap.fill(f"- {line}", WIDTH, subsequent_indent="  "))


def _title(table: predictions.Table) -> str:
    model = table.model
    return (
        f"{model.name}, {model.numel / 1e6:,.1f}M parameters in {len(model.gradients)} gradients, "
        f"{1e3 * table.alone:,.1f} ms a step alone; {table.cluster}"
    )


def _cells(row: predictions.Row) -> tuple[str, ...]:
    each = row.outcome
    return (
        each.method, each.strategy, row.loss, f"{1e3 * each.step:,.1f}", f"{each.efficiency:.0%}",
        f"{1e3 * each.exposed:,.1f}", f"{each.node_bytes / 1e6:,.1f}",
        "-" if row.gain is None else f"{row.gain:.2f}x", _pays(row.pays_up_to),
        f"{row.memory / 1e9:,.3g}",
    )  # fmt: skip


def _pays(value: float | None) -> str:
    if value is None:
        return "-"
    if value == 0:
        return "nowhere"
    return "always" if math.isinf(value) else bandwidth(value)


def rounds(loop: Rounds) -> str:
    """A line on the rounds of an outer loop."""
    pays = {0.0: "on no link", math.inf: "on every link"}.get(
        loop.pays_up_to, f"up to {bandwidth(loop.pays_up_to)}"
    )
    return (
        f"Outer loop of {loop.sites} sites by {loop.compressor}, {loop.schedule}: a round takes "
        f"{1e3 * loop.seconds:,.1f} ms, {1e3 * loop.exposed:,.1f} of them exposed, and sends "
        f"{loop.site_bytes / 1e6:,.1f} MB a site; {1e3 * loop.step:,.1f} ms a step, "
        f"{loop.training:.1%} in training ({ENOUGH:.0%} from --every {loop.enough} on). A step "
        f"takes 2% less than by the fastest method in each step ({loop.rival} here) {pays}; but "
        "local steps cost loss."
    )


def bandwidth(value: float) -> str:
    """A bandwidth in bytes a second as text in bits: `12 Gbit/s`."""
    for unit, worth in (("Gbit/s", 1.25e8), ("Mbit/s", 1.25e5)):
        if value >= worth:
            return f"{value / worth:.3g} {unit}"
    return f"{value * 8:.3g} bit/s"
